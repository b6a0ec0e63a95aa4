"""The unit-test grader: runs a task's tests against a submission that lives in another instance.

It runs inside the guest, in an instance of its own. Names of the submission are stubs here; calling one sends plain data
to the candidate's instance and gets plain data back (CODEC.md). A verdict is formed in this memory, which no submission
can reach.

Whatever goes wrong on the bridge fails the test, for good: `BridgeError` is no `Exception`, so a test's own
`except Exception` does not swallow it, and a test that swallows it all the same still fails.
"""

import builtins

import _wardian_guest
import _wardian_values
import numpy_stand_in

_MESSAGE_LIMIT = 300

# How many members of an iterable are fetched at a time. An iterator gives them one by one: its own order of events may
# matter to a test.
_CHUNK = 64

# StopIteration would end a loop of the grader's in silence.
_BUILTIN_EXCEPTIONS = {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type)
    and issubclass(value, Exception)
    and not issubclass(value, (StopIteration, StopAsyncIteration))
}

_bridge_call = _wardian_guest.bridge_call

_BRIDGE_ERRORS = {
    -1: "the submission's instance has ended",
    -2: "the submission ran out of time or memory",
}


class RemoteError(Exception):
    """An exception of the submission that no built-in exception can stand for."""


class BridgeError(BaseException):
    """No proper answer came from the submission's instance, or something could not be sent to it."""


# Every BridgeError of the running test: raising one is not enough, the test might catch it.
_bridge_errors = []

# Handles already seen, so that the same object of the submission is the same object here.
_remotes = {}


def _bridge_error(reason):
    _bridge_errors.append(reason)
    return BridgeError(reason)


# ---- values across the bridge


def _send_other(value):
    if type(value) is Remote:
        return _handle_of(value)
    packed = _wardian_values.pack(value)
    if packed is None:
        raise TypeError(f"cannot send a value of type `{type(value).__name__}` to the submission")
    return packed


def _receive_handle(handle, name):
    remote = _remotes.get(handle)
    if remote is None:
        remote = _remotes[handle] = Remote(handle, name)
    return remote


def _encode(value):
    return _wardian_guest.encode(value, _send_other)


def _decode(reply):
    return _wardian_guest.decode(reply, _wardian_values.unpack, _receive_handle)


def _request(*message, arguments=()):
    """Sends one request and returns the reply's value, or raises the submission's exception.

    `arguments` are the objects that the submission may have changed in place.
    """
    try:
        request = _encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise _bridge_error(str(error)) from None
    try:
        reply = _bridge_call(request)
        if type(reply) is int:
            raise _bridge_error(_BRIDGE_ERRORS.get(reply, "the bridge failed"))
        match _decode(reply):
            # `0 == False == 0.0`, and only the first is in the protocol.
            case (int() as status, value, changed) if type(status) is int and status == 0:
                error = None
            case (1, str() as base, str() as name, str() as text, changed):
                value, error = None, _exception(base, name, text)
            case _:
                raise ValueError("unknown reply")
        if changed is not None:
            _apply_changes(arguments, changed)
    except Exception:
        # Out of memory or too deep a recursion as well: the reply is to blame.
        raise _bridge_error("malformed reply") from None
    if error is not None:
        raise error
    return value


def _exception(base, name, text):
    """The grader's own exception for one that the submission raised."""
    described = text if name == base else f"{name}: {text}"
    kind = _BUILTIN_EXCEPTIONS.get(base, RemoteError)
    try:
        return kind(described)
    except TypeError:  # UnicodeDecodeError and its like want more arguments
        return RemoteError(f"{name}: {text}")


# ---- arguments changed in place


def _base_of(value):
    for base in (list, dict, set, bytearray):
        if isinstance(value, base):
            return base
    return None


def _apply_changes(old, new):
    """Makes the arguments `old` look like `new`. Raises ValueError when they do not correspond."""
    if type(new) is not tuple or len(new) != len(old):
        raise ValueError("changed arguments do not fit")
    for old_member, new_member in zip(old, new):
        if isinstance(old_member, tuple):
            _apply_changes(old_member, new_member)
        elif _base_of(old_member) is not None:
            _change(old_member, new_member)


def _change(old, new):
    base = _base_of(old)
    if type(new) is not base:
        raise ValueError("changed argument is of another type")
    if base is list:
        list.__setitem__(old, slice(None), [_keep(*pair) for pair in zip(old, new)] + new[len(old):])
    elif base is dict:
        kept = {key: _keep(dict.get(old, key), value) for key, value in new.items()}
        dict.clear(old)
        dict.update(old, kept)
    elif base is set:
        set.clear(old)
        set.update(old, new)
    else:
        old[:] = new


def _keep(old, new):
    """A mutable member at the same place stays the same object, so that the test's other references see the change."""
    base = _base_of(old)
    if base is not None and type(new) is base:
        _change(old, new)
        return old
    return new


# ---- the submission's objects, seen from here


class Remote:
    """An object that stays in the submission's instance.

    Compared by identity, here: the submission has no say in whether two things are equal.
    """

    __slots__ = ("_handle", "_type_name")

    def __init__(self, handle, type_name):
        _set_slot(self, "_handle", handle)
        _set_slot(self, "_type_name", type_name)

    def __call__(self, *arguments, **keywords):
        return _request("call", self, arguments, keywords, arguments=arguments)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _request("get", self, name)

    def __setattr__(self, name, value):
        _request("set", self, name, value)

    def __getitem__(self, key):
        return _request("item", self, key)

    def __len__(self):
        length = self._typed("len", int)
        if length < 0:
            raise _bridge_error("malformed reply")
        return length

    def __bool__(self):
        return self._typed("bool", bool)

    def __str__(self):
        return self._typed("str", str)

    def __repr__(self):
        return self._typed("repr", str)

    def __iter__(self):
        iterator = self._typed("iter", Remote)
        if iterator is self:
            return self
        return iterator._chunks()

    def __next__(self):
        members = self._typed("next", list, 1)
        if not members:
            raise StopIteration
        return members[0]

    def __contains__(self, value):
        # Compared here: the expected value never crosses.
        return any(value is member or value == member for member in self)

    def _chunks(self):
        while True:
            members = self._typed("next", list, _CHUNK)
            yield from members
            if len(members) < _CHUNK:
                return

    def _typed(self, operation, kind, *operands):
        value = _request(operation, self, *operands)
        if type(value) is not kind:
            raise _bridge_error("malformed reply")
        return value


_set_slot = object.__setattr__
_handle_of = Remote._handle.__get__


def _stub(name):
    """A function of the submission, called by its global name each time."""

    def stub(*arguments, **keywords):
        return _request("call", name, arguments, keywords, arguments=arguments)

    stub.__name__ = stub.__qualname__ = name
    return stub


def _entry(name):
    kind = _request("kind", name)
    if kind == 0:
        raise NameError(f"the submission does not define `{name}`")
    return _stub(name) if kind == 1 else _request("glob", name)


# ---- grading


def _describe(error):
    try:
        text = str(error)
    except BaseException:
        text = ""
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_MESSAGE_LIMIT]


def _run_test(code, namespace):
    _bridge_errors.clear()
    try:
        exec(code, namespace)
    except BaseException as error:
        # Its description may ask the submission for a text, so a bridge error can come up only now.
        description = _describe(error)
        return ("failed", _bridge_errors[0][:_MESSAGE_LIMIT] if _bridge_errors else description)
    if _bridge_errors:
        return ("failed", _bridge_errors[0][:_MESSAGE_LIMIT])
    return ("passed", "")


def grade(setup, tests, entries):
    """Returns one (status, message) per test.

    When none could run: ("broken", message) if the task is at fault, ("invalid", message) if the submission is.
    """
    namespace = {"__name__": "tests", "__builtins__": builtins}
    numpy_stand_in.provide(setup, *tests)
    try:
        # The submission has no part in this yet, so what fails here is the task's.
        codes = [
            compile(source, f"test_{number}.py", "exec", dont_inherit=True) for number, source in enumerate(tests, 1)
        ]
        exec(compile(setup, "setup.py", "exec", dont_inherit=True), namespace)
    except BaseException as error:
        return ("broken", _describe(error))
    try:
        for name in entries:
            namespace[name] = _entry(name)
    except BaseException as error:
        return ("invalid", _describe(error))
    return [_run_test(code, namespace) for code in codes]


def serve(message):
    """Answers the host's `grade` message."""
    match message:
        case ("grade", str() as setup, list() as tests, list() as entries) if all(
            type(text) is str for text in (*tests, *entries)
        ):
            return _encode(grade(setup, tests, entries))
    raise ValueError("malformed message")


def warm_up(answer):
    """Grades small submissions that `answer`, a candidate in this same instance, has loaded.

    Run before the snapshot, for its specialized bytecode.
    """
    global _bridge_call
    tests = [
        "assert math.sqrt(f(4)) == 2",
        "x = [1, 2]\nassert f(x) == [1, 2, 1] and x == [1, 2, 1]",
        "assert [1] == [2]",
        "assert f({'a': (1, None)}) == {'a': (1, None)}",
        "f()",
    ]
    _bridge_call = answer
    serve(("grade", "import math", tests, ["f"]))
    serve(("grade", "", [], ["missing"]))
    _bridge_call = _wardian_guest.bridge_call
    _bridge_errors.clear()
    _remotes.clear()
