"""Small programs, one for each part of the language and its library that a policy's code uses."""

FEATURES = {
    "inheritance": """
class A:
    def __init__(self):
        self.x = 1
    def f(self):
        return self.x
class B(A):
    def f(self):
        return super().f() + 1
assert B().f() == 2
""",
    "metaclasses": """
class M(type):
    def __new__(cls, name, bases, members):
        members["z"] = 5
        return super().__new__(cls, name, bases, members)
class A(metaclass=M):
    pass
assert A.z == 5
""",
    "dataclasses": """
from dataclasses import dataclass, field
@dataclass(order=True)
class P:
    x: int
    y: list = field(default_factory=list)
assert P(1) < P(2)
""",
    "generators": """
def g():
    x = yield 1
    yield x
i = g()
next(i)
assert i.send(5) == 5
""",
    "match": """
match {"a": [1, 2]}:
    case {"a": [x, *r]}:
        assert x == 1 and r == [2]
""",
    "exception groups": """
try:
    raise ExceptionGroup("e", [ValueError(1)])
except* ValueError as g:
    assert len(g.exceptions) == 1
""",
    "asyncio.run": """
import asyncio
async def f():
    await asyncio.sleep(0)
    return 3
assert asyncio.run(f()) == 3
""",
    "re": r"""
import re
assert re.sub(r"(\d+)", lambda m: str(int(m[1]) + 1), "a9") == "a10"
""",
    "json": """
import json
assert json.loads(json.dumps({"a": [1, 2.5, None]})) == {"a": [1, 2.5, None]}
""",
    "collections": """
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
assert Counter("aab").most_common(1) == [("a", 2)]
""",
    "itertools": """
import itertools
assert len(list(itertools.permutations("abc"))) == 6
""",
    "functools": """
import functools
@functools.lru_cache(None)
def f(n):
    return n if n < 2 else f(n - 1) + f(n - 2)
assert f(50) == 12586269025
""",
    "typing": """
from typing import Generic, Protocol, TypedDict, TypeVar
T = TypeVar("T")
class Box(Generic[T]):
    pass
class D(TypedDict):
    a: int
Box[int]
""",
    "decimal": """
from decimal import Decimal, getcontext
getcontext().prec = 30
assert str(Decimal(1) / 3).startswith("0.3333")
""",
    "datetime": """
import datetime
assert (datetime.date(2024, 3, 1) - datetime.date(2024, 2, 28)).days == 2
""",
    "math, heapq, bisect": """
import bisect, heapq, math
assert math.comb(10, 3) == 120
assert heapq.nsmallest(1, [3, 1]) == [1] and bisect.bisect([1, 2], 1) == 1
""",
    "random": """
import random
assert random.Random(42).randint(1, 100) == 82
""",
    "hashlib": """
import hashlib
assert hashlib.sha256(b"").hexdigest()[:4] == "e3b0"
""",
    "enum": """
import enum
class C(enum.Enum):
    A = 1
assert C(1) is C.A
""",
    "unittest": """
import io, unittest
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(1, 1)
suite = unittest.TestLoader().loadTestsFromTestCase(T)
assert unittest.TextTestRunner(stream=io.StringIO()).run(suite).wasSuccessful()
""",
    "big integers": """
assert len(str(3**5000)) == 2386
""",
    "exec and eval": """
d = {}
exec("x = 1 + 1", d)
assert d["x"] == 2 and eval("2 * 3") == 6
""",
    "SystemExit": """
import sys
try:
    sys.exit(3)
except SystemExit as e:
    assert e.code == 3
""",
    "traceback": """
import traceback
try:
    1 / 0
except ZeroDivisionError:
    assert "ZeroDivisionError" in traceback.format_exc()
""",
    "temporary files": """
import tempfile
path = tempfile.mkdtemp() + "/a"
open(path, "w").write("x")
assert open(path).read() == "x"
""",
    "threads": """
import threading
seen = []
thread = threading.Thread(target=seen.append, args=(1,))
thread.start()
thread.join()
assert seen == [1]
""",
    "sqlite3": """
import sqlite3
assert sqlite3.connect(":memory:").execute("select 1").fetchone() == (1,)
""",
    "zlib": """
import zlib
assert zlib.decompress(zlib.compress(b"a")) == b"a"
""",
}

# Not part of Python, but of what some sandboxes carry.
LIBRARIES = {
    "numpy": "import numpy\nassert int(numpy.arange(4).sum()) == 6\n",
    "pandas": "import pandas\nassert len(pandas.DataFrame({'a': [1]})) == 1\n",
}
