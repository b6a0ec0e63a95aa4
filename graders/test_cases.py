"""Test functions and classes, found and run as pytest and unittest do.

pytest itself is not in the runtime. What plain test functions use of it is here: `mark.parametrize`, `raises`,
`approx`, `fixture`, `param`, `skip`, `fail`, `importorskip` and the marks that keep a test from running.
"""

import asyncio
import contextlib
import inspect
import itertools
import math
import pathlib
import re
import sys
import tempfile
import types
import unittest

import judge

# ---- unittest


class _UnittestResult(unittest.TestResult):
    """Adds one result per test method."""

    def __init__(self, results):
        super().__init__()
        self._results = results
        self._error = None

    def startTest(self, test):
        super().startTest(test)
        judge.begin_test()
        self._error = None

    def stopTest(self, test):
        super().stopTest(test)
        self._results.add(_method_name(test), self._error)

    def _fail(self, error):
        self._error = self._error or error

    def addError(self, test, error):
        super().addError(test, error)
        self._fail(error[1])

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._fail(error[1])

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self._fail(error[1])

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        # What is skipped while it runs might have been the submission's wish.
        self._fail(unittest.SkipTest(reason))

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self._fail(AssertionError("unexpected success"))


def _method_name(test):
    return f"{type(test).__name__}.{getattr(test, '_testMethodName', test)}"


def _is_skipped(case):
    method = getattr(case, case._testMethodName)
    return getattr(type(case), "__unittest_skip__", False) or getattr(method, "__unittest_skip__", False)


def _run_classes(classes, results):
    loader = unittest.TestLoader()
    for kind in classes:
        cases = [case for case in loader.loadTestsFromTestCase(kind) if not _is_skipped(case)]
        if not cases:
            continue
        result = _UnittestResult(results)
        unittest.TestSuite(cases).run(result)
        # A set-up of the whole class that fails leaves its tests without a result.
        reason = judge.describe(result._error) if result._error else "did not run"
        results.fill([_method_name(case) for case in cases], reason)


def _test_classes(namespace):
    return [
        value
        for value in namespace.values()
        if _is_class_of_tests(value) and issubclass(value, unittest.TestCase)
    ]


def run_unittest(bench, source, results, options):
    """Runs the methods of every `unittest.TestCase` of the file."""
    tree, imports = bench.parse(source)
    bench.prepare(imports)
    if bench.execute(tree, results):
        _run_classes(_test_classes(bench.namespace), results)


# ---- what test functions use of pytest


class _Fixture:
    def __init__(self, function, scope, name):
        self.function = function
        self.scope = scope
        self.name = name or function.__name__


def _fixture(function=None, *, scope="function", name=None, **_):
    if function is None:
        return lambda function: _Fixture(function, scope, name)
    return _Fixture(function, scope, name)


class _Mark:
    def __init__(self, name, arguments=(), keywords=None):
        self.name = name
        self.arguments = arguments
        self.keywords = keywords or {}

    def __call__(self, *arguments, **keywords):
        is_decorated = len(arguments) == 1 and not keywords and isinstance(arguments[0], (types.FunctionType, type))
        if not is_decorated:
            return _Mark(self.name, arguments, keywords)
        target = arguments[0]
        target.pytestmark = [*getattr(target, "pytestmark", []), self]
        return target


class _Marks:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Mark(name)


class _Parameters(tuple):
    """The values of one `pytest.param`."""

    id = None
    marks = ()


def _param(*values, id=None, marks=()):
    parameters = _Parameters(values)
    parameters.id = id
    parameters.marks = marks if isinstance(marks, (list, tuple)) else (marks,)
    return parameters


class _Raises:
    def __init__(self, expected, match):
        self.expected = expected
        self.match = match
        self.value = None

    @property
    def type(self):
        return type(self.value)

    def __str__(self):
        return str(self.value)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is None:
            names = self.expected if isinstance(self.expected, tuple) else (self.expected,)
            raise AssertionError(f"did not raise {', '.join(getattr(name, '__name__', str(name)) for name in names)}")
        if not isinstance(error, self.expected):
            return False
        if self.match is not None and re.search(self.match, str(error)) is None:
            raise AssertionError(f"{str(error)!r} does not match {self.match!r}")
        self.value = error
        return True


def _raises(expected, *arguments, match=None, **keywords):
    context = _Raises(expected, match)
    if not arguments:
        return context
    function, *rest = arguments
    with context:
        function(*rest, **keywords)
    return context


class _Approx:
    """Equal within 1e-6 of the expected number, or 1e-12, whichever is more, unless told otherwise."""

    __hash__ = None

    def __init__(self, expected, rel=None, abs=None, nan_ok=False):
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    def __repr__(self):
        return f"approx({self.expected!r})"

    def __eq__(self, actual):
        return self._equals(self.expected, actual)

    def _equals(self, expected, actual):
        if isinstance(expected, dict):
            return (
                isinstance(actual, dict)
                and expected.keys() == actual.keys()
                and all(self._equals(value, actual[key]) for key, value in expected.items())
            )
        if isinstance(expected, (list, tuple)):
            return (
                isinstance(actual, (list, tuple))
                and len(expected) == len(actual)
                and all(map(self._equals, expected, actual))
            )
        if isinstance(expected, (bool, str, bytes, type(None))) or not hasattr(expected, "__abs__"):
            return expected == actual
        if isinstance(actual, (bool, str, bytes, type(None))) or not hasattr(actual, "__abs__"):
            return False
        if expected != expected:
            return self.nan_ok and actual != actual
        if expected == actual:
            return True
        if abs(expected) == math.inf or abs(actual) == math.inf:
            return False
        absolute = 1e-12 if self.abs is None else self.abs
        relative = 1e-6 if self.rel is None and self.abs is None else self.rel or 0.0
        return abs(expected - actual) <= max(absolute, relative * abs(expected))


class Skipped(BaseException):
    """A test asked to be skipped while it ran."""


def _skip(reason="", **_):
    raise Skipped(reason)


def _fail(reason="", **_):
    raise AssertionError(reason)


def _pytest_module():
    module = types.ModuleType("pytest")
    module.approx = _Approx
    module.fail = _fail
    module.fixture = _fixture
    module.importorskip = __import__
    module.mark = _Marks()
    module.param = _param
    module.raises = _raises
    module.skip = _skip
    return module


# ---- finding test functions


def _marks_of(*targets):
    return [mark for target in targets for mark in getattr(target, "pytestmark", [])]


def _is_off(marks):
    """Whether a test is not to run: skipped, or expected to fail, which says nothing about the submission."""
    return any(
        mark.name in ("skip", "xfail") or (mark.name == "skipif" and mark.arguments and mark.arguments[0])
        for mark in marks
    )


def _label(name, value, index):
    if isinstance(value, (bool, int, float, str, type(None))):
        return str(value)
    return f"{name}{index}"


def _parameter_sets(marks):
    """Returns (label, {name: value}) for each combination of the `parametrize` marks."""
    groups = []
    for mark in marks:
        if mark.name != "parametrize":
            continue
        names, values = mark.arguments[:2]
        names = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)
        ids = mark.keywords.get("ids")
        group = []
        for index, row in enumerate(values):
            if isinstance(row, _Parameters):
                if _is_off(row.marks):
                    continue
                label, members = row.id, list(row)
            else:
                label, members = None, [row] if len(names) == 1 else list(row)
            if len(members) != len(names):
                raise judge.BrokenTask(f"`parametrize` has {len(members)} values for {len(names)} names")
            if label is None and isinstance(ids, (list, tuple)):
                label = ids[index]
            if label is None:
                label = "-".join(_label(name, member, index) for name, member in zip(names, members))
            group.append((str(label), dict(zip(names, members))))
        groups.append(group)
    for combination in itertools.product(*groups):
        merged = {}
        for _, values in combination:
            merged.update(values)
        yield "-".join(label for label, _ in combination), merged


class _Fixtures:
    """Makes the values that a test's parameters name."""

    def __init__(self, namespace):
        self._known = {value.name: value for value in namespace.values() if isinstance(value, _Fixture)}
        self._shared = {}

    def check(self, names, parameters):
        for name in names:
            if name not in parameters and name not in self._known and name != "tmp_path":
                raise judge.BrokenTask(f"there is no fixture `{name}`")

    def value(self, name, stack):
        if name == "tmp_path" and name not in self._known:
            return pathlib.Path(tempfile.mkdtemp())
        fixture = self._known[name]
        if name in self._shared:
            return self._shared[name]
        keywords = {inner: self.value(inner, stack) for inner in inspect.signature(fixture.function).parameters}
        value = fixture.function(**keywords)
        if inspect.isgenerator(value):
            generator, value = value, next(value)
            stack.callback(next, generator, None)
        if fixture.scope != "function":
            self._shared[name] = value
        return value


def _arguments(function):
    return list(inspect.signature(function).parameters)


def _is_class_of_tests(value):
    """Whether a value is a class that the tests define; the submission may have classes of such names."""
    return isinstance(value, type) and value.__module__ == "tests"


def _functions(namespace):
    """Returns (name, the class it is in, function) of each test, in the order of the file."""
    for name, value in namespace.items():
        if name.startswith("test") and isinstance(value, types.FunctionType):
            yield name, None, value
        elif name.startswith("Test") and _is_class_of_tests(value) and not issubclass(value, unittest.TestCase):
            yield from _methods(name, value)


def _methods(name, kind):
    """Returns the test methods of a class, inherited ones first; those of classes in it as well."""
    members = {}
    for base in reversed(kind.__mro__):
        members |= vars(base)
    for method, function in members.items():
        if method.startswith("Test") and _is_class_of_tests(function):
            yield from _methods(f"{name}.{method}", function)
        elif method.startswith("test") and isinstance(function, (staticmethod, classmethod)):
            raise judge.BrokenTask(f"`{name}.{method}` must be a plain method")
        elif method.startswith("test") and isinstance(function, types.FunctionType):
            yield f"{name}.{method}", kind, function


def _collect(bench):
    """Returns (name, what to call) of each test."""
    fixtures = _Fixtures(bench.namespace)
    tests = []
    for name, kind, function in _functions(bench.namespace):
        marks = _marks_of(kind, function)
        if _is_off(marks):
            continue
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise judge.BrokenTask(f"`{name}` yields, so calling it would test nothing")
        names = _arguments(function)[0 if kind is None else 1:]
        for label, parameters in _parameter_sets(marks):
            fixtures.check(names, parameters)
            title = f"{name}[{label}]" if label else name
            tests.append((title, _call(kind, function, names, parameters, fixtures)))
    return tests


def _call(kind, function, names, parameters, fixtures):
    def call():
        with contextlib.ExitStack() as stack:
            keywords = {
                name: parameters[name] if name in parameters else fixtures.value(name, stack) for name in names
            }
            if kind is None:
                return _finished(function(**keywords))
            instance = kind()
            if hasattr(instance, "teardown_method"):
                stack.callback(instance.teardown_method)
            if hasattr(instance, "setup_method"):
                instance.setup_method()
            return _finished(function(instance, **keywords))

    return call


def _finished(value):
    """Runs a coroutine to its end: a test may be asynchronous."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def run_pytest(bench, source, results, options):
    """Runs the file's test functions, the methods of its `Test…` classes and its `unittest.TestCase`s."""
    tree, imports = bench.parse(source)
    bench.prepare(imports)
    sys.modules["pytest"] = _pytest_module()
    if not bench.execute(tree, results):
        return
    try:
        tests = _collect(bench)
    except judge.BrokenTask:
        raise
    except BaseException as error:
        raise judge.BrokenTask(judge.describe(error)) from None
    for name, call in tests:
        with results.test(name):
            call()
    _run_classes(_test_classes(bench.namespace), results)
