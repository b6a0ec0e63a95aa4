"""Graders that users write: a file with `def grade(candidate, task) -> float | dict`."""

import math

import _grader_asserts
import _grader_sources
import judge


class Candidate:
    """The submission, as a user's grader sees it: its text, and stubs for the names it defines."""

    def __init__(self, source, bench):
        self._source = source
        self._bench = bench

    @property
    def source(self):
        # Who reads it has asked: what a grader stumbles over in it is the submission's doing.
        self._bench.requests += 1
        return self._source

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            value = judge.entry(name)
        except NameError as error:
            raise AttributeError(str(error)) from None
        self.__dict__[name] = value
        return value


def _number(name, value):
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"`{name}` is of type `{type(value).__name__}`, not a number")
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"`{name}` is {value}, not a finite number")
    return value


def _read(returned):
    """Returns reward, whether that is a pass, the message and the named rewards."""
    if not isinstance(returned, dict):
        reward = _number("reward", returned)
        return reward, reward >= 1.0, "", {}
    fields = dict(returned)
    message = fields.pop("message", "")
    passed = fields.pop("passed", None)
    if not isinstance(message, str) or not (passed is None or isinstance(passed, bool)):
        raise TypeError("`message` must be a text and `passed` a bool")
    if not all(isinstance(name, str) for name in fields):
        raise TypeError("the names of rewards must be texts")
    named = {name: _number(name, value) for name, value in fields.items()}
    reward = named.pop("reward") if "reward" in named else _number("the sum of the rewards", sum(named.values()))
    return reward, reward >= 1.0 if passed is None else passed, message, named


def grade(bench, source, options):
    """Returns ("scored", reward, passed, message, [(name, reward), …]), numbers as texts."""
    _grader_sources.remember("grader.py", source)
    try:
        code = compile(source, "grader.py", "exec", dont_inherit=True)
    except BaseException as error:
        raise judge.BrokenTask(judge.describe(error)) from None
    bench.prepare()
    candidate = Candidate(options["source"], bench)
    judge.begin_test()
    try:
        namespace = bench.namespace
        exec(code, namespace)
        if not callable(namespace.get("grade")):
            raise judge.BrokenTask("the grader defines no function `grade(candidate, task)`")
        reward, passed, message, named = _read(namespace["grade"](candidate, options["task"]))
    except judge.BrokenTask:
        raise
    except BaseException as error:
        message = judge.describe(error)
        if judge.bridge_errors():
            return _scored(0.0, False, judge.bridge_errors()[0], {})
        if bench.is_own(error) or (isinstance(error, ModuleNotFoundError) and not bench.has_asked):
            raise judge.MissingModule(error.name) from None
        # A grader that stumbles over what a submission returned is not to blame.
        if bench.has_asked:
            return _scored(0.0, False, message, {})
        raise judge.BrokenTask(message) from None
    if judge.bridge_errors():
        return _scored(0.0, False, judge.bridge_errors()[0], {})
    return _scored(reward, passed, message, named)


def _scored(reward, passed, message, named):
    # What it says may quote the submission.
    texts = [(_grader_asserts.safe(name), repr(value)) for name, value in named.items()]
    return ("scored", repr(reward), passed, _grader_asserts.safe(message, judge.MESSAGE_LIMIT), texts)
