"""The boot module: prepares the interpreter before the snapshot, and answers the host afterwards.

`shim.c` calls `warm_up` once, `begin_step` before each program, and `serve` for each message.
"""

import _sitebuiltins
import asyncio
import builtins
import importlib.util
import io
import linecache
import random
import sys
import weakref

import _wardian_absent
import _wardian_candidate
import _wardian_guest
import _wardian_loop
import _wardian_traceback
import _wardian_values
import judge
import unit_tests

# What programs import most. Importing before the snapshot makes it free afterwards.
PRELOADED = """
    abc argparse ast asyncio base64 binascii bisect builtins calendar cmath codecs collections collections.abc
    colorsys configparser contextlib contextvars copy csv dataclasses datetime decimal difflib dis doctest enum errno
    fnmatch fractions functools gc glob graphlib hashlib heapq hmac html inspect io ipaddress itertools json keyword
    linecache locale logging math numbers operator os pathlib pickle platform pprint queue random re reprlib sched
    secrets shlex shutil signal statistics string struct subprocess sys tempfile textwrap threading time timeit token
    tokenize traceback types typing unicodedata unittest unittest.mock urllib.parse uuid warnings weakref zipfile zlib
    zoneinfo
""".split()


class _MainLoader:
    """`__main__`'s loader: lets tracebacks, warnings and `inspect` show the source of the first step."""

    def __init__(self):
        self.source = b""
        self.steps = 0

    def get_source(self, name="__main__"):
        return self.source.decode("utf-8", "replace")

    def __repr__(self):
        return "<main.py>"


_main_loader = _MainLoader()


class _Lines(list):
    """The lines of a program for linecache, split when one is wanted: few programs fail.

    linecache itself would first look for a file of the program's name, along all of sys.path.
    """

    __slots__ = ("source",)

    def __init__(self, source):
        self.source = source

    def _split(self):
        if self.source is not None:
            # As a file is read: `str.splitlines` knows more ends of lines than Python's grammar.
            self.extend(io.StringIO(self.source.decode("utf-8", "replace"), newline=None))
            self.source = None

    def __len__(self):
        self._split()
        return list.__len__(self)

    def __iter__(self):
        self._split()
        return list.__iter__(self)

    def __getitem__(self, index):
        self._split()
        return list.__getitem__(self, index)


def _remember_lines(name, source):
    linecache.cache[name] = (len(source), None, _Lines(source), name)


class _Quitter(_sitebuiltins.Quitter):
    """`exit` and `quit`. CPython's also close stdin, which a later step in the same instance may still want."""

    def __call__(self, code=None):
        raise SystemExit(code)


def _add_site_builtins():
    """Adds what `site` adds; it does not run here, as most of it is about directories."""
    builtins.quit = _Quitter("quit", "Ctrl-D (i.e. EOF)")
    builtins.exit = _Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.copyright = _sitebuiltins._Printer("copyright", sys.copyright)
    builtins.credits = _sitebuiltins._Printer("credits", "Python is the work of a cast of thousands.")
    builtins.license = _sitebuiltins._Printer("license", "Python Software Foundation License Version 2")
    builtins.help = _sitebuiltins._Helper()


def _reset_main():
    """Gives `__main__` the globals that it has under `python main.py`."""
    main_globals = sys.modules["__main__"].__dict__
    main_globals.clear()
    main_globals.update(
        __name__="__main__",
        __doc__=None,
        __package__=None,
        __loader__=_main_loader,
        __spec__=None,
        __annotations__={},
        __builtins__=builtins,
        __file__="main.py",
        __cached__=None,
    )


# A program may replace the module's attribute.
_seed_random = random.seed


def begin_step(source, seed):
    """Prepares for the program `source` (bytes) and returns the file name that it goes by.

    `seed` is an int for the random module, or None to leave it.
    """
    if seed is not None:
        _seed_random(seed)
    # The end of an earlier step ran the exit handlers; weakref would believe that its own is still registered.
    if weakref.finalize._registered_with_atexit:
        weakref.finalize._registered_with_atexit = False
        weakref.finalize._shutdown = False
    _main_loader.steps += 1
    if _main_loader.steps == 1:
        _main_loader.source = source
        _remember_lines("main.py", source)
        return "main.py"
    # A name of its own, so that a traceback finds the lines of functions from earlier steps, too.
    name = f"<step {_main_loader.steps}>"
    _remember_lines(name, source)
    return name


def set_arguments(arguments):
    """Makes `arguments` (bytes, each ended by a NUL) the program's, after its name."""
    sys.argv[:] = ["main.py", *arguments.decode("utf-8", "replace").split("\0")[:-1]]


def serve(request):
    """Answers one message of the host (CODEC.md, section 3). Raises for a message that is none: the host sees a failure."""
    message, _, _ = _wardian_guest.decode(request, _wardian_values.unpack, None, None, None)
    if message[0] == "grade":
        return unit_tests.serve(message)
    if message[0] == "judge":
        return judge.serve(message)
    return _wardian_candidate.serve(message)


def answer(request):
    """Answers one message from the other side of the bridge."""
    if unit_tests.is_grading():
        return unit_tests.answer(request)
    return _wardian_candidate.answer(request)


# What stands for an answer that could not be made: most likely there was no stack left for it.
FAILED = _wardian_candidate.FAILED


# Programs run before the snapshot, so that the bytecode they use is specialized and their caches are filled.
_WARM_UP_PROGRAMS = [
    b"pass",
    b"print(1 + 1)",
    b"import sys\nprint(sys.stdin.__class__.__name__)\n",
    b"def add(a, b):\n    return a + b\nassert add(1, 2) == 3\nprint([add(i, i) for i in range(50)][-1])\n",
    b"x = [1, 2, 3]\nprint(x[10])\n",
    b"def f(n):\n    return g(n)\ndef g(n):\n    raise ValueError('no')\nf(3)\n",
    b"print(undefined_name)\n",
    b"x = (\n",
    b"import json, re, collections\n"
    b"text = json.dumps({'a': [1, 2.5, None, True], 'b': 'text'})\n"
    b"print(json.loads(text), re.findall(r'\\d+', 'a1b22'), collections.Counter('hello').most_common(1))\n",
    b"class A:\n    def __init__(self):\n        self.x = 1\n"
    b"    def f(self, *a, **k):\n        return sorted(a, key=lambda v: -v)\n"
    b"print(f'{A().x} {A().f(1, 2)}', {k: v for k, v in zip('abc', range(3))})\n",
    b"from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 2\nprint(P(1))\n",
    b"import random, math, itertools, functools, heapq\n"
    b"print(random.randint(1, 6), math.sqrt(2), list(itertools.permutations('ab')))\n"
    b"h = [3, 1, 2]\nheapq.heapify(h)\nprint(functools.reduce(lambda a, b: a + b, h))\n",
    b"try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    print(repr(e))\n",
    b"import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    return 1\nprint(asyncio.run(main()))\n",
    b"raise SystemExit\n",
    b"raise SystemExit('message')\n",
]


class _Discard(io.TextIOBase):
    """A stream that takes everything and keeps nothing."""

    def write(self, text):
        return len(text)


def warm_up():
    """Runs typical programs and messages, then puts everything they changed back."""
    for name in PRELOADED:
        importlib.import_module(name)
    # Makes the path-based finder look at its folders once, before the snapshot.
    importlib.util.find_spec("_wardian_no_such_module")
    _add_site_builtins()

    streams = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = _Discard()
    for _ in range(20):
        for program in _WARM_UP_PROGRAMS:
            _main_loader.steps = 0
            _wardian_guest.run_step(program, 1)
            _reset_main()
        _wardian_candidate.warm_up()
        unit_tests.warm_up(_wardian_candidate.answer)
        judge.warm_up(_wardian_candidate.answer)
    sys.stdout, sys.stderr = streams

    _main_loader.source = b""
    _main_loader.steps = 0
    linecache.clearcache()
    _wardian_candidate.reset()
    _reset_main()
    random.seed(0)


_wardian_absent.install()
_wardian_traceback.install()
asyncio.set_event_loop_policy(_wardian_loop.EventLoopPolicy())
# Code that asks for a loop by class gets ours as well.
asyncio.SelectorEventLoop = asyncio.EventLoop = _wardian_loop.EventLoop
