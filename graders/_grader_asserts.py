"""Asserts that remember what they compared, and the comparison of strict types.

`rewrite` turns the asserts of a test into statements that mean the same and, when one fails, hand what was compared to
`Failures`. As with pytest, only asserts change, and only what is evaluated anyway is looked at.
"""

import ast
import decimal
import fractions
import reprlib

# The most characters that are kept of a value and of a text.
_VALUE_LIMIT = 200
_TEXT_LIMIT = 300

# Names in a test's namespace that no program can write.
FAILED, EQUAL, LEFT, RIGHT = "@failed", "@equal", "@left", "@right"

_OPERATORS = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}


# ---- texts


class _Shortener(reprlib.Repr):
    """A `repr` that is short and asks nothing of what stays in the submission, which are objects of `remote`."""

    def __init__(self, remote):
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 20
        self.maxstring = self.maxother = self.maxlong = 150
        self._remote = remote

    def shown(self, value):
        """Returns a value as Python writes it, shortened and safe."""
        try:
            text = self.repr(value)
        except BaseException:
            text = f"<{type(value).__name__} object>"
        return safe(text, _VALUE_LIMIT)

    def repr1(self, value, level):
        if isinstance(value, self._remote):
            return f"<{type(value).__name__} object of the submission>"
        return super().repr1(value, level)


def shown(value, remote):
    """Returns a value as Python writes it, shortened and safe; `remote` is the class of what stays in the submission."""
    return _Shortener(remote).shown(value)


def safe(text, limit=_TEXT_LIMIT):
    """Cuts a text, and escapes what is not meant to be seen: control characters, marks that turn the direction."""
    if not text.isascii() or not text.isprintable():
        text = "".join(
            letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
            for letter in text[:limit + 1]
        )
    return text if len(text) <= limit else text[:limit - 1] + "…"


# ---- comparing


_NUMBERS = (bool, int, float, complex, decimal.Decimal, fractions.Fraction)


def _same_types(a, b):
    """Whether two equal values are made of numbers of the same types."""
    if isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS):
        return type(a) is type(b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return all(map(_same_types, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        keys = {key: key for key in b}
        return all(_same_types(key, keys[key]) and _same_types(value, b[key]) for key, value in a.items())
    if isinstance(a, (set, frozenset)) and isinstance(b, (set, frozenset)):
        members = {member: member for member in b}
        return all(_same_types(member, members[member]) for member in a)
    return True


def strictly_equal(a, b):
    """`a == b`, for numbers of the same types only."""
    result = a == b
    return _same_types(a, b) if result is True else result


# ---- rewriting


class _Rewriter:
    def __init__(self, entries, is_strict):
        self.entries = frozenset(entries)
        self.is_strict = is_strict

    def rewrite_all(self, node, is_class=False):
        """Rewrites the asserts below a node. Those of a class's own body stay: its names are its members."""
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if type(statements) is list:
                setattr(node, name, self._statements(statements, is_class))
        for name in ("handlers", "cases"):
            for child in getattr(node, name, ()):
                self.rewrite_all(child, is_class)

    def _statements(self, statements, is_class):
        result = []
        for statement in statements:
            kind = type(statement)
            if kind is ast.Assert and not is_class:
                result += self._assert(statement, statement.test)
                continue
            if kind is ast.ClassDef:
                self.rewrite_all(statement, True)
            elif kind is ast.FunctionDef or kind is ast.AsyncFunctionDef:
                self.rewrite_all(statement)
            else:
                self.rewrite_all(statement, is_class)
            result.append(statement)
        return result

    def _assert(self, statement, test):
        if type(test) is ast.BoolOp and type(test.op) is ast.And:
            return [part for value in test.values for part in self._assert(statement, value)]
        operator, right = "true", None
        if type(test) is ast.Compare and len(test.ops) == 1:
            operator, left, right = _OPERATORS[type(test.ops[0])], test.left, test.comparators[0]
        elif type(test) is ast.UnaryOp and type(test.op) is ast.Not:
            operator, left = "false", test.operand
        else:
            left = test
        got_is_right = (
            right is not None and type(right) is not ast.Constant and self._asks(right) and not self._asks(left)
        )
        at = {name: getattr(statement, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
        result = [ast.Assign([ast.Name(LEFT, _STORE, **at)], left, **at)]
        operands = [ast.Constant(operator, **at), ast.Name(LEFT, _LOAD, **at), ast.Constant(None, **at)]
        if right is not None:
            result.append(ast.Assign([ast.Name(RIGHT, _STORE, **at)], right, **at))
            operands[2] = ast.Name(RIGHT, _LOAD, **at)
        operands.append(ast.Constant(got_is_right, **at))
        if statement.msg is not None:
            operands.append(statement.msg)
        fail = ast.Raise(ast.Call(ast.Name(FAILED, _LOAD, **at), operands, [], **at), None, **at)
        # What was compared is let go of, as without the rewriting.
        targets = [ast.Name(name, _STORE, **at) for name in (LEFT, RIGHT)]
        release = ast.Assign(targets, ast.Constant(None, **at), **at)
        result.append(ast.If(self._condition(test, operator, right, at), [release], [fail], **at))
        return result

    def _condition(self, test, operator, right, at):
        left = ast.Name(LEFT, _LOAD, **at)
        if right is None:
            return ast.UnaryOp(ast.Not(), left, **at) if operator == "false" else left
        right = ast.Name(RIGHT, _LOAD, **at)
        if self.is_strict and operator in ("==", "!="):
            equal = ast.Call(ast.Name(EQUAL, _LOAD, **at), [left, right], [], **at)
            return equal if operator == "==" else ast.UnaryOp(ast.Not(), equal, **at)
        return ast.Compare(left, test.ops, [right], **at)

    def _asks(self, expression):
        """Whether an expression mentions the submission."""
        return any(type(node) is ast.Name and node.id in self.entries for node in ast.walk(expression))


_LOAD, _STORE = ast.Load(), ast.Store()


def rewrite(tree, entries, is_strict=False):
    """Rewrites the asserts of a syntax tree in place."""
    _Rewriter(entries, is_strict).rewrite_all(tree)


def rewritten(source, file_name, entries, is_strict):
    """Compiles a program with its asserts rewritten. Raises SyntaxError as `compile` does."""
    if "assert" not in source:
        return compile(source, file_name, "exec", dont_inherit=True)
    tree = ast.parse(source, file_name)
    rewrite(tree, entries, is_strict)
    return compile(tree, file_name, "exec", dont_inherit=True)


def names(failures):
    """The names that rewritten programs use: a namespace must have them."""
    failed = Failures(()).failed if failures is None else failures.failed
    return {FAILED: failed, EQUAL: strictly_equal}


class Failures:
    """What the failed asserts of one test compared."""

    def __init__(self, remote):
        self._shortener = _Shortener(remote)
        self._by_address = {}

    def clear(self):
        self._by_address.clear()

    def failed(self, operator, left, right, got_is_right, *message):
        """Returns the exception of a failed assert."""
        error = AssertionError(*message)
        got, other = (right, left) if got_is_right else (left, right)
        got = self._shortener.shown(got)
        if operator in ("true", "false"):
            expected = f"a {operator} value"
        else:
            other = self._shortener.shown(other)
            expected = other if operator == "==" else f"{operator} {other}"
            if got_is_right and operator != "==":
                expected = f"a value for which {other} {operator} it"
        # The error is kept, so that its address stays its own.
        self._by_address[id(error)] = (error, expected, got)
        return error

    def explanation(self, error):
        """Returns what was expected and what came, or None twice."""
        _, expected, got = self._by_address.get(id(error), (None, None, None))
        return expected, got
