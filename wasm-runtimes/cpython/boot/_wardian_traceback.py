"""Tracebacks for less: the line and the carets of a typical frame without parsing its line twice.

`traceback` parses the line, and the part of it that failed, to find out where the carets go. For most lines a look is
enough. Where it is not, CPython's own method answers, so what is printed never differs.
"""

import keyword
import re
import traceback

_format_frame_summary = traceback.StackSummary.format_frame_summary

# What takes more than a look: strings over lines, and f-strings, which nest.
_NESTED = re.compile(r"""'''|\"\"\"|[fF][rR]?["']""")
# What an operand starts with: a name, a plain number, a plain string, or something in brackets.
_ATOM = re.compile(r"""[A-Za-z_]\w*(?!["'\w])|\d+(?:\.\d+)?(?![\w.])|'[^'\\]*'|"[^"\\]*"|[\[({]""")
# What follows an operand directly.
_TRAILER = re.compile(r"\.[A-Za-z_]\w*|[\[(]")
# What matters inside of brackets.
_INSIDE = re.compile(r"""'[^'\\]*'|"[^"\\]*"|[\]\[(){}'"\\#]""")
_ARITHMETIC = re.compile(r" *(\*\*|//|<<|>>|[-+*/%@&|^])(?![-+*/%@&|^=<>~]) *-?")
# These bind less than all arithmetic.
_COMPARISON = re.compile(r" *(?:[=!<>]=|[<>])(?![=<>]) *-?| (?:not in|in|is not|is|and|or)\b *")
# No expression starts with one of these.
_STATEMENT = re.compile(r"(?:assert|del|from|import|raise|return)\b")
# What stands before the value of a statement that only returns it, or only gives it a name.
_RETURNED = re.compile(r"return\b|[A-Za-z_]\w* *=(?!=)")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_RESERVED = frozenset(keyword.kwlist) - {"None", "False", "True"}

_UNKNOWN = object()


def _end_of_brackets(text, at):
    """Returns the index after the bracket that closes the one at `at`, or None."""
    open_brackets = []
    while True:
        match = _INSIDE.search(text, at)
        if match is None:
            return None
        token = match[0]
        at = match.end()
        if token in _CLOSING:
            open_brackets.append(_CLOSING[token])
        elif len(token) == 1:
            # A closing bracket that fits, or something that takes more than a look.
            if open_brackets.pop() != token:
                return None
            if not open_brackets:
                return at


def _operand(text, at):
    """Reads `name.attribute(…)[…]`, say, from `at`. Returns its end and where the last part of it starts, or None."""
    match = _ATOM.match(text, at)
    if match is None or match[0] in _RESERVED:
        return None
    last, end = at, match.end()
    if text[at] in _CLOSING and (end := _end_of_brackets(text, at)) is None:
        return None
    while (match := _TRAILER.match(text, end)) is not None:
        last = end
        end = match.end() if text[end] == "." else _end_of_brackets(text, end)
        if end is None:
            return None
    return end, last


def _anchors(segment):
    """Returns where the inner carets of an expression start and end, None if it has none, or `_UNKNOWN`."""
    if _STATEMENT.match(segment):
        return None
    operand = _operand(segment, 0)
    if operand is None or _NESTED.search(segment) is not None:
        return _UNKNOWN
    end, last = operand
    if end == len(segment) and last == 0:
        return None if segment[0] != "(" else _UNKNOWN
    if end == len(segment):
        return (last, end) if segment[last] in "([" else None
    operators = []
    while end < len(segment):
        operator = _ARITHMETIC.match(segment, end) or _COMPARISON.match(segment, end)
        if operator is None or (operand := _operand(segment, operator.end())) is None:
            return _UNKNOWN
        operators.append(operator)
        end = operand[0]
    if any(operator.re is _COMPARISON for operator in operators):
        return None
    # Of several, which one is applied last is a matter of precedence. And the carets of `a*(b)` take in the bracket.
    start, end = operators[0].span(1)
    return (start, end) if len(operators) == 1 and segment[end] != "(" else _UNKNOWN


def _is_whole_value(text, start, end, anchors):
    """Returns whether `text[start:end]` is a call, and all that the statement returns or assigns; or `_UNKNOWN`."""
    match = _RETURNED.match(text)
    if match is None:
        return _UNKNOWN if text[0] in "(#" else False
    before = match[0]
    if anchors is None or text[start + anchors[0]] != "(":
        return False
    if text[:start].rstrip(" ") != before:
        return _UNKNOWN if text[:start].rstrip(" (") == before else False
    after = text[end:].lstrip(" ")
    if after and after[0] not in "#;":
        return False
    # Of what is returned, only a call by a plain name counts.
    return before != "return" or text[start : start + anchors[0]].isidentifier()


def _format_frame(self, frame_summary, **kwargs):
    shown = _format_simple_frame(frame_summary) if not kwargs.get("colorize") else None
    return _format_frame_summary(self, frame_summary, **kwargs) if shown is None else shown


def _format_simple_frame(frame):
    """Formats a frame whose statement is on one line of plain ASCII, or returns None."""
    start, end = frame.colno, frame.end_colno
    if start is None or end is None or frame.lineno != frame.end_lineno or frame.locals:
        return None
    line = frame._original_lines
    if not line or line[-1] != "\n" or frame.filename.startswith("<stdin>-"):
        return None
    line = line[:-1]
    text = line.lstrip(" \t")
    if not text or text[-1] == " " or not text.isascii() or not text.isprintable():
        return None
    indent = len(line) - len(text)
    start -= indent
    end -= indent
    if not 0 <= start < end <= len(text):
        return None
    anchors = _anchors(text[start:end])
    if anchors is _UNKNOWN:
        return None
    hidden = _is_whole_value(text, start, end, anchors)
    if hidden is _UNKNOWN:
        return None
    shown = f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {text}\n'
    if hidden or (anchors is None and start == 0 and end == len(text)):
        return shown
    if anchors is None:
        carets = "^" * (end - start)
    else:
        left, right = anchors
        carets = "~" * left + "^" * (right - left) + "~" * (end - start - right)
    return f"{shown}    {' ' * start}{carets}\n"


def install():
    """Makes `traceback` use it."""
    traceback.StackSummary.format_frame_summary = _format_frame
