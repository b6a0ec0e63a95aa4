"""The unit-test grader: runs a task's tests against a submission that lives in another instance.

It runs inside the guest, in an instance of its own. Names of the submission stand for objects of the candidate's instance
(`_grader_remote.py`, CODEC.md). A verdict is formed in this memory, which no submission can reach.
"""

import builtins
import os
import random

import _grader_asserts
import _grader_remote
import _grader_sources
import _wardian_guest
import numpy_stand_in

_MESSAGE_LIMIT = 300

# After this many tests in which the submission ran out of a limit, no further one is begun: it bounds what a submission
# can cost.
_MAX_EXHAUSTED = 3

_OPTIONS = frozenset(["read_only_arguments", "strict_types", "printed_output"])

_bridge_open = _wardian_guest.bridge_open
_state = _grader_remote.state
_grading = False


def is_grading():
    """Returns whether this is the tests' instance."""
    return _grading


def answer(request):
    """Answers what the submission asks while a test calls it."""
    return _grader_remote.answer(request)


# ---- what tests can use


class printed:
    """What the submission prints from here on: `with printed() as out: f()`, then `out.text`.

    `out.errors` is what went to standard error. Either is cut at 64 KiB for each time that it is looked at.
    """

    def __init__(self):
        self._read()
        self._texts = ["", ""]

    def _read(self):
        return [_grader_remote.printed(stream) for stream in (1, 2)]

    def _look(self):
        self._texts = [text + more for text, more in zip(self._texts, self._read())]
        return self._texts

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._look()

    @property
    def text(self):
        return self._look()[0]

    @property
    def errors(self):
        return self._look()[1]

    def __str__(self):
        return self.text


# ---- grading


class _MissingModule(Exception):
    """A test imports what this runtime does not have."""


def _text_of(error):
    try:
        return str(error)
    except BaseException:
        return ""


def _describe(error):
    """Returns an exception as a message, and the line of the submission that it came from."""
    text = _text_of(error)
    if type(error) is _grader_remote.BridgeError:
        return (_grader_asserts.safe(text, _MESSAGE_LIMIT), None)
    name = type(error).__name__
    if not name.isidentifier():
        # It is the submission's, which must not speak in our name.
        name = repr(name)
    line, _ = _state.lines.get(id(error), (None, None))
    message = f"{name}: {text}" if text else name
    message = _grader_asserts.safe(message, _MESSAGE_LIMIT)
    return (message if line is None else f"{message} (solution.py, line {line})", line)


def _failed(message, line=None):
    """The result of a test: [status, message, expected, got, line]. A list: the host reads no references."""
    return ["failed", message, None, None, line]


def _open(note):
    """Opens a round, and says how the one before went."""
    if not _bridge_open(note):
        raise RuntimeError("no further instance of the submission")


class _Grading:
    """A task's tests and one submission."""

    def __init__(self, setup, tests, entries, options):
        self.setup = setup
        self.tests = tests
        self.entries = entries
        self.is_strict = "strict_types" in options
        self.has_printed = "printed_output" in options
        self.namespace = {}
        # What the setup left there.
        self.base = {}
        # What the running test is to be explained by, if it is.
        self.failures = None

    def compile(self, source, file_name):
        _grader_sources.remember(file_name, source)
        if self.is_strict or self.failures is not None:
            return _grader_asserts.rewritten(source, file_name, self.entries, self.is_strict)
        return compile(source, file_name, "exec", dont_inherit=True)

    def compile_test(self, index):
        return self.compile(self.tests[index], f"test_{index + 1}.py")

    def set_up(self):
        self.namespace.clear()
        self.namespace.update(__name__="tests", __builtins__=builtins)
        if self.is_strict or self.failures is not None:
            self.namespace |= _grader_asserts.names(self.failures)
        if self.has_printed:
            self.namespace["printed"] = printed
        exec(self.compile(self.setup, "setup.py"), self.namespace)
        self.base = dict(self.namespace)

    def prepare(self):
        """Begins a test in a new round, with the names that the setup made and the submission's."""
        _grader_remote.forget()
        self.namespace.clear()
        self.namespace.update(self.base)
        self.namespace.update(_grader_remote.entries(self.entries))

    def run(self, index, code):
        """Runs a test. Returns its result and the exception that it raised, if it failed by one."""
        try:
            exec(code, self.namespace)
        except BaseException as error:
            # Its description may ask the submission for a text, so a bridge error can come up only now.
            message, line = _describe(error)
            if not _state.bridge_errors:
                if _grader_sources.is_own_import(error, _grader_remote.__dict__):
                    raise _MissingModule(message) from None
                return _failed(message, line), error
        if _state.bridge_errors:
            return _failed(_grader_asserts.safe(_state.bridge_errors[0], _MESSAGE_LIMIT)), None
        return ["passed", "", None, None, None], None

    def explain(self, results, indices):
        """Runs failed tests again, with asserts that remember what they compared."""
        note = _encode(results[-1])
        for index in indices:
            # First of all, so that what follows is not charged to a test.
            _open(note)
            note = b""
            if self.failures is None:
                self.failures = _grader_asserts.Failures(_grader_remote.Remote)
                self.set_up()
            code = self.compile_test(index)
            self.prepare()
            self.failures.clear()
            _, failure = self.run(index, code)
            results[index][2:4] = self.failures.explanation(failure)


def grade(setup, tests, entries, options):
    """Returns one [status, message, expected, got, line] per test.

    When none could run: ("broken", message) if the task is at fault, ("invalid", message) if the submission is.
    """
    _state.read_only = "read_only_arguments" in options
    numpy_stand_in.provide(setup, *tests)
    grading = _Grading(setup, tests, entries, options)
    try:
        # The submission has no part in this yet, so what fails here is the task's.
        codes = [grading.compile_test(index) for index in range(len(tests))]
        grading.set_up()
    except BaseException as error:
        return ("broken", _describe(error)[0])
    results = []
    asserted = []
    exhausted = 0
    for index, code in enumerate(codes):
        _open(_encode(results[-1]) if results else b"")
        try:
            grading.prepare()
        except BaseException as error:
            return ("invalid", _describe(error)[0])
        try:
            result, failure = grading.run(index, code)
        except _MissingModule as error:
            return ("broken", str(error))
        results.append(result)
        if type(failure) is AssertionError and _state.lines.get(id(failure)) is None:
            asserted.append(index)
        exhausted += _grader_remote.EXHAUSTED in _state.bridge_errors
        if exhausted == _MAX_EXHAUSTED:
            message = f"not begun: the submission ran out of time or memory in {exhausted} tests before"
            results += [_failed(message) for _ in codes[len(results):]]
            return results
    if asserted:
        try:
            grading.explain(results, asserted)
        except BaseException:
            pass  # the verdict stands without
    return results


def _encode(value):
    return _wardian_guest.encode(value, None, None)[0]


def begin():
    """Makes this the tests' instance: what it draws at random is not what the submission's draws."""
    global _grading
    _grading = True
    random.seed(os.urandom(16))


def serve(message):
    """Answers the host's `grade` message."""
    match message:
        case ("grade", str() as setup, list() as tests, list() as entries, list() as options) if all(
            type(text) is str for text in (*tests, *entries, *options)
        ) and _OPTIONS.issuperset(options):
            begin()
            return _encode(grade(setup, tests, entries, options))
    raise ValueError("malformed message")


def warm_up(answer):
    """Grades small submissions that `answer`, a candidate in this same instance, has loaded.

    Run before the snapshot, for its specialized bytecode.
    """
    global _bridge_open
    tests = [
        "assert math.sqrt(f(4)) == 2",
        "x = [1, 2]\nassert f(x) == [1, 2, 1] and x == [1, 2, 1]",
        "assert [1] == [2]",
        "assert f({'a': (1, None)}) == {'a': (1, None)}",
        "f()",
        "p = P(3)\nassert p.x == 3 and p.get() == 3 and isinstance(p, P)",
    ]
    _bridge_open = lambda note: True
    _grader_remote._bridge_call = answer
    serve(("grade", "import math", tests, ["f", "P"], []))
    serve(("grade", "", ["pass"], ["missing"], []))
    cool_down()


def cool_down():
    """Forgets what a warm-up left."""
    global _bridge_open, _grading
    _bridge_open = _wardian_guest.bridge_open
    _grader_remote._bridge_call = _wardian_guest.bridge_call
    _grading = False
    _state.clear()
    _state.read_only = False
    _grader_sources.forget()
    _grader_remote._known_classes.clear()
    _state.number = 0
