"""The standard-library types that cross the bridge by value (CODEC.md, section 1.2)."""

import collections
import datetime
import decimal
import fractions


def _naive_datetime(value):
    if value.tzinfo is not None:
        return None
    return (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)


# Type -> function from a value to its payload, or to None when this value cannot go by value.
_PACK = {
    range: lambda value: (value.start, value.stop, value.step),
    collections.deque: lambda value: (list(value), value.maxlen),
    decimal.Decimal: str,
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    datetime.date: lambda value: (value.year, value.month, value.day),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
    datetime.datetime: _naive_datetime,
}

# Name -> (constructor, types that the members of the payload may have; None for the str of a Decimal).
_UNPACK = {
    "range": (range, (int, int, int)),
    "deque": (collections.deque, (list, (int, type(None)))),
    "Decimal": (decimal.Decimal, None),
    "Fraction": (fractions.Fraction, (int, int)),
    "date": (datetime.date, (int, int, int)),
    "timedelta": (lambda days, seconds, us: datetime.timedelta(days, seconds, us), (int, int, int)),
    "datetime": (datetime.datetime, (int,) * 7),
}


def pack(value):
    """Returns (type name, payload) for a value of exactly one of the types above, else None."""
    packer = _PACK.get(type(value))
    if packer is None:
        return None
    payload = packer(value)
    return None if payload is None else (type(value).__name__, payload)


def unpack(name, payload):
    """Rebuilds a value. Raises ValueError for anything that `pack` would not have made."""
    if name not in _UNPACK:
        raise ValueError("unknown type of value")
    constructor, members = _UNPACK[name]
    if members is None:
        if type(payload) is not str:
            raise ValueError(f"bad payload for {name}")
        payload = (payload,)
    else:
        if type(payload) is not tuple or len(payload) != len(members):
            raise ValueError(f"bad payload for {name}")
        for member, expected in zip(payload, members):
            # `bool` is a subclass of `int`, but not what `pack` makes.
            if type(member) is not expected and not (type(expected) is tuple and type(member) in expected):
                raise ValueError(f"bad payload for {name}")
    try:
        return constructor(*payload)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"bad payload for {name}") from error
