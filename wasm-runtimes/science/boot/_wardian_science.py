"""The science runtime's boot module: prepares the interpreter before the snapshot, and runs programs afterwards.

The guest is a CPython that was built elsewhere, with an export that hands source text to the function `_reactor.turn` and
takes back a status. That function is given another body here: what it gets is not source, but a line of JSON with a seed
and arguments, and the program after it.
"""

import _sitebuiltins
import asyncio
import atexit
import builtins
import gc
import importlib
import io
import json
import linecache
import os
import random
import sys
import weakref

import _reactor
import _wardian_loop
import numpy

# Importing before the snapshot makes it free afterwards.
PRELOADED = """
    abc argparse ast asyncio base64 bisect calendar cmath collections.abc contextlib copy csv dataclasses datetime decimal
    difflib enum fractions functools glob hashlib heapq html inspect itertools json logging math operator pathlib pickle
    pprint queue random re secrets shutil statistics string struct tempfile textwrap time timeit traceback typing
    unicodedata unittest urllib.parse uuid warnings zipfile zoneinfo
    numpy numpy.fft numpy.linalg numpy.ma numpy.polynomial numpy.random numpy.testing
    pandas
    scipy scipy.fft scipy.integrate scipy.interpolate scipy.linalg scipy.ndimage scipy.optimize scipy.signal scipy.sparse
    scipy.sparse.csgraph scipy.sparse.linalg scipy.spatial scipy.special scipy.stats
""".split()

_STATUS_ERROR = 1
_STATUS_FLUSH_FAILED = 120
_STATUS_INTERRUPTED = 130

# Bound before a program can replace them.
_seed_random = random.seed
_seed_numpy = numpy.random.seed
_compile = compile
_exec = exec
_parse = json.loads


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


class _Quitter(_sitebuiltins.Quitter):
    """`exit` and `quit`. CPython's also close stdin, which a later step in the same instance may still want."""

    def __call__(self, code=None):
        raise SystemExit(code)


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
        __builtins__=builtins,
        __file__="main.py",
    )


def _begin_step(source, seed):
    """Prepares for a program and returns the file name that it goes by."""
    if seed is not None:
        _seed_random(seed)
        _seed_numpy(seed & 0xFFFFFFFF)
    # The end of an earlier step ran the exit handlers; weakref would believe that its own is still registered.
    if weakref.finalize._registered_with_atexit:
        weakref.finalize._registered_with_atexit = False
        weakref.finalize._shutdown = False
    _main_loader.steps += 1
    if _main_loader.steps == 1:
        _main_loader.source = source
        name = "main.py"
    else:
        # A name of its own, so that a traceback finds the lines of functions from earlier steps, too.
        name = f"<step {_main_loader.steps}>"
    text = source.decode("utf-8", "replace")
    linecache.cache[name] = (len(source), None, text.splitlines(keepends=True), name)
    return name


def _status_of_exit(exception):
    """The exit status that a SystemExit asks for. Writes a code that is no number to stderr, as CPython does."""
    code = exception.code
    if code is None:
        return 0
    if isinstance(code, int):
        # A number out of range counts as -1, hence 255.
        return code & 0xFF if -(1 << 31) <= code < 1 << 31 else 0xFF
    try:
        print(code, file=sys.stderr)
    except Exception:
        pass
    return _STATUS_ERROR


def _report(exception):
    """Prints a program's exception as CPython would, without the frames below the program's own."""
    traceback = exception.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals is globals():
        traceback = traceback.tb_next
    exception = exception.with_traceback(traceback)
    sys.last_exc = exception
    try:
        sys.excepthook(type(exception), exception, traceback)
    except BaseException:
        sys.__excepthook__(type(exception), exception, traceback)


def _flush(name):
    """Flushes one of the sys streams, and returns whether that failed. One that is gone or closed counts as flushed."""
    try:
        stream = getattr(sys, name, None)
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    except BaseException:
        return True
    return False


def _end_step(status):
    """Does what CPython does between a program's end and the process's, as far as it can be seen from outside."""
    try:
        atexit._run_exitfuncs()
    except BaseException as error:
        _report(error)
    # sys.stdout may be the program's own; what is still in the original one must come out too.
    failed = [_flush(name) for name in ("stdout", "stderr", "__stdout__", "__stderr__")]
    return _STATUS_FLUSH_FAILED if any(failed) and status == 0 else status


def _step(source, seed):
    """Runs a program as `__main__`. Returns its exit status and False, or 0 and True for an uncaught MemoryError."""
    status = 0
    out_of_memory = False
    try:
        code = _compile(source, _begin_step(source, seed), "exec", 0, True)
        _exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as exception:
        status = _status_of_exit(exception)
    except BaseException as exception:
        status = _STATUS_ERROR
        if isinstance(exception, MemoryError):
            out_of_memory = True
        elif isinstance(exception, KeyboardInterrupt):
            status = _STATUS_INTERRUPTED
        _report(exception)
    status = _end_step(status)
    return (0, True) if out_of_memory else (status, False)


def turn(frame):
    """Runs the program in a frame of the host's. Returns as `_step` does.

    `frame` is None if there was no memory for it.
    """
    if frame is None:
        return 0, True
    head, _, source = frame.partition(b"\n")
    head = _parse(head)
    sys.argv[:] = ["main.py", *head["arguments"]]
    return _step(source, head["seed"])


# Programs run before the snapshot, so that the bytecode they use is specialized and their caches are filled.
_WARM_UP_PROGRAMS = [
    b"pass",
    b"print(1 + 1)",
    b"def add(a, b):\n    return a + b\nassert add(1, 2) == 3\n",
    b"def f(n):\n    return g(n)\ndef g(n):\n    raise ValueError('no')\nf(3)\n",
    b"print(undefined_name)\n",
    b"x = (\n",
    b"import numpy\nprint(numpy.arange(10).sum())\n",
    b"import numpy as np\na = np.ones((20, 20))\nprint(a @ a, a.mean(axis=0), np.linalg.det(np.eye(3)))\n"
    b"print(np.random.default_rng(1).normal(size=3), np.random.rand(2))\n",
    b"import pandas as pd\nd = pd.DataFrame({'a': [1, 2, 2], 'b': [1.5, 2, 3]})\nprint(d.groupby('a').sum(), d.describe())\n",
    b"from scipy import stats, optimize\nprint(stats.norm.cdf(1.0), optimize.brentq(lambda x: x * x - 2, 0, 2))\n",
    b"import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    return 1\nprint(asyncio.run(main()))\n",
    b"raise SystemExit('message')\n",
]


class _Discard(io.TextIOBase):
    """A stream that takes everything and keeps nothing."""

    def write(self, text):
        return len(text)


def _add_site_builtins():
    builtins.quit = _Quitter("quit", "Ctrl-D (i.e. EOF)")
    builtins.exit = _Quitter("exit", "Ctrl-D (i.e. EOF)")


def warm_up():
    """Runs typical programs, then puts everything they changed back."""
    for name in PRELOADED:
        importlib.import_module(name)
    _add_site_builtins()
    os.chdir("/work")
    # After the standard library: a program's own modules do not take the place of its.
    sys.path.append("/work")

    streams = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = _Discard()
    for _ in range(10):
        for program in _WARM_UP_PROGRAMS:
            _main_loader.steps = 0
            _step(program, 1)
            _reset_main()
    sys.stdout, sys.stderr = streams

    _main_loader.source = b""
    _main_loader.steps = 0
    sys.__dict__.pop("last_exc", None)
    linecache.clearcache()
    _reset_main()
    _seed_random(0)
    _seed_numpy(0)



def rest():
    """Leaves the interpreter as programs are to find it."""
    _reset_main()
    gc.collect()
    gc.freeze()


asyncio.events._event_loop_policy = _wardian_loop.EventLoopPolicy()
# Code that asks for a loop by class gets ours as well.
asyncio.SelectorEventLoop = asyncio.EventLoop = _wardian_loop.EventLoop
