"""The graders of whole test programs: `check`, `script`, `doctest`, `calls`, and through `test_cases.py` and
`user_grader.py` also `pytest`, `unittest` and `python`.

It runs where `unit_tests.py` runs, in the grader's instance, and reaches the submission through the stubs that are made
there. The rules of who is at fault are the same: what fails before the submission was asked for anything is the task's
fault, what fails afterwards is the submission's. What the stubs show without being asked, they have said: see
`Bench.has_asked`.
"""

import ast
import builtins
import contextlib
import doctest
import io
import json
import math
import sys
import traceback
import types

import _grader_asserts
import _grader_remote
import _grader_sources
import _wardian_guest
import numpy_stand_in
import unit_tests

TEST_FILE = "tests.py"

_NAME_LIMIT = 120
_VALUE_LIMIT = 200

# ---- what is used of the unit-test grader

MESSAGE_LIMIT = unit_tests._MESSAGE_LIMIT

# What the failed asserts of the running test compared.
_failures = _grader_asserts.Failures(_grader_remote.Remote)

# Returns an exception as a message, and the line of the submission that it came from.
explain = unit_tests._describe


def describe(error):
    """Returns an exception as a message."""
    return explain(error)[0]


def entry(name):
    """Returns the submission's value of a name, or what stands for it. Raises NameError if there is none."""
    classes = _grader_remote.state.entry_classes
    value = _grader_remote.entries([name])[name]
    _grader_remote.state.entry_classes += classes
    return value


def bridge_errors():
    """What went wrong on the bridge in the running test: it has failed, even if it caught that."""
    return _grader_remote.state.bridge_errors


def begin_test():
    """Forgets what went wrong in the test before."""
    bridge_errors().clear()
    _failures.clear()


@contextlib.contextmanager
def _watching(bench):
    """Tells the bench what the submission is asked for, and what it raises."""
    original = _grader_remote.request

    def watched(*message):
        bench.requests += 1
        try:
            return original(*message)
        except BaseException as error:
            bench.raised.append(error)
            raise
        finally:
            if bench.shows_output and not bridge_errors():
                _show_output(original)

    def called_back(*message):
        # What the submission printed before it called comes before what the function prints.
        if bench.shows_output and not bridge_errors():
            _show_output(original)
        return call(*message)

    call = _grader_remote.answers["call"]
    _grader_remote.request = watched
    _grader_remote.answers["call"] = called_back
    try:
        yield
    finally:
        _grader_remote.request = original
        _grader_remote.answers["call"] = call


def _show_output(request):
    """Prints here what the submission printed, as a text."""
    request("flush")
    output = _wardian_guest.bridge_printed(1)
    if type(output) is bytes:
        sys.stdout.write(output.decode("utf-8", "replace"))


# ---- results


class BrokenTask(Exception):
    """The task cannot be graded, whatever is submitted."""


class InvalidSubmission(Exception):
    """The submission lacks what the tests need."""


class MissingModule(Exception):
    """The tests import a module that this runtime does not have."""


class Results:
    """One result per test: [name, status, message, expected, got, line of the submission]."""

    def __init__(self, bench):
        self.entries = []
        self.missing_module = None
        self._bench = bench

    def add(self, name, error, expected=None, got=None):
        """Adds the result of a test that raised `error`, or nothing."""
        name = _safe_name(name)
        # Its description may ask the submission for a text, so a bridge error can come up only now.
        message, submission_line = ("", None) if error is None else explain(error)
        if bridge_errors():
            # The host says how the instance ended, by this very text.
            self._add_failed(name, bridge_errors()[0])
            return
        if error is None:
            self.entries.append([name, "passed", "", None, None, None])
            return
        if isinstance(error, ModuleNotFoundError) and self._bench.is_own(error):
            self.missing_module = error.name
        if expected is None:
            expected, got = _failures.explanation(error)
        line = line_of(error)
        if line is not None:
            message = f"{message} (line {line} of the tests)"
        self._add_failed(name, message, expected, got, submission_line)

    def _add_failed(self, name, message, *explanation):
        explanation = explanation or (None, None, None)
        self.entries.append([name, "failed", _grader_asserts.safe(message, MESSAGE_LIMIT), *explanation])

    @contextlib.contextmanager
    def test(self, name):
        """Runs its body as a test: what it raises is the test's result and goes no further."""
        begin_test()
        error = None
        try:
            yield
        except BaseException as raised:
            error = raised
        self.add(name, error)

    @contextlib.contextmanager
    def beside(self, name):
        """Runs its body beside the tests: only a failure is a result."""
        begin_test()
        error = None
        try:
            yield
        except BaseException as raised:
            error = raised
        if error is not None or bridge_errors():
            self.add(name, error)

    def fill(self, names, message):
        """Fails every test of `names` that has no result."""
        known = {result[0] for result in self.entries}
        for name in map(_safe_name, names):
            if name not in known:
                self._add_failed(name, message)


def _safe_name(name):
    """The name of a test as a verdict has it: a parameter may come from the submission."""
    return _grader_asserts.safe(str(name), _NAME_LIMIT)


def line_of(error):
    """The line of the test file where `error` was raised, or None."""
    line = None
    step = None if error is None else error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == TEST_FILE:
            line = step.tb_lineno
        step = step.tb_next
    return line


def show(value):
    """Returns a value as a verdict shows it."""
    return _grader_asserts.shown(value, _grader_remote.Remote)


class Bench:
    """A grading in progress: the tests' namespace and the submission's names in it."""

    def __init__(self, setup, entries, module, name="tests"):
        self.setup = setup
        self.entries = entries
        self.module = module
        self.tests = types.ModuleType(name)
        sys.modules[name] = self.tests
        self.namespace = self.tests.__dict__
        self.namespace |= {"__builtins__": builtins, **_grader_asserts.names(_failures)}
        self.requests = 0
        self.raised = []
        self.missing_names = []
        # Whether a stub tells more by itself than that it is a function.
        self.shows_kinds = False
        # Whether what the submission prints is printed here.
        self.shows_output = False

    @property
    def has_asked(self):
        """Whether the submission had any say in what has happened so far.

        It has as soon as it is asked for anything. And from the beginning if an entry is no plain function: that a name
        is a number, or a class of this or that kind, a test can find out without asking. Functions are all alike.
        """
        return self.requests > 0 or self.shows_kinds or bool(bridge_errors())

    def is_own(self, error):
        """Whether an exception says that a module is missing which the tests import, where they import it."""
        is_raised = any(error is raised for raised in self.raised)
        return not is_raised and _grader_sources.is_own_import(error, _grader_remote.__dict__)

    def prepare(self, imports=()):
        """Runs what needs no submission, then binds the submission's names."""
        _grader_sources.remember("setup.py", self.setup)
        try:
            exec(compile(self.setup, "setup.py", "exec", dont_inherit=True), self.namespace)
            for statement in imports:
                exec(compile(ast.Module([statement], []), TEST_FILE, "exec", dont_inherit=True), self.namespace)
        except ModuleNotFoundError as error:
            raise MissingModule(error.name) from None
        except BaseException as error:
            raise BrokenTask(describe(error)) from None
        # One for the whole program: its tests share what they import, as natively.
        unit_tests._open(b"")
        _grader_remote.forget()
        try:
            stubs = _grader_remote.entries(self.entries)
        except BaseException as error:
            raise InvalidSubmission(describe(error)) from None
        self.namespace.update(stubs)
        self._install_module(stubs)
        self.requests = 0
        self.shows_kinds = any(type(stub) is not _grader_remote.RemoteFunction for stub in stubs.values())

    def _install_module(self, stubs):
        """Lets tests say `from solution import f`."""
        module = types.ModuleType(self.module)
        module.__dict__.update(stubs, __all__=list(stubs))

        def missing(name):
            if name.startswith("__"):
                raise AttributeError(name)
            try:
                value = entry(name)
            except NameError as error:
                self.missing_names.append(describe(error))
                raise AttributeError(name) from None
            setattr(module, name, value)
            return value

        module.__getattr__ = missing
        sys.modules[self.module] = module

    def parse(self, source):
        """Returns the program's syntax tree and those of its imports that need no submission."""
        numpy_stand_in.provide(self.setup, source)
        _grader_sources.remember(TEST_FILE, source)
        try:
            tree = ast.parse(source, TEST_FILE)
        except BaseException as error:
            raise BrokenTask(describe(error)) from None
        return tree, [statement for statement in tree.body if self._is_own_import(statement)]

    def _is_own_import(self, statement):
        match statement:
            case ast.Import(names=names):
                return all(alias.name.partition(".")[0] not in (self.module, "pytest") for alias in names)
            case ast.ImportFrom(module=module, level=0):
                return module.partition(".")[0] not in (self.module, "pytest", "__future__")
        return False

    def compiled(self, tree):
        """Compiles a program, with asserts that remember what they compared."""
        _grader_asserts.rewrite(tree, [*self.entries, "candidate"])
        return compile(tree, TEST_FILE, "exec", dont_inherit=True)

    def execute(self, tree, results):
        """Runs a test file's top level. Returns whether there is anything to go on with."""
        begin_test()
        try:
            exec(self.compiled(tree), self.namespace)
        except BaseException as error:
            if self.missing_names:
                raise InvalidSubmission(self.missing_names[0]) from None
            if not self.has_asked:
                if isinstance(error, ModuleNotFoundError):
                    raise MissingModule(error.name) from None
                raise BrokenTask(describe(error)) from None
            results.add("top level", error)
            return False
        if bridge_errors():
            results.add("top level", None)
            return False
        return True


# ---- check(candidate), as HumanEval has it


_TEST_STATEMENTS = (ast.Assert, ast.For, ast.While, ast.With, ast.If, ast.Try, ast.Match)


def _is_test(statement):
    return isinstance(statement, _TEST_STATEMENTS) or (
        isinstance(statement, ast.Expr) and any(isinstance(node, ast.Call) for node in ast.walk(statement))
    )


def _check(bench, source, results, options):
    """Makes a test of every statement of `check` that asserts, loops or calls; the others only lead up to them."""
    tree, imports = bench.parse(source)
    function = next(
        (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None
    )
    if function is None:
        raise BrokenTask("the tests define no function `check`")
    names = []
    body = []
    for statement in function.body:
        if _is_test(statement):
            names.append(f"test_{len(names) + 1}")
            call = ast.parse(f"__wardian_test__({names[-1]!r})", mode="eval").body
            wrapped = ast.With(items=[ast.withitem(context_expr=call)], body=[statement])
            body.append(ast.fix_missing_locations(ast.copy_location(wrapped, statement)))
        else:
            body.append(statement)
    if not names:
        raise BrokenTask("`check` tests nothing")
    function.body = body
    bench.prepare(imports)
    bench.namespace["__wardian_test__"] = results.test
    if not bench.execute(tree, results):
        return
    error = None
    try:
        bench.namespace["check"](bench.namespace[bench.entries[0]])
    except BaseException as raised:
        error = raised
        message = describe(error)
        # How the submission's instance ended, the host says by that very text.
        results.fill(names, bridge_errors()[0] if bridge_errors() else f"not reached: {message}")
    if (error is not None or bridge_errors()) and all(status == "passed" for _, status, *_ in results.entries):
        # It went wrong behind the last of the tests, which are not all that asks.
        results.add("check", error)


# ---- a program that raises if the submission is wrong, as MBPP+ has it


def _script(bench, source, results, options):
    tree, imports = bench.parse(source)
    try:
        code = bench.compiled(tree)
    except BaseException as error:
        raise BrokenTask(describe(error)) from None
    bench.prepare(imports)
    with results.test("script"):
        try:
            exec(code, bench.namespace)
        except SystemExit as error:
            # As natively, a program may end itself, as `unittest.main` does. The submission may not.
            if error.code or any(error is raised for raised in bench.raised):
                raise
    if bench.missing_names:
        raise InvalidSubmission(bench.missing_names[0])
    if results.missing_module is None and not bench.has_asked:
        raise BrokenTask(results.entries[-1][2] or "the tests never ask the submission for anything")


# ---- doctest


def _matches(checker, example, error, output, flags):
    """Whether what happened is what the example says."""
    if error is None:
        return example.exc_msg is None and checker.check_output(example.want, output, flags)
    if example.exc_msg is None:
        return False
    # The submission's own exceptions may be written with their module and without.
    text = traceback.format_exception_only(error)[-1]
    return any(
        doctest._strip_exception_details(form) == doctest._strip_exception_details(example.exc_msg)
        if flags & doctest.IGNORE_EXCEPTION_DETAIL
        else checker.check_output(example.exc_msg, form, flags)
        for form in (text, text.removeprefix("solution."))
    )


def _example_code(example):
    name = f"line_{example.lineno + 1}.py"
    _grader_sources.remember(name, example.source)
    return compile(f"{example.source}\n", name, "single", dont_inherit=True)


def _doctest(bench, source, results, options):
    try:
        examples = doctest.DocTestParser().get_examples(source, TEST_FILE)
        codes = [_example_code(example) for example in examples]
    except BaseException as error:
        raise BrokenTask(describe(error)) from None
    if not examples:
        raise BrokenTask("there is no `>>>` example")
    bench.prepare()
    bench.shows_output = True
    checker = doctest.OutputChecker()
    for example, code in zip(examples, codes):
        flags = 0
        for flag, is_on in example.options.items():
            flags = flags | flag if is_on else flags & ~flag
        name = f"line_{example.lineno + 1}"
        if flags & doctest.SKIP:
            continue
        begin_test()
        output = io.StringIO()
        error = failure = None
        try:
            with contextlib.redirect_stdout(output):
                exec(code, bench.namespace)
        except BaseException as raised:
            error = raised
        shown = output.getvalue()
        if not _matches(checker, example, error, shown, flags):
            failure = error or AssertionError("the output differs")
            if error is None:
                texts = [_grader_asserts.safe(text.rstrip("\n"), _VALUE_LIMIT) for text in (example.want, shown)]
                results.add(name, failure, *texts)
                continue
        results.add(name, failure)


# ---- calls with expected results


def same(got, expected, tolerance):
    """Whether a result is the one that JSON can only approximate: a tuple is a list, keys are texts."""
    if isinstance(expected, list):
        return (
            isinstance(got, (list, tuple))
            and len(got) == len(expected)
            and all(same(one, other, tolerance) for one, other in zip(got, expected))
        )
    if isinstance(expected, dict):
        if not isinstance(got, dict) or len(got) != len(expected):
            return False
        by_text = {key if isinstance(key, str) else json.dumps(key): value for key, value in got.items()}
        return by_text.keys() == expected.keys() and all(
            same(by_text[key], value, tolerance) for key, value in expected.items()
        )
    if isinstance(expected, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        return got == expected or math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
    # `True == 1`, but they are not the same result.
    return isinstance(got, bool) == isinstance(expected, bool) and got == expected


def _calls(bench, source, results, options):
    try:
        cases = [(json.loads(arguments), json.loads(expected)) for arguments, expected in options["cases"]]
        code = compile(options["call"], "call.py", "eval", dont_inherit=True)
    except (ValueError, SyntaxError) as error:
        raise BrokenTask(describe(error)) from None
    if not all(isinstance(arguments, list) for arguments, _ in cases):
        raise BrokenTask("the input of a call is not a JSON list of arguments")
    bench.prepare()
    for number, (arguments, expected) in enumerate(cases, 1):
        begin_test()
        error = wanted = shown = None
        try:
            got = eval(code, bench.namespace)(*arguments)
            is_right = same(got, expected, options["float_tolerance"]) or (
                options["unwrap"]
                and isinstance(expected, list)
                and len(expected) == 1
                and same(got, expected[0], options["float_tolerance"])
            )
            if not is_right:
                wanted, shown = show(expected), show(got)
                error = AssertionError(f"expected {wanted}, got {shown}")
        except BaseException as raised:
            error = raised
        results.add(f"test_{number}", error, wanted, shown)


# ---- grading


def _judge(kind, setup, source, entries, options):
    bench = Bench(
        setup, entries, options.get("module") or "solution", name="__main__" if kind == "script" else "tests"
    )
    _grader_remote.state.read_only = options.get("read_only_arguments", False)
    with _watching(bench):
        if kind == "python":
            return user_grader.grade(bench, source, options)
        results = Results(bench)
        _KINDS[kind](bench, source, results, options)
        if results.missing_module is not None:
            raise MissingModule(results.missing_module)
        if not results.entries:
            if bench.requests:
                # It may have said itself how many tests there are.
                results.add("tests", AssertionError("there is nothing to test"))
            else:
                raise BrokenTask("there is nothing to test")
        return results.entries


def judge(kind, setup, source, entries, options):
    """Returns one entry per test, or why there is none: "broken", "missing" (the task), "invalid" (the submission)."""
    try:
        return _judge(kind, setup, source, entries, options)
    except BrokenTask as error:
        return ("broken", str(error))
    except MissingModule as error:
        return ("missing", str(error))
    except InvalidSubmission as error:
        return ("invalid", str(error))


def serve(message):
    """Answers the host's `judge` message."""
    match message:
        case ("judge", str() as kind, str() as setup, str() as source, list() as entries, str() as options):
            unit_tests.begin()
            return unit_tests._encode(judge(kind, setup, source, entries, json.loads(options)))
    raise ValueError("malformed message")


# These import this module.
import test_cases
import user_grader

_KINDS = {
    "calls": _calls,
    "check": _check,
    "doctest": _doctest,
    "pytest": test_cases.run_pytest,
    "script": _script,
    "unittest": test_cases.run_unittest,
}


def warm_up(answer):
    """Judges small submissions that `answer`, a candidate in this same instance, has loaded.

    Run before the snapshot, for its specialized bytecode.
    """
    main = sys.modules["__main__"]
    _grader_remote._bridge_call = answer
    unit_tests._bridge_open = lambda note: True
    check = "import math\ndef check(candidate):\n    assert candidate(2) == 2\n    assert candidate([1]) == [2]\n"
    calls = {"call": "f", "cases": [["[[1]]", "[1, 1]"], ["[2]", "3"]], "float_tolerance": 1e-6, "unwrap": False}
    for kind, source, options in [("check", check, {}), ("script", "assert f(1) == 1", {}), ("calls", "", calls)]:
        serve(("judge", kind, "", source, ["f"], json.dumps(options)))
    unit_tests.cool_down()
    sys.modules["__main__"] = main
    for name in ("solution", "tests"):
        sys.modules.pop(name, None)
