"""Test functions and classes, found and run as pytest and unittest do.

pytest itself is not in the runtime. What plain test functions use of it is here: `mark.parametrize`, `raises`,
`approx`, `fixture`, `param`, `skip`, `fail`, `importorskip`, the marks that keep a test from running, and what is set up
and torn down around tests.
"""

import ast
import asyncio
import contextlib
import inspect
import itertools
import math
import os
import pathlib
import platform
import re
import sys
import tempfile
import types
import unittest
import unittest.suite
import unittest.util

import _grader_remote
import judge

# ---- unittest


class _UnittestResult(unittest.TestResult):
    """Adds one result per test method, and one for each class or module that is not torn down."""

    def __init__(self, results):
        super().__init__()
        # Why the tests of a class or a module were not begun, by what should have set them up.
        self.reasons = {}
        self._results = results
        self._error = None

    def startTest(self, test):
        super().startTest(test)
        # What went wrong on the bridge since the test before is not forgotten: it was while something was set up.
        self._error = None

    def stopTest(self, test):
        super().stopTest(test)
        self._results.add(_method_name(test), self._error)
        judge.begin_test()

    def _fail(self, test, error):
        if not isinstance(test, unittest.suite._ErrorHolder):
            self._error = self._error or error
            return
        if test.description.startswith("setUp"):
            self.reasons[test.description] = error
        else:
            self._results.add(test.description, error)
        judge.begin_test()

    def addError(self, test, error):
        super().addError(test, error)
        self._fail(test, error[1])

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._fail(test, error[1])

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self._fail(test, error[1])

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        # What is skipped while it runs might have been the submission's wish.
        self._fail(test, unittest.SkipTest(reason))

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self._fail(test, AssertionError("unexpected success"))


class _SuiteWithoutModule(unittest.TestSuite):
    """A suite whose module is set up and torn down by somebody else."""

    def _handleModuleFixture(self, test, result):
        pass

    def _handleModuleTearDown(self, result):
        pass


def _method_name(test):
    return f"{type(test).__name__}.{getattr(test, '_testMethodName', test)}"


def _is_skipped(case):
    method = getattr(case, case._testMethodName)
    return getattr(type(case), "__unittest_skip__", False) or getattr(method, "__unittest_skip__", False)


def _check_method(case):
    """Refuses a method of which a call would test nothing."""
    method = getattr(case, case._testMethodName)
    is_awaited = isinstance(case, unittest.IsolatedAsyncioTestCase)
    if _yields(method) or (inspect.iscoroutinefunction(method) and not is_awaited):
        raise judge.BrokenTask(
            f"`{_method_name(case)}` is asynchronous or yields, so calling it would test nothing; "
            "use `IsolatedAsyncioTestCase`"
        )


def _yields(function):
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _cases_of(suite):
    for test in suite:
        if isinstance(test, unittest.BaseTestSuite):
            yield from _cases_of(test)
        else:
            yield test


def _run_cases(bench, suite, results, kind=unittest.TestSuite):
    """Runs all tests of a suite, as one of this kind."""
    cases = [case for case in _cases_of(suite) if not _is_skipped(case)]
    for case in cases:
        _check_method(case)
    result = _UnittestResult(results)
    judge.begin_test()
    try:
        kind(cases).run(result)
    except BaseException as error:
        # Around a class, unittest catches no more than an `Exception`.
        result.reasons["run"] = error
        results.add("setup and teardown", error)
    else:
        if judge.bridge_errors():
            results.add("setup and teardown", None)
    if result.reasons and not bench.has_asked:
        raise judge.BrokenTask(judge.describe(next(iter(result.reasons.values()))))
    # What is not set up leaves its tests without a result.
    for case in cases:
        reason = result.reasons.get(f"setUpClass ({unittest.util.strclass(type(case))})")
        reason = reason or next(iter(result.reasons.values()), None)
        results.fill([_method_name(case)], "did not run" if reason is None else judge.describe(reason))


def _suite(namespace):
    """Returns the methods of the file's `TestCase`s."""
    loader = unittest.TestLoader()
    return unittest.TestSuite(
        loader.loadTestsFromTestCase(value)
        for value in namespace.values()
        if _is_class_of_tests(value) and issubclass(value, unittest.TestCase)
    )


def _decorated(tree):
    """The decorated test functions of a file, as (class or None, name)."""
    for node in tree.body:
        kind, members = (node.name, node.body) if isinstance(node, ast.ClassDef) else (None, [node])
        for member in members:
            is_function = isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef))
            if is_function and member.decorator_list and member.name.startswith("test"):
                yield kind, member.name


def _fail_lost(bench, tree, results, is_test):
    """Fails the tests that are none any more, by what decorates them: that may be the submission's."""
    for kind, name in _decorated(tree):
        scope = bench.namespace.get(kind, None) if kind else bench.tests
        value = vars(scope).get(name) if scope is not None else None
        if scope is bench.tests or _is_class_of_tests(scope):
            if not is_test(scope, value):
                name = f"{kind}.{name}" if kind else name
                results.add(name, TypeError("what decorates it makes it no test"))


def _is_unittest(scope, value):
    is_collected = isinstance(scope, type) and issubclass(scope, unittest.TestCase)
    return callable(value) if is_collected else True


def _is_pytest(scope, value):
    if isinstance(scope, type):
        if issubclass(scope, unittest.TestCase):
            return _is_unittest(scope, value)
        return isinstance(value, (types.FunctionType, staticmethod, classmethod))
    return isinstance(value, types.FunctionType) or _is_remote(value)


def _is_remote(value):
    return isinstance(value, _grader_remote.Remote)


@contextlib.contextmanager
def _collecting(bench, results):
    """Finds tests in its body, which the submission may be asked for: what it raises then is a result."""
    judge.begin_test()
    try:
        yield
    except judge.BrokenTask:
        raise
    except BaseException as error:
        if not bench.has_asked:
            raise judge.BrokenTask(judge.describe(error)) from None
        results.add("collection", error)
    else:
        if judge.bridge_errors():
            results.add("collection", None)


def run_unittest(bench, source, results, options):
    """Runs the methods of every `unittest.TestCase` of the file, or what its `load_tests` gives."""
    tree, imports = bench.parse(source)
    bench.prepare(imports)
    if not bench.execute(tree, results):
        return
    suite = _suite(bench.namespace)
    load_tests = bench.namespace.get("load_tests")
    if load_tests is not None:
        with _collecting(bench, results):
            suite = load_tests(unittest.TestLoader(), suite, None)
            if not isinstance(suite, unittest.BaseTestSuite):
                raise TypeError(f"`load_tests` gives a `{type(suite).__name__}`, not a suite")
    if not results.entries:
        _run_cases(bench, suite, results)
    _fail_lost(bench, tree, results, _is_unittest)


# ---- what test functions use of pytest


class _Fixture:
    def __init__(self, function, scope, name, autouse):
        self.function = function
        self.scope = scope
        self.name = name or function.__name__
        self.autouse = autouse


def _fixture(function=None, *, scope="function", name=None, autouse=False, **_):
    if function is None:
        return lambda function: _Fixture(function, scope, name, autouse)
    return _Fixture(function, scope, name, autouse)


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


def _marks_of(target):
    """The marks of a module, a class or a function."""
    marks = getattr(target, "pytestmark", [])
    return list(marks) if isinstance(marks, (list, tuple)) else [marks]


def _holds(condition, namespace):
    """Whether the condition of a mark holds; a text is an expression, as pytest has it."""
    if not isinstance(condition, str):
        return bool(condition)
    names = {"os": os, "sys": sys, "platform": platform, **namespace}
    return bool(eval(compile(condition, judge.TEST_FILE, "eval", dont_inherit=True), names))


def _is_off(marks, namespace):
    """Whether a test is not to run: skipped, or expected to fail, which says nothing about the submission."""
    for mark in marks:
        if mark.name == "skip":
            return True
        if mark.name in ("skipif", "xfail"):
            conditions = [mark.keywords["condition"]] if "condition" in mark.keywords else mark.arguments
            if not conditions or any(_holds(condition, namespace) for condition in conditions):
                return True
    return False


def _label(name, value, index):
    if isinstance(value, (bool, int, float, str, type(None))):
        return str(value)
    return f"{name}{index}"


def _parameter_sets(bench, marks):
    """Returns (label, {name: value}) for each combination of the `parametrize` marks."""
    groups = []
    for mark in marks:
        if mark.name != "parametrize":
            continue
        if mark.keywords.get("indirect"):
            raise judge.BrokenTask("`parametrize` with `indirect` is not supported")
        names, values = mark.arguments[:2]
        names = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)
        ids = mark.keywords.get("ids")
        group = []
        values = list(values)
        if not values and bench.requests:
            # Without any there is no test: the submission may have seen to that.
            raise ValueError("`parametrize` has no values")
        for index, row in enumerate(values):
            if isinstance(row, _Parameters):
                if _is_off(row.marks, bench.namespace):
                    continue
                label, members = row.id, list(row)
            else:
                label, members = None, [row] if len(names) == 1 else list(row)
            if len(members) != len(names):
                raise ValueError(f"`parametrize` has {len(members)} values for {len(names)} names")
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


def _arguments(function):
    return list(inspect.signature(function).parameters)


def _is_class_of_tests(value):
    """Whether a value is a class that the tests define; the submission may have classes of such names."""
    return isinstance(value, type) and value.__module__ == "tests"


class _Test:
    """A test function with its parameters."""

    def __init__(self, name, kind, function, marks):
        self.name = name
        # The class that it is a method of.
        self.kind = kind
        self.function = function
        self.marks = marks
        self.parameters = {}

    def with_parameters(self, label, parameters):
        test = _Test(f"{self.name}[{label}]" if label else self.name, self.kind, self.function, self.marks)
        test.parameters = parameters
        return test

    def fixtures(self):
        """The names of the fixtures that it asks for."""
        used = [name for mark in self.marks if mark.name == "usefixtures" for name in mark.arguments]
        return used + self.arguments()

    def arguments(self):
        return _arguments(self.function)[0 if self.kind is None else 1:]


def _calling(remote):
    """A test that calls a function of the submission, by which it wrapped one of the tests."""

    def test():
        return remote()

    return test


def _functions(tests, decorated):
    """Returns each test of a module, in the order of the file."""
    outer = _marks_of(tests)
    for name, value in list(vars(tests).items()):
        if name.startswith("test") and isinstance(value, types.FunctionType):
            yield _Test(name, None, value, outer + _marks_of(value))
        elif (None, name) in decorated and _is_remote(value):
            # Its marks would be the submission's to choose.
            yield _Test(name, None, _calling(value), outer)
        elif name.startswith("Test") and _is_class_of_tests(value) and not issubclass(value, unittest.TestCase):
            yield from _methods(name, value, outer)


def _members(kind):
    """What a class has, inherited members first."""
    members = {}
    for base in reversed(kind.__mro__):
        members |= vars(base)
    return members


def _methods(name, kind, outer):
    """Returns the test methods of a class; those of classes in it as well."""
    marks = outer + _marks_of(kind)
    for method, function in _members(kind).items():
        if method.startswith("Test") and _is_class_of_tests(function):
            yield from _methods(f"{name}.{method}", function, marks)
        elif method.startswith("test") and isinstance(function, (staticmethod, classmethod)):
            raise judge.BrokenTask(f"`{name}.{method}` must be a plain method")
        elif method.startswith("test") and isinstance(function, types.FunctionType):
            yield _Test(f"{name}.{method}", kind, function, marks + _marks_of(function))


def _collect(bench, fixtures, decorated):
    """Returns the tests to run."""
    tests = []
    for test in _functions(bench.tests, decorated):
        if _is_off(test.marks, bench.namespace):
            continue
        if _yields(test.function):
            raise judge.BrokenTask(f"`{test.name}` yields, so calling it would test nothing")
        for variant in _parameter_sets(bench, test.marks):
            variant = test.with_parameters(*variant)
            fixtures.check(variant)
            tests.append(variant)
    return tests


# ---- what is set up around tests


def _optionally(function, argument):
    """Calls a function with an argument, if it takes one."""
    return _finished(function(argument) if _arguments(function) else function())


def _finished(value):
    """Runs a coroutine to its end: a test may be asynchronous."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


class _Scope:
    """What is set up once: for all tests, for those of a class, or for one."""

    def __init__(self):
        self.stack = contextlib.ExitStack()
        self.values = {}
        self.error = None
        self._is_begun = False

    def begin(self, set_up):
        """Sets up, the first time; what fails then fails for each test."""
        if not self._is_begun:
            self._is_begun = True
            try:
                set_up(self)
            except BaseException as error:
                self.error = error
        if self.error is not None:
            raise self.error

    def enter(self, target, set_up, tear_down, argument):
        """Calls the function of a module, a class or an object that sets up, the first there is of these names.

        Its counterpart is called at the end.
        """
        function = _first(target, set_up)
        if function is not None:
            _optionally(function, argument)
        function = _first(target, tear_down)
        if function is not None:
            self.stack.callback(_optionally, function, argument)


def _first(target, names):
    function = next((getattr(target, name) for name in names if hasattr(target, name)), None)
    # A class method gets its class as the argument.
    return function.__func__ if isinstance(target, type) and hasattr(function, "__func__") else function


class _Run:
    """A test, and what is made for it."""

    def __init__(self, fixtures, test):
        self.test = test
        self.own = _Scope()
        self.instance = None
        self._tests = fixtures.tests
        self._known = fixtures.known_to(test.kind)
        self._scopes = {"function": self.own, "class": self.own} | dict.fromkeys(
            ("module", "package", "session"), fixtures.module
        )
        if test.kind is not None:
            self._scopes["class"] = fixtures.classes.setdefault(test.kind, _Scope())

    def value(self, name):
        """The value of a parameter or of a fixture."""
        if name in self.test.parameters:
            return self.test.parameters[name]
        if name not in self._known:
            # The only one that is not the tests' own.
            if name not in self.own.values:
                self.own.values[name] = pathlib.Path(tempfile.mkdtemp())
            return self.own.values[name]
        fixture, is_method = self._known[name]
        scope = self._scopes[fixture.scope]
        if name not in scope.values:
            function = fixture.function
            if is_method:
                function = function.__get__(self.test.kind() if self.instance is None else self.instance)
            made = _finished(function(**{inner: self.value(inner) for inner in _arguments(function)}))
            if inspect.isgenerator(made):
                generator, made = made, next(made)
                scope.stack.callback(next, generator, None)
            scope.values[name] = made
        return scope.values[name]

    def make_automatic(self, *scopes, of_class):
        for name, (fixture, is_method) in self._known.items():
            if fixture.autouse and fixture.scope in scopes and is_method == of_class:
                self.value(name)

    def begin_class(self):
        kind = self.test.kind
        self._scopes["class"].begin(
            lambda scope: (
                scope.enter(kind, ["setup_class"], ["teardown_class"], kind),
                self.make_automatic("class", of_class=True),
            )
        )

    def call(self):
        test = self.test
        with self.own.stack:
            if test.kind is None:
                self.own.enter(self._tests, ["setup_function"], ["teardown_function"], test.function)
            self.make_automatic("function", "class", of_class=False)
            if test.kind is None:
                return _finished(test.function(**self._keywords()))
            self.instance = test.kind()
            self.own.enter(self.instance, ["setup_method"], ["teardown_method"], test.function.__get__(self.instance))
            self.make_automatic("function", of_class=True)
            return _finished(test.function(self.instance, **self._keywords()))

    def _keywords(self):
        made = {name: self.value(name) for name in self.test.fixtures()}
        return {name: made[name] for name in self.test.arguments()}


class _Fixtures:
    """A file's fixtures, and what is set up for more than one test."""

    def __init__(self, bench):
        self.tests = bench.tests
        self.module = _Scope()
        self.classes = {}

    def known_to(self, kind):
        """The fixtures that a test can name, and whether each is a method."""
        own = {} if kind is None else _members(kind)
        found = [(value, False) for value in vars(self.tests).values()] + [(value, True) for value in own.values()]
        return {value.name: (value, is_method) for value, is_method in found if isinstance(value, _Fixture)}

    def check(self, test):
        """Refuses a test for which there is no fixture."""
        known, seen = self.known_to(test.kind), set()
        pending = test.fixtures()
        while pending:
            name = pending.pop()
            if name in test.parameters or name in seen:
                continue
            seen.add(name)
            if name in known:
                fixture, is_method = known[name]
                pending += _arguments(fixture.function)[is_method:]
            elif name != "tmp_path":
                raise judge.BrokenTask(f"there is no fixture `{name}`")

    def begin_module(self):
        run = _Run(self, _Test("", None, lambda: None, []))
        self.module.begin(
            lambda scope: (
                scope.enter(
                    self.tests, ["setUpModule", "setup_module"], ["tearDownModule", "teardown_module"], self.tests
                ),
                run.make_automatic("module", "package", "session", of_class=False),
            )
        )

    def run(self, test):
        self.begin_module()
        run = _Run(self, test)
        if test.kind is not None:
            run.begin_class()
        return run.call()

    def error(self):
        """What went wrong while something was set up for more than one test."""
        scopes = [self.module, *self.classes.values()]
        return next((scope.error for scope in scopes if scope.error is not None), None)


def run_pytest(bench, source, results, options):
    """Runs the file's test functions, the methods of its `Test…` classes and its `unittest.TestCase`s."""
    tree, imports = bench.parse(source)
    bench.prepare(imports)
    sys.modules["pytest"] = _pytest_module()
    if not bench.execute(tree, results):
        return
    fixtures = _Fixtures(bench)
    tests = []
    with _collecting(bench, results):
        tests = _collect(bench, fixtures, set(_decorated(tree)))
    if results.entries:
        return
    for index, test in enumerate(tests):
        with results.test(test.name):
            fixtures.run(test)
        _blame(bench, fixtures)
        if test.kind in fixtures.classes and all(test.kind is not later.kind for later in tests[index + 1:]):
            with results.beside(f"{test.kind.__name__}, teardown"):
                fixtures.classes.pop(test.kind).stack.close()
    suite = _suite(bench.namespace)
    if suite.countTestCases():
        try:
            fixtures.begin_module()
        except BaseException as error:
            _blame(bench, fixtures)
            results.fill(map(_method_name, _cases_of(suite)), judge.describe(error))
        else:
            _run_cases(bench, suite, results, _SuiteWithoutModule)
    with results.beside("teardown"):
        fixtures.module.stack.close()
    _fail_lost(bench, tree, results, _is_pytest)


def _blame(bench, fixtures):
    """Blames the task for what could not be set up before the submission was asked for anything."""
    error = fixtures.error()
    if error is not None and not bench.has_asked:
        raise judge.BrokenTask(judge.describe(error))
