"""What `coding_env` adds to the interpreter of a session: echo, print log, allowed imports.

The names that it forbids are forbidden because the original lacks them, not for safety: the sandbox
is around the interpreter.
"""

import ast
import builtins
import json
import linecache
import sys
import traceback
import types

_ECHO = "__wardian_echo__"
_MAX_LOG = 50_000
_IMPORTS = (
    "collections", "datetime", "itertools", "math", "queue", "random", "re", "stat", "statistics", "time", "unicodedata",
)
_FORBIDDEN = (
    "breakpoint", "compile", "delattr", "dir", "eval", "exec", "exit", "globals", "help", "input", "locals", "memoryview",
    "open", "quit", "vars", "__import__",
)


class InterpreterError(ValueError):
    """As the original names what it refuses."""


def _import(name, globals=None, locals=None, fromlist=(), level=0):
    if level or name.partition(".")[0] not in _IMPORTS:
        raise InterpreterError(
            f"Import of {name} is not allowed. Authorized imports are: {sorted(_IMPORTS)}"
        )
    return builtins.__import__(name, globals, locals, fromlist, level)


def _forbidden(name):
    def refuse(*args, **kwargs):
        raise InterpreterError(
            f"Forbidden function evaluation: '{name}' is not among the explicitly allowed tools or"
            " defined/imported in the preceding code"
        )

    return refuse


_log = []


def _print(*values, **_):
    _log.append(" ".join(map(str, values)) + "\n")


def _dumps(value):
    return json.dumps(value, default=str)


_builtins = {
    **vars(builtins),
    **{name: _forbidden(name) for name in _FORBIDDEN},
    "__import__": _import,
    "print": _print,
}
_namespace = {
    "__name__": "__main__",
    "__builtins__": _builtins,
    "format_exc": traceback.format_exc,
    "safe_json_dumps": _dumps,
}
_count = 0


def _echo_last(tree):
    """Makes the last statement leave its value; returns the name whose value it is."""
    if not tree.body:
        return None
    node = tree.body[-1]
    if isinstance(node, ast.Expr):
        name = ast.Name(_ECHO, ast.Store())
        tree.body[-1] = ast.copy_location(ast.Assign([name], node.value), node)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        node.value = ast.copy_location(ast.NamedExpr(ast.Name(_ECHO, ast.Store()), node.value), node.value)
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    else:
        return None
    ast.fix_missing_locations(tree)
    return _ECHO


def _shown(value):
    try:
        return json.dumps(value)
    except Exception:
        return repr(value)


def _cut(text):
    if len(text) <= _MAX_LOG:
        return text
    half = _MAX_LOG // 2
    note = f"\n..._This content has been truncated to stay below {_MAX_LOG} characters_...\n"
    return text[:half] + note + text[-half:]


def run(code):
    """Runs one step of the session."""
    global _count
    _count += 1
    name = f"<step {_count}>"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    _log.clear()
    parts = []
    failed = False
    try:
        tree = ast.parse(code, name)
        echo = _echo_last(tree)
        exec(compile(tree, name, "exec"), _namespace)
        value = None if echo is None else _namespace.get(echo)
        _namespace.pop(_ECHO, None)
        if value is not None:
            parts.append(_shown(value))
    except BaseException as error:
        failed = True
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(error)
    if _log:
        parts.insert(0, _cut("".join(_log)))
    sys.stdout.write("\n".join(parts))
    if failed:
        raise SystemExit(1)


_module = types.ModuleType("_wardian_coding")
_module.run = run
sys.modules["_wardian_coding"] = _module
