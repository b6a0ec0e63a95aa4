"""The candidate's side of the bridge: loads a submission and does with it what the grader asks (CODEC.md, section 3).

Once the submission is loaded, all of this memory is the submission's to change, this module included. Nothing here is
relied on for the verdict: a reply is data to the grader, and a broken or missing one fails the test.
"""

import asyncio
import builtins
import inspect
import math
import operator
import sys
import types

import _wardian_guest
import _wardian_values

# The functions here keep the built-ins as they are now, whatever a submission does to the module.
__builtins__ = dict(vars(builtins))

# A message's text is cut to this many characters.
_MESSAGE_LIMIT = 500

_bridge_call = _wardian_guest.bridge_call

_TOO_DEEP = -3

# Handles: the index of an object is its id. The list keeps the objects alive, so their addresses stay theirs.
_objects = []
_id_by_address = {}

# The grader's objects that were sent here, by id.
_foreign = {}


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
_loop = None


def reset():
    """Forgets the submission and all handles."""
    global _solution, _loop
    _objects.clear()
    _id_by_address.clear()
    _foreign.clear()
    _wardian_values.forget()
    _SolutionLoader.source = ""
    _solution = _new_solution()
    _loop = None
    sys.modules.pop("solution", None)


# ---- values across the bridge


class _Kept:
    """Sends an object as a handle, even if it could go by value."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


_KINDS = {
    types.FunctionType: "function",
    types.LambdaType: "function",
    types.MethodType: "function",
    types.BuiltinFunctionType: "function",
    types.MethodWrapperType: "function",
    types.WrapperDescriptorType: "function",
    types.MethodDescriptorType: "function",
    types.GeneratorType: "generator",
    types.CoroutineType: "coroutine",
    types.AsyncGeneratorType: "async_generator",
}


def _handle_of(value):
    handle = _id_by_address.get(id(value))
    if handle is None:
        handle = _id_by_address[id(value)] = len(_objects)
        _objects.append(value)
    return handle


def _describe(value):
    """Says what an object is: a kind that the grader knows, an exception, or the handle of its class."""
    kind = type(value)
    if issubclass(kind, type):
        return "class"
    known = _KINDS.get(kind)
    if known is not None:
        return known
    if issubclass(kind, BaseException):
        return (_exception_class(kind), kind.__name__, _text(value), value.args, _wardian_values.attributes_of(value))
    return _handle_of(kind)


def _send_other(value):
    kind = type(value)
    if kind is _Kept:
        value = value.value
        return (_handle_of(value), _describe(value))
    own = _foreign_id(kind, value)
    if own is not None:
        return own
    packed = _wardian_values.pack(value)
    if packed is not None:
        return packed
    if issubclass(kind, _wardian_values.PLAIN):
        return None
    return (_handle_of(value), _describe(value))


def _foreign_id(kind, value):
    if kind is Callback or kind is AsyncCallback or kind is Iterator:
        return value._wardian_id
    if issubclass(kind, BaseException):
        return value.__dict__.get("_wardian_id")
    if issubclass(kind, type):
        return value.__dict__.get("_wardian_class_id")
    return None


def _receive_handle(handle, description):
    value = _foreign.get(handle)
    if value is None:
        value = _foreign[handle] = _make_foreign(handle, *description)
    return value


def _receive_own(handle):
    return _objects[handle]


def _encode(value, known=None):
    return _wardian_guest.encode(value, _send_other, known)


def _decode(message, outer=None):
    return _wardian_guest.decode(message, _wardian_values.unpack, _receive_handle, _receive_own, outer)


# ---- the grader's objects, seen from here


def _ask(*message):
    """Asks the grader for something and returns it, or raises what that raised."""
    request, sent = _encode(message)
    reply = _bridge_call(request)
    if reply == _TOO_DEEP:
        raise RecursionError("too many calls between the tests and the submission wait for each other")
    if type(reply) is int:
        raise RuntimeError("the tests do not answer")
    (status, changes, value, *_), _, _ = _decode(reply, sent)
    if changes is not None:
        _wardian_values.apply_changes(sent, changes)
    if status != 0:
        raise value
    return value


class Callback:
    """A function of the grader's. The call happens there; arguments and result are copies."""

    def __init__(self, handle, name, parameters):
        self._wardian_id = handle
        self._wardian_parameters = parameters
        self.__name__ = self.__qualname__ = name
        self.__module__ = "tests"

    def __call__(self, *arguments, **keywords):
        return _ask("call", self._wardian_id, arguments, keywords)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    @property
    def __signature__(self):
        if self._wardian_parameters is None:
            raise AttributeError("__signature__")
        return inspect.Signature([
            inspect.Parameter(name, inspect._ParameterKind(kind), default=None if optional else inspect.Parameter.empty)
            for name, kind, optional in self._wardian_parameters
        ])

    @property
    def __code__(self):
        if self._wardian_parameters is None:
            raise AttributeError("__code__")
        names = tuple(name for name, kind, _ in self._wardian_parameters if kind <= 1)
        return types.SimpleNamespace(co_argcount=len(names), co_varnames=names, co_name=self.__name__)

    def __repr__(self):
        return f"<function {self.__name__} of the tests>"


class AsyncCallback(Callback):
    """An `async def` of the grader's."""

    async def __call__(self, *arguments, **keywords):
        return _ask("call", self._wardian_id, arguments, keywords)


inspect.markcoroutinefunction(AsyncCallback.__call__)


class Iterator:
    """An iterator of the grader's."""

    def __init__(self, handle):
        self._wardian_id = handle

    def __iter__(self):
        return self

    def __next__(self):
        members = _ask("next", self._wardian_id)
        if not members:
            raise StopIteration
        return members[0]


def _make_foreign(handle, kind, *details):
    if kind == "function":
        name, is_async, parameters = details
        return (AsyncCallback if is_async else Callback)(handle, name, parameters)
    if kind == "iterator":
        return Iterator(handle)
    if kind == "class":
        name, bases = details
        return type(name, bases, {"__module__": "tests", "_wardian_class_id": handle})
    base, args, attributes = details
    error = _wardian_values.make_error(base, args, attributes)
    error.__dict__["_wardian_id"] = handle
    return error


# ---- exceptions


def _exception_class(kind):
    """The class by which the grader gets an exception: its own, or the nearest one that the grader can have."""
    for base in kind.__mro__:
        if base in _wardian_values.EXCEPTIONS or base.__module__ in ("solution", "tests"):
            return base
    return Exception


def _text(error):
    try:
        return str.__str__(str(error))[:_MESSAGE_LIMIT]
    except BaseException:
        return ""


def _line_of(error):
    """The last line of the submission that an exception went through."""
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "solution.py":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _error_reply(error, changes, known):
    line = _line_of(error)
    # A handle would keep its frames alive.
    error.__traceback__ = None
    try:
        return _encode((1, changes, error, line), known)[0]
    except BaseException:
        pass
    try:
        # Its arguments or attributes cannot go across.
        kind = _exception_class(type(error))
        return _encode((1, None, _plain_error(kind, error), line))[0]
    except BaseException:
        return FAILED


def _plain_error(kind, error):
    while kind not in _wardian_values.EXCEPTIONS:
        kind = kind.__base__
    return _wardian_values.make_error(kind, (_text(error),), None)


FAILED = _wardian_guest.encode((1, None, RecursionError("the answer failed"), None), _send_other, None)[0]


# ---- operations


def _load(code):
    sys.modules["solution"] = _solution
    _SolutionLoader.source = code
    exec(compile(code, "solution.py", "exec", dont_inherit=True), _solution.__dict__)
    for value in list(_solution.__dict__.values()):
        if isinstance(value, type) and _wardian_values.namedtuple_fields(value) is not None:
            _wardian_values.remember_namedtuple(value)
    _flush()


def _entries(names):
    """The globals with these names: an empty tuple, or one with the value."""
    return [(_kept(_solution.__dict__[name]),) if name in _solution.__dict__ else () for name in names]


def _kept(value):
    """What a test gets of an object by its place stays here unless it is plain: a member of an `IntEnum`, say."""
    kind = type(value)
    if issubclass(kind, _wardian_values.PLAIN) and kind not in _wardian_values.PLAIN and kind is not bool:
        return value if _wardian_values.pack(value) is not None else _Kept(value)
    return value


def _class(kind):
    """Describes a class (CODEC.md, section 4.3)."""
    fields = _wardian_values.namedtuple_fields(kind)
    if fields is not None:
        defaults = tuple(kind._field_defaults.values())
        return (kind.__name__, (), [], [], True, (fields, defaults), ())
    bases = tuple(
        base for base in kind.__bases__ if base in _wardian_values.EXCEPTIONS or base.__module__ == "solution"
    )
    if issubclass(kind, BaseException) and not any(issubclass(base, BaseException) for base in bases):
        bases = (_exception_class(kind.__base__), *bases)
    specials, methods = set(), set()
    for base in kind.__mro__:
        if base is not object and base not in _wardian_values.EXCEPTIONS:
            specials.update(name for name in vars(base) if name in _SPECIALS)
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            # What a class derived from it makes of the name counts.
            (methods.add if type(value) is types.FunctionType else methods.discard)(name)
    methods = [name for name in sorted(methods) if not name.startswith("_")]
    if getattr(kind, "__hash__", None) is None:
        specials.discard("__hash__")
        specials.add("!__hash__")
    positions = getattr(kind, "__match_args__", ())
    if type(positions) is not tuple or not all(type(name) is str for name in positions):
        positions = ()
    is_plain = issubclass(kind, _wardian_values.PLAIN)
    return (kind.__name__, bases, sorted(specials), methods, is_plain, None, positions)


_SPECIALS = frozenset("""
    __len__ __bool__ __int__ __float__ __complex__ __index__ __hash__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __neg__
    __pos__ __abs__ __invert__ __round__ __trunc__ __floor__ __ceil__ __iter__ __next__ __reversed__ __getitem__
    __setitem__ __delitem__ __contains__ __call__ __enter__ __exit__ __aenter__ __aexit__ __aiter__ __anext__ __await__
    __add__ __sub__ __mul__ __matmul__ __truediv__ __floordiv__ __mod__ __divmod__ __pow__ __lshift__ __rshift__ __and__
    __xor__ __or__ __radd__ __rsub__ __rmul__ __rmatmul__ __rtruediv__ __rfloordiv__ __rmod__ __rdivmod__ __rpow__
    __rlshift__ __rrshift__ __rand__ __rxor__ __ror__ __iadd__ __isub__ __imul__ __imatmul__ __itruediv__ __ifloordiv__
    __imod__ __ipow__ __ilshift__ __irshift__ __iand__ __ixor__ __ior__
""".split())


def _call(function, arguments, keywords):
    return function(*arguments, **keywords)


def _call_method(value, name, arguments, keywords):
    return getattr(value, name)(*arguments, **keywords)


def _new(kind, arguments, keywords):
    return _kept(kind(*arguments, **keywords))


def _get(value, name):
    found = getattr(value, name)
    return _kept(found) if isinstance(value, type) else found


def _item(value, key):
    found = value[key]
    return _kept(found) if isinstance(value, type) else found


def _next(iterator, count):
    members = []
    for member in iterator:
        members.append(member)
        if len(members) >= count:
            break
    return members


def _resume(function, *operands):
    """Moves a generator on: (False, what it yields) or (True, what it returns)."""
    try:
        return (False, function(*operands))
    except StopIteration as end:
        return (True, end.value)


def _throw(generator, error):
    return _resume(generator.throw, error)


def _run(awaitable):
    """Runs an awaitable to its end, in one loop for all of them."""
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
    # A callback may come back here while the loop is running.
    running = asyncio._get_running_loop()
    loop = _loop if running is None else asyncio.new_event_loop()
    asyncio._set_running_loop(None)
    try:
        return loop.run_until_complete(_awaited(awaitable))
    finally:
        asyncio._set_running_loop(running)


async def _awaited(awaitable):
    return await awaitable


def _resume_async(generator, value):
    try:
        return (False, _run(generator.asend(value)))
    except StopAsyncIteration:
        return (True, None)


def _anext(iterator):
    try:
        return (_run(iterator.__anext__()),)
    except StopAsyncIteration:
        return ()


def _exit(manager, name, error):
    return bool(getattr(type(manager), name)(manager, None if error is None else type(error), error, None))


def _async_exit(manager, error):
    kind = None if error is None else type(error)
    return bool(_run(type(manager).__aexit__(manager, kind, error, None)))


def _flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass  # the submission's own stream


_OPERATORS = {
    name: getattr(operator, name, None) or getattr(operator, name + "_")
    for name in """
        add sub mul matmul truediv floordiv mod pow lshift rshift and xor or iadd isub imul imatmul itruediv ifloordiv
        imod ipow ilshift irshift iand ixor ior lt le gt ge neg pos abs invert index
    """.split()
}
_OPERATORS |= {
    "divmod": divmod, "round": round, "int": int, "float": float, "complex": complex, "hash": hash, "len": len,
    "bool": bool, "str": str, "repr": repr, "format": format, "trunc": math.trunc, "floor": math.floor,
    "ceil": math.ceil, "eq": lambda a, b: bool(a == b), "ne": lambda a, b: bool(a != b),
    "in": lambda a, b: b in a, "reversed": reversed, "aiter": lambda value: value.__aiter__(),
    "enter": lambda value: type(value).__enter__(value),
}

_OPERATIONS = {
    "load": _load,
    "entries": _entries,
    "class": _class,
    "call": _call,
    "meth": _call_method,
    "new": _new,
    "get": _get,
    "set": setattr,
    "del": delattr,
    "item": _item,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "op": lambda name, *operands: _OPERATORS[name](*operands),
    "plain": lambda value: value,
    "iter": lambda value: _Kept(iter(value)),
    "next": _next,
    "send": lambda generator, value: _resume(generator.send, value),
    "throw": _throw,
    "close": lambda generator: generator.close(),
    "run": _run,
    "asend": _resume_async,
    "anext": _anext,
    "aenter": lambda manager: _run(type(manager).__aenter__(manager)),
    "aexit": _async_exit,
    "exit": lambda manager, error: _exit(manager, "__exit__", error),
    "flush": _flush,
}


def answer(request):
    """Does what a message of the grader says and returns the encoded reply."""
    known = snapshot = changes = None
    try:
        (operation, *operands), known, _ = _decode(request)
        # To see what the call changes in place.
        snapshot = _wardian_guest.snapshot(known)
        value = _OPERATIONS[operation](*operands)
        if snapshot is not None:
            changes = _wardian_guest.changes(snapshot)
        return _encode((0, changes, value), known)[0]
    except BaseException as error:
        if snapshot is not None and changes is None:
            changes = _wardian_guest.changes(snapshot)
        return _error_reply(error, changes, known)


def serve(message):
    """Does what the host's message says and returns the encoded reply."""
    operation, *operands = message
    try:
        return _encode((0, None, _OPERATIONS[operation](*operands)))[0]
    except BaseException as error:
        kind = type(error).__name__
        line = _line_of(error)
        try:
            return _encode((1, kind, _text(error), line))[0]
        except BaseException:
            # Its name is no plain text.
            return _encode((1, "", "", None))[0]


def warm_up():
    """Loads and calls small submissions, for the snapshot's specialized bytecode."""
    reset()
    code = (
        "import math\ndef f(x, y=1):\n    if isinstance(x, list):\n        x.append(y)\n    return x\n"
        "class P:\n    def __init__(self, x):\n        self.x = x\n    def get(self):\n        return self.x\n"
    )
    serve(("load", code))
    reply = answer(_encode(("entries", ["f", "P"]))[0])
    del reply
    f, p = 0, 1
    for message in [
        ("call", _Own(f), ([1, 2],), {}),
        ("call", _Own(f), (3,), {"y": 2}),
        ("call", _Own(f), ("text", 2.5), {}),
        ("call", _Own(f), ({"a": (1, None)},), {}),
        ("call", _Own(f), (), {}),
        ("class", _Own(p)),
        ("new", _Own(p), (1,), {}),
        ("meth", _Own(2), "get", (), {}),
        ("get", _Own(2), "x"),
        ("op", "len", [1, 2]),
    ]:
        answer(_wardian_guest.encode(message, lambda value: value.handle, None)[0])


class _Own:
    """Sends one of the candidate's objects as the grader does."""

    def __init__(self, handle):
        self.handle = handle
