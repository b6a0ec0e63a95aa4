"""So much of numpy as the test programs of MBPP+ and HumanEval+ use, which is `allclose` and three names of types.

Those programs import numpy to compare floats, hardly ever to make an array. The default runtime has none; with these four
names, every row of both sets can be graded by it. Tests import it as `numpy`; whatever else they want from it is an
AttributeError that says what is missing. A submission cannot import it: it exists in the grader's instance alone.
"""

import collections
import math
import sys
import types

_SEQUENCES = (list, tuple, range, collections.deque)

# What numpy can hold as an integer.
_INTEGERS = range(-(2**63), 2**64)


def provide(*sources):
    """Gives tests that seem to import numpy these names, in an instance that has no other."""
    if not any("numpy" in source for source in sources):
        return
    try:
        import numpy
    except ModuleNotFoundError:
        numpy = sys.modules["numpy"] = types.ModuleType("numpy", __doc__)
        numpy.__dict__.update(
            allclose=allclose, float32=float32, float64=float64, ndarray=ndarray, __getattr__=_absent_attribute
        )


class ndarray:
    """The type of arrays, of which there are none here."""


class float32:
    """A type of elements."""


class float64(float):
    """A type of elements."""


def _absent_attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"module 'numpy' has no attribute {name!r}: this grader's instance has only what MBPP+ and HumanEval+ need of "
        "numpy; the science runtime has all of it"
    )


def _shape(value):
    """The lengths of nested sequences of numbers, from the outermost one."""
    if isinstance(value, _SEQUENCES):
        shapes = {_shape(member) for member in value}
        if len(shapes) > 1:
            raise ValueError("the sequence has an inhomogeneous shape")
        return (len(value), *(shapes.pop() if shapes else ()))
    if not isinstance(value, (int, float, complex)):
        raise TypeError(f"a value of type {type(value).__name__!r} cannot be compared by closeness")
    return ()


def _pairs(a, a_shape, b, b_shape):
    """Pairs of numbers by the rule of broadcasting: a dimension that is missing, or of length 1, is repeated."""
    if not a_shape and not b_shape:
        yield a, b
    elif (0 in a_shape) != (0 in b_shape):
        # numpy finds nothing at all close to one number, so `[]` would pass for any.
        raise ValueError("an empty sequence is compared with numbers")
    elif len(a_shape) < len(b_shape):
        for member in b:
            yield from _pairs(a, a_shape, member, b_shape[1:])
    elif len(a_shape) > len(b_shape):
        for member in a:
            yield from _pairs(member, a_shape[1:], b, b_shape)
    else:
        (m, *a_rest), (n, *b_rest) = a_shape, b_shape
        if m != n and 1 not in (m, n):
            raise ValueError(f"operands could not be broadcast together with shapes {a_shape} {b_shape}")
        for index in range(n if m == 1 else m):
            yield from _pairs(a[0 if m == 1 else index], a_rest, b[0 if n == 1 else index], b_rest)


def _is_close(a, b, rtol, atol, equal_nan):
    if a == b:
        return True
    for value in (a, b):
        if isinstance(value, int) and value not in _INTEGERS:
            raise TypeError("an integer of more than 64 bits cannot be compared by closeness")
    a, b = (value if isinstance(value, complex) else float(value) for value in (a, b))
    if equal_nan and a != a and b != b:
        return True
    is_finite = math.isfinite(b.real) and math.isfinite(b.imag)
    return is_finite and abs(a - b) <= atol + rtol * abs(b)


def allclose(a, b, rtol=1e-05, atol=1e-08, equal_nan=False):
    """Whether numbers, alone or in nested sequences, are equal within `atol + rtol * abs(b)`."""
    pairs = _pairs(a, _shape(a), b, _shape(b))
    # As numpy does, look at all of them first: shapes that do not fit are an error, wherever they stand.
    return all([_is_close(*pair, rtol, atol, equal_nan) for pair in pairs])
