"""The candidate's side of the bridge: loads a submission and does with it what the grader asks (CODEC.md, section 3).

Once the submission is loaded, all of this memory is the submission's to change, this module included. Nothing here is
relied on for the verdict: a reply is data to the grader, and a broken or missing one fails the test.
"""

import builtins
import sys
import types

import _wardian_guest
import _wardian_values

# A message's text is cut to this many characters.
_MESSAGE_LIMIT = 500

_BUILTIN_EXCEPTIONS = {
    value for value in vars(builtins).values() if isinstance(value, type) and issubclass(value, Exception)
}

# Types that a call may change in place, as far as the grader can see.
_MUTABLE = (list, dict, set, bytearray)

# Handles: the index of an object is its id. The list keeps the objects alive, so their addresses stay theirs.
_objects = []
_id_by_address = {}


class _SolutionLoader:
    """The submission's loader: lets `inspect` and tracebacks show its source."""

    source = ""

    @classmethod
    def get_source(cls, name):
        return cls.source


def _new_solution():
    module = types.ModuleType("solution")
    module.__file__ = "solution.py"
    module.__loader__ = _SolutionLoader
    module.__builtins__ = builtins
    return module


_solution = _new_solution()


def reset():
    """Forgets the submission and all handles."""
    global _solution
    _objects.clear()
    _id_by_address.clear()
    _SolutionLoader.source = ""
    _solution = _new_solution()
    sys.modules.pop("solution", None)


def _send_other(value):
    packed = _wardian_values.pack(value)
    if packed is not None:
        return packed
    handle = _id_by_address.get(id(value))
    if handle is None:
        handle = _id_by_address[id(value)] = len(_objects)
        _objects.append(value)
    return handle


def _receive_handle(handle, name):
    return _objects[handle]


def _encode(value):
    return _wardian_guest.encode(value, _send_other)


def decode(request):
    return _wardian_guest.decode(request, _wardian_values.unpack, _receive_handle)


def _load(code):
    sys.modules["solution"] = _solution
    _SolutionLoader.source = code
    exec(compile(code, "solution.py", "exec", dont_inherit=True), _solution.__dict__)


def _kind(name):
    if name not in _solution.__dict__:
        return 0
    value = _solution.__dict__[name]
    if isinstance(value, type):
        return 3
    return 1 if callable(value) else 2


def _next(iterator, count):
    members = []
    for member in iterator:
        members.append(member)
        if len(members) >= count:
            break
    return members


def _call_global_or_handle(function, arguments, keywords):
    if isinstance(function, str):
        function = _solution.__dict__[function]
    return function(*arguments, **keywords)


# Operations whose positional arguments the callee may change; they are at this place of the message.
_ARGUMENTS_AT = {"call": 2, "meth": 3}

_OPERATIONS = {
    "load": _load,
    "kind": _kind,
    "glob": lambda name: _solution.__dict__[name],
    "call": _call_global_or_handle,
    "meth": lambda value, name, arguments, keywords: getattr(value, name)(*arguments, **keywords),
    "get": getattr,
    "set": setattr,
    "item": lambda value, key: value[key],
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "iter": iter,
    "next": _next,
}


def _has_mutable(arguments):
    return any(
        isinstance(argument, _MUTABLE) or (isinstance(argument, tuple) and _has_mutable(argument))
        for argument in arguments
    )


def _exception_reply(error, changed):
    kind = type(error)
    base = next((c.__name__ for c in kind.__mro__ if c in _BUILTIN_EXCEPTIONS), "Exception")
    try:
        return _encode((1, base, kind.__name__, str(error)[:_MESSAGE_LIMIT], changed))
    except BaseException:
        # Its __str__ raises, or its name is no plain text.
        return _encode((1, base, "", "", None))


def serve(message):
    """Does what `message` says and returns the encoded reply."""
    operation, *operands = message
    # To see whether the call changes its arguments, compare what they look like on the wire before and after.
    arguments = before = changed = None
    at = _ARGUMENTS_AT.get(operation)
    try:
        if at is not None and _has_mutable(message[at]):
            arguments = message[at]
            before = _encode(arguments)
        try:
            value = _OPERATIONS[operation](*operands)
        finally:
            if before is not None and _encode(arguments) != before:
                changed = arguments
        return _encode((0, value, changed))
    except BaseException as error:
        return _exception_reply(error, changed)


def warm_up():
    """Loads and calls small submissions, for the snapshot's specialized bytecode."""
    reset()
    code = "import math\ndef f(x, y=1):\n    if isinstance(x, list):\n        x.append(y)\n    return x\n"
    for message in [
        ("load", code),
        ("kind", "f"),
        ("call", "f", ([1, 2],), {}),
        ("call", "f", (3,), {"y": 2}),
        ("call", "f", ("text", 2.5), {}),
        ("call", "f", ({"a": (1, None)},), {}),
        ("call", "f", (), {}),
    ]:
        serve(decode(_encode(message)))
