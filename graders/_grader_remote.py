"""The grader's side of the bridge: the submission's objects as seen by the tests, and what tests pass to it.

What comes from the candidate's instance is hostile. It can be plain data, which is the grader's own from then on, or name
an object that stays there, which is a `Remote` here. Whatever goes wrong on the bridge fails the test, for good:
`BridgeError` is no `Exception`, so a test's own `except Exception` does not swallow it, and a test that swallows it all the
same still fails.
"""

import asyncio
import inspect
import operator
import sys
import types

import _grader_sources
import _wardian_guest
import _wardian_values

# No submission has a line beyond this one.
_MAX_LINE = 1 << 24

# How many members of a container are fetched at a time. An iterator gives them one by one: its own order of events may
# matter to a test.
_CHUNK = 64

# The most of the submission's classes that one test may meet, and that are kept for the next one.
_MAX_CLASSES = 1000
_KEPT_CLASSES = 100

_bridge_call = _wardian_guest.bridge_call

_BRIDGE_ERRORS = {
    -1: "the submission's instance has ended",
    -2: "the submission ran out of time or memory",
}
_TOO_DEEP = -3
EXHAUSTED = _BRIDGE_ERRORS[-2]

# They would end a loop of the grader's in silence.
_SILENT = (StopIteration, StopAsyncIteration, GeneratorExit)


def _is_silent(error):
    """Whether an exception would end a loop or a test of the grader's in silence.

    A test that skips itself is none; the submission must not have a say in that.
    """
    unittest = sys.modules.get("unittest.case")
    return isinstance(error, _SILENT) or (unittest is not None and isinstance(error, unittest.SkipTest))


class RemoteError(Exception):
    """An exception of the submission that must not be raised here as what it is there."""


class BridgeError(BaseException):
    """No proper answer came from the submission's instance, or something could not be sent to it."""


class _State:
    """What belongs to the running test: none of it has a meaning in the next one."""

    def __init__(self):
        self.number = 0
        self.read_only = False
        self.clear()

    def clear(self):
        self.number += 1
        # Every BridgeError: raising one is not enough, the test might catch it.
        self.bridge_errors = []
        # The submission's objects and classes, by handle.
        self.remotes = {}
        self.classes = {}
        # Objects of the tests that were sent, and their ids by address.
        self.exports = []
        self.export_ids = {}
        # Handles of objects that are no Remote here, by address: generators, coroutines.
        self.handles = {}
        # The line of the submission that an exception came from, by its address.
        self.lines = {}
        # Classes that the task names as such, and the objects that a test made by calling one: these may take part in
        # operations with the tests' data.
        self.entry_classes = ()
        self.made = set()
        # The objects that the submission named again after that: they are its answers, too.
        self.given_back = set()


state = _State()


def bridge_error(reason):
    state.bridge_errors.append(reason)
    return BridgeError(reason)


# ---- sending


def _send_other(value):
    kind = type(value)
    if type(kind) is RemoteMeta:
        return _handle_of(value)
    if kind is RemoteMeta or kind is ExceptionMeta:
        return _class_handle(value)
    if kind is _Handle:
        return value.handle
    handle = state.handles.get(id(value))
    if handle is not None:
        return handle[0]
    if kind is types.MethodType and type(type(value.__self__)) is RemoteMeta:
        # A method of the submission's, which is looked up there.
        value = request("get", value.__self__, value.__name__)
        return _handle_of(value) if isinstance(value, Remote) else _send_other(value)
    if type(kind) is ExceptionMeta:
        handle = value.__dict__.get("_wardian_handle")
        if handle is None:
            raise TypeError(f"cannot send a value of type `{kind.__name__}` to the submission")
        return handle
    packed = _wardian_values.pack(value)
    if packed is not None:
        return packed
    if issubclass(kind, _wardian_values.PLAIN):
        return None
    return _export(value, kind)


def _export(value, kind):
    """Sends a number for an object that stays here, if it is of a kind that the submission can use from there."""
    if isinstance(value, BaseException):
        described = ("error", kind, value.args, _wardian_values.attributes_of(value))
    elif isinstance(value, type) and issubclass(value, BaseException):
        described = ("class", value.__name__, tuple(b for b in value.__bases__ if issubclass(b, BaseException)))
    elif hasattr(kind, "__next__"):
        described = ("iterator",)
    elif callable(value) and not _is_of_a_module(value):
        described = ("function", _name_of(value), inspect.iscoroutinefunction(value), _parameters(value))
    else:
        raise TypeError(f"cannot send a value of type `{kind.__name__}` to the submission")
    number = state.export_ids.get(id(value))
    if number is None:
        number = state.export_ids[id(value)] = len(state.exports)
        state.exports.append(value)
    return (number, described)


def _is_of_a_module(value):
    """Whether this is a function in C that belongs to a module: `eval` and its like have no business there."""
    return type(value) is types.BuiltinFunctionType and isinstance(value.__self__, types.ModuleType)


def _name_of(value):
    name = getattr(value, "__name__", None)
    return name if type(name) is str else type(value).__name__


def _parameters(value):
    """The parameters of a function written in Python, as (name, kind, has a default), else None."""
    if type(value) is not types.FunctionType:
        return None
    code, defaults = value.__code__, value.__defaults__ or ()
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_kwonlyargcount:
        parameters = inspect.signature(value).parameters.values()
        return [(p.name, int(p.kind), p.default is not p.empty) for p in parameters]
    names = code.co_varnames[:code.co_argcount]
    first_default = len(names) - len(defaults)
    return [
        (name, 0 if index < code.co_posonlyargcount else 1, index >= first_default) for index, name in enumerate(names)
    ]


# ---- receiving


def _receive_own(number):
    return state.exports[number]


def _receive_handle(handle, description):
    remote = state.remotes.get(handle)
    if remote is None:
        remote = _make_remote(handle, description)
        state.remotes[handle] = remote
    else:
        state.given_back.add(handle)
    return remote


def _make_remote(handle, description):
    kind = type(description)
    if kind is int:
        return _new_remote(_class_of(description), handle)
    if kind is tuple:
        error_class, name, text, args, attributes = description
        if type(text) is not str or type(args) is not tuple or type(attributes) not in (dict, type(None)):
            raise ValueError("bad exception")
        return _make_error(handle, error_class, text, args, attributes)
    if description == "class":
        return _class_of(handle)
    if description == "function":
        return _new_remote(RemoteFunction, handle)
    make = _LOCAL.get(description)
    if make is None:
        raise ValueError("unknown kind of object")
    local = make(handle, state.number)
    state.handles[id(local)] = (handle, local)
    return local


def _make_error(handle, kind, text, args, attributes):
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise ValueError("bad class of an exception")
    if type(kind) is not ExceptionMeta:  # a class of the tests
        return _wardian_values.make_error(kind, args, attributes)
    error = kind.__new__(kind)
    error.args = args
    if attributes is not None:
        _wardian_values.set_attributes(error, attributes)
    error.__dict__["_wardian_handle"] = handle
    error.__dict__["_wardian_text"] = text
    return error


def encode(value, known=None):
    return _wardian_guest.encode(value, _send_other, known)


def _decode(message, outer=None):
    return _wardian_guest.decode(message, _wardian_values.unpack, _receive_handle, _receive_own, outer)


def request(*message):
    """Sends one request and returns the reply's value, or raises the submission's exception."""
    if state.read_only:
        message = _copied(message)
    try:
        encoded, sent = _wardian_guest.encode(message, _send_other, None)
    except (TypeError, ValueError, OverflowError) as error:
        raise bridge_error(str(error)) from None
    reply = _bridge_call(encoded)
    if type(reply) is int:
        if reply == _TOO_DEEP:
            raise RecursionError("too many calls between the tests and the submission wait for each other")
        raise bridge_error(_BRIDGE_ERRORS.get(reply, "the bridge failed"))
    try:
        (status, changes, value, *line), _, references = _wardian_guest.decode(
            reply, _wardian_values.unpack, _receive_handle, _receive_own, sent
        )
        if type(status) is not int:
            raise ValueError("unknown reply")
        if changes is not None:
            _wardian_values.apply_changes(sent, changes)
            if references:
                # What is changed to hold itself, or the same thing over and over, is refused as anywhere.
                _weigh((sent, value))
        elif references > 1:
            _weigh(value)
        if status == 0 and not line:
            return value
        (line,) = line
        if status != 1 or not isinstance(value, BaseException) or type(line) not in (int, type(None)):
            raise ValueError("unknown reply")
    except BridgeError:
        raise
    except Exception:
        # Out of memory or too deep a recursion as well: the reply is to blame.
        raise bridge_error("malformed reply") from None
    if _is_silent(value):
        value = RemoteError(f"{type(value).__name__}: {value}")
    # A line that no file has is an invention.
    if line is not None and 0 < line <= _MAX_LINE:
        state.lines[id(value)] = (line, value)
    raise value


def _weigh(value):
    def skip(value):
        packed = _wardian_values.pack(value)
        return packed if packed is not None else None if issubclass(type(value), _wardian_values.PLAIN) else 0

    _wardian_guest.encode(value, skip, None)


def _typed(kind, *message):
    value = request(*message)
    if type(value) is not kind:
        raise bridge_error("malformed reply")
    return value


def _copied(value):
    """Copies plain data, with everything else in its place."""
    kept = []

    def keep(value):
        packed = _wardian_values.pack(value)
        if packed is not None:
            return packed
        if issubclass(type(value), _wardian_values.PLAIN):
            return None
        kept.append(value)
        return len(kept) - 1

    try:
        encoded, _ = _wardian_guest.encode(value, keep, None)
    except (TypeError, ValueError, OverflowError) as error:
        raise bridge_error(str(error)) from None
    return _wardian_guest.decode(encoded, _wardian_values.unpack, None, kept.__getitem__, None)[0]


# ---- what the submission asks of the tests' objects


def _call_export(number, arguments, keywords):
    if type(arguments) is not tuple or type(keywords) is not dict:
        raise ValueError("malformed request")
    function = _exported(number)
    is_exception = isinstance(function, BaseException) or (
        isinstance(function, type) and issubclass(function, BaseException)
    )
    if is_exception or not callable(function):
        raise ValueError("no function has this number")
    result = function(*arguments, **keywords)
    return _finish(result) if inspect.iscoroutine(result) else result


def _next_of(number):
    iterator = _exported(number)
    if not hasattr(type(iterator), "__next__"):
        raise ValueError("no iterator has this number")
    try:
        return [next(iterator)]
    except StopIteration:
        return []


def _exported(number):
    if type(number) is not int or not 0 <= number < len(state.exports):
        raise ValueError("the tests have no object with this number")
    return state.exports[number]


def _finish(coroutine):
    """Runs a coroutine of the tests, also while a loop of theirs waits."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
        asyncio._set_running_loop(running)


answers = {"call": _call_export, "next": _next_of}


def answer(message):
    """Answers a request of the submission."""
    known = snapshot = changes = None
    try:
        (operation, *operands), known, _ = _decode(message)
        if type(operation) is not str or operation not in answers:
            raise ValueError("malformed request")
        snapshot = _wardian_guest.snapshot(known)
        value = answers[operation](*operands)
        if snapshot is not None:
            changes = _wardian_guest.changes(snapshot)
        return _encode_result((0, changes, value), known)
    except BaseException as error:
        if snapshot is not None and changes is None:
            changes = _wardian_guest.changes(snapshot)
        if isinstance(error, BridgeError):
            error = RuntimeError(str(error))
        return _encode_result((1, changes, error, None), known)


def _encode_result(reply, known):
    try:
        return _wardian_guest.encode(reply, _send_other, known)[0]
    except (TypeError, ValueError, OverflowError) as error:
        text = str(bridge_error(str(error)))
        return _wardian_guest.encode((1, None, RuntimeError(text), None), _send_other, None)[0]


# ---- the submission's classes, seen from here


def _class_handle(kind):
    handle = state.classes.get(kind)
    if handle is None:
        raise TypeError(f"cannot send the class `{kind.__name__}` to the submission")
    return handle


class RemoteMeta(type):
    """The type of the submission's classes, as far as they are seen here."""

    def __new__(mcs, name, bases, members):
        if bases:
            raise TypeError("a test cannot derive a class from one of the submission's")
        return type.__new__(mcs, name, bases, members)

    def __call__(cls, *arguments, **keywords):
        value = request("new", cls, arguments, keywords)
        if isinstance(value, cls) and issubclass(cls, state.entry_classes):
            state.made.add(_handle_of(value))
        return value

    def __getattr__(cls, name):
        return _attribute(cls, name)

    def __setattr__(cls, name, value):
        request("set", cls, name, value)

    def __delattr__(cls, name):
        request("del", cls, name)

    # For classes with members, such as enumerations.
    def __getitem__(cls, key):
        return request("item", cls, key)

    def __len__(cls):
        return _length(cls)

    def __bool__(cls):
        return True

    def __iter__(cls):
        return _iterator(cls)

    def __contains__(cls, value):
        if isinstance(value, Remote):
            return _typed(bool, "op", "in", cls, value)
        return any(value is member or value == member for member in cls)

    def __repr__(cls):
        return f"<class {cls.__name__!r}>"


class ExceptionMeta(type):
    """The type of the submission's exception classes: real ones here, so that they can be caught."""

    def __new__(mcs, name, bases, members):
        raise TypeError("a test cannot derive a class from one of the submission's")

    def __call__(cls, *arguments, **keywords):
        return request("new", cls, arguments, keywords)

    def __getattr__(cls, name):
        return _attribute(cls, name)


# What else begins with two underscores is looked for by Python itself, and would be asked for at every turn.
_READABLE = frozenset(["__dict__", "__wrapped__", "__slots__"])


def _attribute(value, name):
    if name.startswith("__") and name not in _READABLE:
        raise AttributeError(name)
    return request("get", value, name)


class Remote(metaclass=RemoteMeta):
    """An object that stays in the submission's instance.

    Whether it equals plain data is decided here, from plain data: see `__eq__`.
    """

    __slots__ = ("_wardian_handle", "__weakref__")

    _wardian_is_plain = False
    _wardian_has_eq = False

    def __getattr__(self, name):
        return _attribute(self, name)

    def __setattr__(self, name, value):
        request("set", self, name, value)
        _forget_method(type(self), name)

    def __delattr__(self, name):
        request("del", self, name)

    def __str__(self):
        return _typed(str, "op", "str", self)

    def __repr__(self):
        return _typed(str, "op", "repr", self)

    def __format__(self, spec):
        return _typed(str, "op", "format", self, spec)

    def __eq__(self, other):
        if type(type(other)) is RemoteMeta:
            if type(self)._wardian_has_eq or type(other)._wardian_has_eq:
                return _typed(bool, "op", "eq", self, other)
            return self is other
        return type(self)._wardian_is_plain and _plain(self) == other

    def __ne__(self, other):
        if type(type(other)) is RemoteMeta and (type(self)._wardian_has_eq or type(other)._wardian_has_eq):
            return _typed(bool, "op", "ne", self, other)
        return not self == other

    __hash__ = object.__hash__


def _method(name):
    def method(self, *arguments, **keywords):
        return request("meth", self, name, arguments, keywords)

    method.__name__ = method.__qualname__ = name
    return method


def _forget_method(kind, name):
    """Lets a name be asked for again: it may be something else than the class's method now."""
    for base in kind.__mro__:
        if type(base) is RemoteMeta and base is not Remote and type(base.__dict__.get(name)) is types.FunctionType:
            type.__delattr__(base, name)


_handle_of = type.__getattribute__(Remote, "__dict__")["_wardian_handle"].__get__
_set_handle = type.__getattribute__(Remote, "__dict__")["_wardian_handle"].__set__


def _new_remote(kind, handle):
    remote = object.__new__(kind)
    _set_handle(remote, handle)
    return remote


def _plain(remote):
    """The plain data that an object of a subclass of a built-in type holds."""
    value = request("plain", remote)
    if isinstance(value, Remote):
        raise bridge_error("malformed reply")
    return value


def _length(value):
    length = _typed(int, "op", "len", value)
    if length < 0:
        raise bridge_error("malformed reply")
    return length


def _iterator(value):
    iterator = request("iter", value)
    if iterator is value or not isinstance(iterator, Remote):
        return iterator
    return _chunks(iterator)


def _chunks(iterator):
    while True:
        members = _typed(list, "next", iterator, _CHUNK)
        yield from members
        if len(members) < _CHUNK:
            return


def _next_member(self):
    members = _typed(list, "next", self, 1)
    if not members:
        raise StopIteration
    return members[0]


def _is_made(remote):
    """Whether a test has this object from calling a class that the task names, and from nowhere else."""
    handle = _handle_of(remote)
    return handle in state.made and handle not in state.given_back


def _contains(self, value):
    # What the test itself made may say; else it is compared here, and the expected value never crosses.
    if isinstance(value, Remote) or _is_made(self):
        return _typed(bool, "op", "in", self, value)
    return any(value is member or value == member for member in self)


def _own_error(error, traceback):
    """The exception of a `with` block for the submission, or None for one that is none of its business.

    That is what an assertion raises, be it that it fails, be it that it cannot be evaluated.
    """
    if not isinstance(error, Exception) or isinstance(error, AssertionError) or _grader_sources.is_asserting(traceback):
        return None
    return error


def _exit(self, kind, error, traceback):
    error = _own_error(error, traceback)
    return _typed(bool, "exit", self, error) and error is not None


async def _async_exit(self, kind, error, traceback):
    error = _own_error(error, traceback)
    return _typed(bool, "aexit", self, error) and error is not None


async def _async_enter(self):
    return request("aenter", self)


async def _async_next(self):
    members = _typed(tuple, "anext", self)
    if not members:
        raise StopAsyncIteration
    return members[0]


def _binary(name, left, right, self, other):
    is_made = _is_made(self)
    if isinstance(other, Remote) or is_made:
        result = request("op", name, left, right)
        if result is self and is_made and name in _IN_PLACE:
            # `x += y` leaves the test what it had.
            state.given_back.discard(_handle_of(self))
        return result
    # The submission must not see what it is compared with, let alone decide.
    if type(self)._wardian_is_plain:
        plain = _plain(self)
        function = _PLAIN_OPERATORS[name]
        return function(plain, other) if left is self else function(other, plain)
    return NotImplemented


def _operator(name):
    def method(self, other):
        return _binary(name, self, other, self, other)

    return method


def _reflected_operator(name):
    def method(self, other):
        return _binary(name, other, self, self, other)

    return method


def _unary(name, kind=None):
    def method(self, *operands):
        return request("op", name, self, *operands) if kind is None else _typed(kind, "op", name, self, *operands)

    return method


_SPECIALS = {
    "__len__": _length,
    "__bool__": _unary("bool", bool),
    "__int__": _unary("int", int),
    "__float__": _unary("float", float),
    "__complex__": _unary("complex", complex),
    "__index__": _unary("index", int),
    "__hash__": _unary("hash", int),
    "__neg__": _unary("neg"),
    "__pos__": _unary("pos"),
    "__abs__": _unary("abs"),
    "__invert__": _unary("invert"),
    "__round__": _unary("round"),
    "__trunc__": _unary("trunc", int),
    "__floor__": _unary("floor", int),
    "__ceil__": _unary("ceil", int),
    "__iter__": _iterator,
    "__next__": _next_member,
    "__reversed__": _unary("reversed"),
    "__getitem__": lambda self, key: request("item", self, key),
    "__setitem__": lambda self, key, value: request("setitem", self, key, value),
    "__delitem__": lambda self, key: request("delitem", self, key),
    "__contains__": _contains,
    "__call__": lambda self, *arguments, **keywords: request("call", self, arguments, keywords),
    "__enter__": _unary("enter"),
    "__exit__": _exit,
    "__aenter__": _async_enter,
    "__aexit__": _async_exit,
    "__aiter__": _unary("aiter"),
    "__anext__": _async_next,
    "__await__": lambda self: _run_remote(self).__await__(),
}
_ORDER = ("lt", "le", "gt", "ge")
_ARITHMETIC = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split()
_IN_PLACE = frozenset("i" + name for name in _ARITHMETIC)
_PLAIN_OPERATORS = {"divmod": divmod}
for _name in (*_ORDER, *_ARITHMETIC, *_IN_PLACE):
    _function = getattr(operator, _name, None) or getattr(operator, _name + "_", None)
    if _function is not None:
        _PLAIN_OPERATORS[_name] = _function
for _name in _ORDER:
    _SPECIALS[f"__{_name}__"] = _operator(_name)
for _name in _ARITHMETIC:
    _SPECIALS[f"__{_name}__"] = _operator(_name)
    _SPECIALS[f"__r{_name}__"] = _reflected_operator(_name)
    if _name != "divmod":
        _SPECIALS[f"__i{_name}__"] = _operator("i" + _name)


async def _run_remote(remote):
    return request("run", remote)


def _text_of(error):
    text = error.__dict__.get("_wardian_text")
    return BaseException.__str__(error) if text is None else text


def _error_attribute(error, name):
    handle = error.__dict__.get("_wardian_handle")
    if handle is None or name.startswith("_"):
        raise AttributeError(name)
    return request("get", error, name)


# Classes by their description: tests that meet the same class need not make it again.
_known_classes = {}


def _class_of(handle):
    kind = state.remotes.get(("class", handle))
    if kind is None:
        if len(state.classes) >= _MAX_CLASSES:
            raise ValueError("too many classes")
        kind = _make_class(handle, request("class", _Handle(handle)))
        state.remotes["class", handle] = kind
        state.classes[kind] = handle
    return kind


class _Handle:
    """Sends a handle for an object that is not known here yet."""

    def __init__(self, handle):
        self.handle = handle


def _make_class(handle, description):
    name, bases, specials, methods, is_plain, fields, positions = description
    if [type(member) for member in description[:5]] != [str, tuple, list, list, bool]:
        raise ValueError("bad class")
    if fields is not None:
        names, defaults = fields
        return _wardian_values.namedtuple_class(name, names, defaults)
    if not all(isinstance(base, type) for base in bases) or not all(type(text) is str for text in (*specials, *methods)):
        raise ValueError("bad class")
    if not all(method.isidentifier() and not method.startswith("_") for method in methods):
        raise ValueError("bad method")
    if type(positions) is not tuple or not all(type(text) is str for text in positions):
        raise ValueError("bad pattern")
    key = (handle, name, bases, tuple(specials), tuple(methods), is_plain, positions)
    kind = _known_classes.get(key)
    if kind is None:
        kind = _known_classes[key] = _build_class(name, bases, specials, methods, is_plain, positions)
    return kind


def _build_class(name, bases, specials, methods, is_plain, positions):
    if any(issubclass(base, BaseException) for base in bases):
        bases = tuple(base for base in bases if issubclass(base, BaseException))
        members = {
            "__module__": "solution",
            "__str__": _text_of,
            "__getattr__": _error_attribute,
        }
        return type.__new__(ExceptionMeta, name, bases, members)
    bases = tuple(base for base in bases if type(base) is RemoteMeta) or (Remote,)
    members = {
        "__slots__": (),
        "__module__": "solution",
        "__match_args__": positions,
        "_wardian_is_plain": is_plain,
        "_wardian_has_eq": "__eq__" in specials,
    }
    for method in methods:
        members[method] = _method(method)
    for special in specials:
        method = _SPECIALS.get(special)
        if method is not None:
            members[special] = method
    if "!__hash__" in specials:
        members["__hash__"] = None
    elif "__hash__" not in specials:
        members["__hash__"] = object.__hash__
    return type.__new__(RemoteMeta, name, bases, members)


def _readable(name):
    return property(lambda self: request("get", self, name))


RemoteFunction = type.__new__(
    RemoteMeta,
    "function",
    (Remote,),
    {"__slots__": (), "__module__": "solution", "__call__": _SPECIALS["__call__"]}
    | {name: _readable(name) for name in ("__name__", "__doc__", "__annotations__", "__defaults__")},
)


# ---- objects of the submission that are objects of the same kind here


def _check(number):
    if number != state.number:
        raise RemoteError("an object of the submission is of no use in another test")


def _generator(handle, number):
    """A generator that does what one of the submission's does."""
    handle = _Handle(handle)
    operation, operand = "send", None
    while True:
        _check(number)
        is_over, value = _typed(tuple, operation, handle, operand)
        if is_over:
            return value
        try:
            operation, operand = "send", (yield value)
        except GeneratorExit:
            # At the end of a test its instance is gone.
            if number == state.number and not state.bridge_errors:
                request("close", handle)
            raise
        except Exception as error:
            operation, operand = "throw", error


async def _async_generator(handle, number):
    handle = _Handle(handle)
    sent = None
    while True:
        _check(number)
        is_over, value = _typed(tuple, "asend", handle, sent)
        if is_over:
            return
        sent = yield value


async def _coroutine(handle, number):
    _check(number)
    return request("run", _Handle(handle))


_LOCAL = {"generator": _generator, "async_generator": _async_generator, "coroutine": _coroutine}


# ---- tests


def forget():
    """Forgets everything of the last test, but for a few classes that the next one may meet again."""
    state.clear()
    _wardian_values.forget(kept=_KEPT_CLASSES)
    if len(_known_classes) > _KEPT_CLASSES:
        _known_classes.clear()


def entries(names):
    """Returns the submission's globals with these names. Raises NameError for one that is missing."""
    values = {}
    answers = _typed(list, "entries", list(names))
    if len(answers) != len(names):
        raise bridge_error("malformed reply")
    for name, found in zip(names, answers):
        if type(found) is not tuple or len(found) > 1:
            raise bridge_error("malformed reply")
        if not found:
            raise NameError(f"the submission does not define `{name}`")
        values[name] = found[0]
    state.entry_classes = tuple(
        value for name, value in values.items() if type(value) is RemoteMeta and _is_class_name(name)
    )
    return values


def _is_class_name(name):
    """Whether a name, which is the task's, is that of a class by Python's conventions.

    A submission can make any entry a class: what a test takes for a call of a function would then give objects whose
    operators decide what the test compares.
    """
    return name[0].isupper() and "_" not in name and not name.isupper()


def printed(stream):
    """Returns what the submission printed since the last time."""
    request("flush")
    output = _wardian_guest.bridge_printed(stream)
    return output.decode("utf-8", "replace") if type(output) is bytes else ""
