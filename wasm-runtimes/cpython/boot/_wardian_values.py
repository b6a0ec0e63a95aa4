"""What crosses the bridge by value, beside plain data, and what crosses by name (CODEC.md, section 1.2 and 1.3).

Both sides use this module. On the grader's side what comes in is hostile: `unpack` refuses whatever `pack` would not have
made.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import keyword
import math
import operator

# The functions here keep the built-ins as they are now, whatever a submission does to the module.
__builtins__ = dict(vars(builtins))

# An attribute of a function, class or exception that the bridge made begins like this.
OWN = "_wardian_"

# The most fields of a named tuple, and the most classes for named tuples.
_MAX_FIELDS = 256
_MAX_CLASSES = 256

# What a default dictionary may make its values with.
_FACTORIES = {kind.__name__: kind for kind in (list, int, set, dict, float, str)}

# ---- things that have a name on both sides

_BUILTINS = """
    Ellipsis NotImplemented abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter
    float format frozenset hash hex id int isinstance issubclass iter len list map max min next object oct ord pow print
    range repr reversed round set slice sorted str sum tuple type zip
""".split()
_METHODS_OF = (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
_EXCEPTIONS_OF = """
    asyncio binascii collections configparser copy csv dataclasses decimal json pickle queue re shutil statistics struct
    subprocess tarfile threading tokenize unittest zipfile zlib
""".split()
_TYPES = (
    collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque, datetime.date,
    datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal, fractions.Fraction,
)


def _named_things():
    things = {name: getattr(builtins, name) for name in _BUILTINS}
    things["NoneType"] = type(None)
    for name, value in vars(builtins).items():
        if isinstance(value, type) and issubclass(value, BaseException):
            things[name] = value
    for module in (operator, math):
        for name, value in vars(module).items():
            if callable(value) and not name.startswith("_"):
                things[f"{module.__name__}.{name}"] = value
    for kind in _METHODS_OF:
        for name, value in vars(kind).items():
            if not name.startswith("_") and type(value).__name__ == "method_descriptor":
                things[f"{kind.__name__}.{name}"] = value
    for kind in _TYPES:
        things[f"{kind.__module__}.{kind.__name__}"] = kind
    for name in _EXCEPTIONS_OF:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and issubclass(value, BaseException):
                things.setdefault(f"{value.__module__}.{value.__qualname__}", value)
    return things


THINGS = _named_things()
# By address, which stays theirs: the table above keeps them. Looking up runs no code of the thing. A thing of two names,
# such as `OSError`, goes by the first.
_NAME_BY_ADDRESS = {id(thing): name for name, thing in reversed(THINGS.items())}
EXCEPTIONS = {thing for thing in THINGS.values() if isinstance(thing, type) and issubclass(thing, BaseException)}


def is_named(thing):
    return id(thing) in _NAME_BY_ADDRESS


# ---- packing

# Classes for the named tuples of the other side, by type name and fields.
_namedtuple_classes = {}


def namedtuple_fields(kind):
    """Returns the fields of a class of named tuples, else None."""
    fields = kind.__dict__.get("_fields")
    if kind.__bases__ == (tuple,) and type(fields) is tuple and all(type(field) is str for field in fields):
        return fields
    return None


def namedtuple_class(name, fields, defaults=None):
    """Returns the class of named tuples with this name and these fields. Raises ValueError for names that are none."""
    if type(fields) is not tuple or len(fields) > _MAX_FIELDS or type(name) is not str:
        raise ValueError("bad named tuple")
    for text in (name, *fields):
        if type(text) is not str or not text.isidentifier() or keyword.iskeyword(text) or len(text) > 100:
            raise ValueError("bad name in a named tuple")
    if len(set(fields)) < len(fields) or any(field.startswith("_") for field in fields):
        raise ValueError("bad fields of a named tuple")
    kind = _namedtuple_classes.get((name, fields))
    if kind is None:
        if len(_namedtuple_classes) >= _MAX_CLASSES:
            raise ValueError("too many classes of named tuples")
        kind = _namedtuple_classes[name, fields] = collections.namedtuple(name, fields, module="solution")
    if defaults is not None:
        if type(defaults) is not tuple or len(defaults) > len(fields):
            raise ValueError("bad defaults of a named tuple")
        kind.__new__.__defaults__ = defaults
        kind._field_defaults = dict(zip(fields[len(fields) - len(defaults):], defaults))
    return kind


def remember_namedtuple(kind):
    """Lets named tuples that come in be of this class if they have its name and its fields."""
    if len(_namedtuple_classes) < _MAX_CLASSES:
        _namedtuple_classes[kind.__name__, kind._fields] = kind


def forget(kept=0):
    """Forgets the classes of named tuples, if there are more than `kept`."""
    if len(_namedtuple_classes) > kept:
        _namedtuple_classes.clear()


def _pack_datetime(value):
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        return None
    return (
        value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond, value.fold,
        value.tzinfo,
    )


def _pack_time(value):
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        return None
    return (value.hour, value.minute, value.second, value.microsecond, value.fold, value.tzinfo)


def _pack_defaultdict(value):
    factory = value.default_factory
    known = factory is not None and _FACTORIES.get(getattr(factory, "__name__", None)) is factory
    return (factory.__name__ if known else None, dict(value))


# Type -> function from a value to its payload, or to None when this value cannot go by value.
_PACK = {
    range: lambda value: (value.start, value.stop, value.step),
    type({}.keys()): lambda value: (list(value),),
    type({}.values()): lambda value: (list(value),),
    type({}.items()): lambda value: (list(value),),
    slice: lambda value: (value.start, value.stop, value.step),
    collections.deque: lambda value: (list(value), value.maxlen),
    collections.Counter: lambda value: (dict(value),),
    collections.OrderedDict: lambda value: (dict(value),),
    collections.defaultdict: _pack_defaultdict,
    decimal.Decimal: lambda value: (str(value),),
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    datetime.date: lambda value: (value.year, value.month, value.day),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
    datetime.timezone: lambda value: value.__getinitargs__(),
    datetime.datetime: _pack_datetime,
    datetime.time: _pack_time,
}


def args_of(error):
    """Returns what an exception can be made from again."""
    if isinstance(error, OSError) and len(error.args) == 2 and error.filename is not None:
        return (*error.args, error.filename, None, error.filename2)
    return error.args


def attributes_of(error):
    """Returns an exception's own attributes, or None."""
    attributes = {
        name: value for name, value in error.__dict__.items() if type(name) is str and not name.startswith("_")
    }
    return attributes or None


def pack(value):
    """Returns (type name, payload) for a value that crosses as a copy or by its name, else None."""
    kind = type(value)
    packer = _PACK.get(kind)
    if packer is not None:
        payload = packer(value)
        return None if payload is None else (kind.__name__, payload)
    name = _NAME_BY_ADDRESS.get(id(value))
    if name is not None:
        return ("named", name)
    if kind in EXCEPTIONS:
        return ("exception", (kind, args_of(value), attributes_of(value)))
    if tuple in kind.__mro__ and kind is not tuple:
        for base in kind.__mro__:
            fields = namedtuple_fields(base)
            if fields is not None and tuple.__len__(value) == len(fields):
                return ("namedtuple", (base.__name__, fields, tuple(tuple.__iter__(value))))
    return None


# ---- unpacking


def _subclass(kind):
    """Makes the constructor of a dictionary type: `dict.update` reads no attribute of the content."""

    def construct(content):
        value = kind()
        dict.update(value, content)
        return value

    return construct


def _unpack_ordered(content):
    return collections.OrderedDict(content)


def _unpack_defaultdict(factory, content):
    value = collections.defaultdict(None if factory is None else _FACTORIES[factory])
    dict.update(value, content)
    return value


def _unpack_datetime(year, month, day, hour, minute, second, microsecond, fold, tzinfo):
    return datetime.datetime(year, month, day, hour, minute, second, microsecond, tzinfo, fold=fold)


def _unpack_time(hour, minute, second, microsecond, fold, tzinfo):
    return datetime.time(hour, minute, second, microsecond, tzinfo, fold=fold)


def _unpack_namedtuple(name, fields, values):
    kind = namedtuple_class(name, fields)
    if len(values) != len(fields):
        raise ValueError("bad number of fields")
    return tuple.__new__(kind, values)


def _unpack_exception(kind, args, attributes):
    if kind not in EXCEPTIONS:
        raise ValueError("no exception")
    return make_error(kind, args, attributes)


def make_error(kind, args, attributes):
    """Makes an exception without running more than a built-in constructor."""
    try:
        error = kind(*args)
    except TypeError:  # one whose constructor takes something else than `args`
        error = kind.__new__(kind)
        error.args = args
    if attributes is not None:
        set_attributes(error, attributes)
    return error


def set_attributes(error, attributes):
    for name, value in attributes.items():
        if type(name) is not str or not name.isidentifier() or name.startswith("_"):
            raise ValueError("bad attribute of an exception")
        error.__dict__[name] = value


_NONE = type(None)
_TZINFO = (_NONE, datetime.timezone)

# Name -> (constructor, the types that each member of the payload may have).
_UNPACK = {
    "range": (range, (int, int, int)),
    "dict_keys": (lambda members: dict.fromkeys(members).keys(), (list,)),
    "dict_values": (lambda members: dict(enumerate(members)).values(), (list,)),
    "dict_items": (lambda members: dict(members).items(), (list,)),
    "slice": (slice, ((int, _NONE), (int, _NONE), (int, _NONE))),
    "deque": (collections.deque, (list, (int, _NONE))),
    "Counter": (_subclass(collections.Counter), (dict,)),
    "OrderedDict": (_unpack_ordered, (dict,)),
    "defaultdict": (_unpack_defaultdict, ((str, _NONE), dict)),
    "Decimal": (decimal.Decimal, (str,)),
    "Fraction": (fractions.Fraction, (int, int)),
    "date": (datetime.date, (int, int, int)),
    "timedelta": (datetime.timedelta, (int, int, int)),
    "datetime": (_unpack_datetime, (int,) * 8 + (_TZINFO,)),
    "time": (_unpack_time, (int,) * 5 + (_TZINFO,)),
    "namedtuple": (_unpack_namedtuple, (str, tuple, tuple)),
    "exception": (_unpack_exception, (type, tuple, (dict, _NONE))),
}


def unpack(name, payload):
    """Rebuilds a value. Raises ValueError for anything that `pack` would not have made."""
    if name == "named":
        if type(payload) is not str or payload not in THINGS:
            raise ValueError("unknown name")
        return THINGS[payload]
    if name == "timezone":
        if type(payload) is not tuple or not 1 <= len(payload) <= 2 or type(payload[0]) is not datetime.timedelta:
            raise ValueError("bad payload for timezone")
        if len(payload) == 2 and type(payload[1]) is not str:
            raise ValueError("bad payload for timezone")
        zone = datetime.timezone(*payload)
        return datetime.timezone.utc if zone == datetime.timezone.utc and len(payload) == 1 else zone
    if name not in _UNPACK:
        raise ValueError("unknown type of value")
    constructor, members = _UNPACK[name]
    if type(payload) is not tuple or len(payload) != len(members):
        raise ValueError(f"bad payload for {name}")
    for member, expected in zip(payload, members):
        # `bool` is a subclass of `int`, but not what `pack` makes.
        if type(member) is not expected and not (type(expected) is tuple and type(member) in expected):
            raise ValueError(f"bad payload for {name}")
    try:
        return constructor(*payload)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"bad payload for {name}") from error


# ---- what a call changed in place


def apply_changes(objects, changes):
    """Gives numbered containers of ours the content that they have on the other side.

    `changes` are pairs of a number and the content. Raises ValueError when they do not correspond.
    """
    if type(changes) is not list:
        raise ValueError("bad changes")
    for change in changes:
        if type(change) is not tuple or len(change) != 2 or type(change[0]) is not int:
            raise ValueError("bad change")
        number, content = change
        if not 0 <= number < len(objects):
            raise ValueError("change of something that was not sent")
        target, kind = objects[number], type(content)
        # The built-in methods, also for a subclass.
        if kind is list and isinstance(target, list):
            list.__setitem__(target, slice(None), content)
        elif kind is list and isinstance(target, collections.deque):
            collections.deque.clear(target)
            collections.deque.extend(target, content)
        elif kind is dict and isinstance(target, collections.OrderedDict):
            collections.OrderedDict.clear(target)
            for key, value in content.items():
                collections.OrderedDict.__setitem__(target, key, value)
        elif kind is dict and isinstance(target, dict):
            dict.clear(target)
            dict.update(target, content)
        elif kind is set and isinstance(target, set):
            set.clear(target)
            set.update(target, content)
        elif kind is bytearray and isinstance(target, bytearray):
            bytearray.__setitem__(target, slice(None), content)
        else:
            raise ValueError("changed argument is of another type")


PLAIN = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
