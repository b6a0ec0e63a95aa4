"""What stands on the lines of the tests: from where in them an exception came.

It is looked up only when something was raised, by the source of the line that ran. What the exception itself says of its
origin may be the submission's own words.
"""

import ast

# Functions that import what they are told by a literal.
_IMPORTERS = frozenset(["__import__", "import_module", "importorskip"])

# The sources of the tests' programs by file name, and what was found in them.
_sources = {}
_facts = {}


def remember(name, source):
    """Keeps the source of a program that is to run as the file `name`."""
    _sources[name] = source
    _facts.pop(name, None)


def forget():
    """Forgets all sources."""
    _sources.clear()
    _facts.clear()


class _Facts(ast.NodeVisitor):
    """The lines of a program that assert, and what each line imports."""

    def __init__(self):
        self.asserting = set()
        self.imported = {}

    def _imports(self, node, names):
        for line in _lines(node):
            self.imported.setdefault(line, set()).update(names)

    def visit_Assert(self, node):
        self.asserting.update(_lines(node))
        self.generic_visit(node)

    def visit_Import(self, node):
        self._imports(node, [alias.name for alias in node.names])

    def visit_ImportFrom(self, node):
        if node.level == 0:
            self._imports(node, [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])

    def visit_Call(self, node):
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        # As the methods of a `TestCase` are called.
        if name.startswith("assert"):
            self.asserting.update(_lines(node))
        elif name in _IMPORTERS and node.args and isinstance(node.args[0], ast.Constant):
            self._imports(node, [str(node.args[0].value)])
        self.generic_visit(node)


def _lines(node):
    return range(node.lineno, node.end_lineno + 1)


def _facts_of(name):
    facts = _facts.get(name)
    if facts is None:
        facts = _facts[name] = _Facts()
        facts.visit(ast.parse(_sources[name]))
    return facts


def _steps(traceback):
    """The steps of a traceback that are in the tests, as (file, line), outermost first."""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name in _sources:
            yield name, traceback.tb_lineno
        traceback = traceback.tb_next


def is_asserting(traceback):
    """Whether an exception came up while a test evaluated an assertion."""
    return any(line in _facts_of(name).asserting for name, line in _steps(traceback))


def is_own_import(error, foreign):
    """Whether a test failed to import a module that it names itself, where it names it.

    `foreign` are the globals of what speaks for the submission: what was raised there is none of the tests' doing.
    """
    missing = getattr(error, "name", None)
    if not isinstance(error, ModuleNotFoundError) or type(missing) is not str:
        return False
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals is foreign:
            return False
        step = step.tb_next
    steps = list(_steps(error.__traceback__))
    if not steps:
        return False
    name, line = steps[-1]
    imported = _facts_of(name).imported.get(line, ())
    return any(module == missing or module.startswith(f"{missing}.") for module in imported)
