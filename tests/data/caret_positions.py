"""Formats a frame for every expression and statement of the source on standard input, by the sandbox's shortcut and by
CPython's own method, and prints how many there were, how many took the shortcut, and which ones differ."""

import ast
import linecache
import sys
import traceback

# Where a look at the line could be mistaken.
TRAPS = r"""
x = f(a)
x = f(a)  # why
x = f(a); g(b)
x = y = f(a)
x = (f(a))
(x) = f(a)
x = o.f(a)
x += f(a)
x: int = f(a)
x = f(a)(b)
x = f(a) + 1
x == f(a)
returned = f(a)
def g(): return f(a)
def g():
    return f(a)
def g():
    return o.f(a)
def g():
    return f(a) + 1
def g():
    return (f(a))
def g():
    return a[f(a)]
a*(b)
a**(b)
a//(b)
a * (b)
(a + b) / c
(a) + (b)
a + b * c
a ** -b
-a ** b
a - -b
a < b + c
a + b < c
a if b + c else d
a and b + c
not a + b
a in b + c
a is not b
f(')')[0]
f("(")(a)
f('''a')''')[0]
f(f'{a["("]}')[0]
f(f'{a['(']}' + b)
f(x for x in y)
f(*a, **b)
f(lambda: 0)[1]
f (a)
a . b (c)
a [0]
(a,)[0]
[1, 2][3]
{}['a']
'a'.b
'a' 'b'[0]
b'a'[0]
r'\''[0]
1.5.real
1e-5 + a
0x1F + a
1 .real
None + a
None[0]
match(a)
print(await_(a))
f(a,
  b)
a[0:1, ...]
a @ b
a | b
a ^ b
a << b
a >> b
a % (b, c)
'%d' % (b,)
f(a)	+ b
f('é')[0]
assert f(a) == 1, 'no'
raise f(a) from b
del a[0]
import a.b
from a import b
for x in f(a): pass
if f(a): pass
with f(a) as b: pass
lambda: f(a)
[f(a) for a in b]
a.b.c = f(d)
a[0] = f(d)
x = a[0]
x = a / b
x = a.b
"""


def frames(source, name):
    linecache.cache[name] = (len(source), None, [line + "\n" for line in source.split("\n")], name)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.expr, ast.stmt)):
            yield traceback.FrameSummary(
                name,
                node.lineno,
                "f",
                lookup_line=False,
                end_lineno=node.end_lineno,
                colno=node.col_offset,
                end_colno=node.end_col_offset,
            )


shortcut = traceback.StackSummary.format_frame_summary
original = shortcut.__globals__["_format_frame_summary"]
is_simple = shortcut.__globals__["_format_simple_frame"]
stack = traceback.StackSummary()
total = simple = 0
for number, source in enumerate([TRAPS, *sys.stdin.read().split("\0")]):
    for frame in frames(source, f"source {number}"):
        total += 1
        simple += is_simple(frame) is not None
        ours, theirs = shortcut(stack, frame), original(stack, frame)
        if ours != theirs:
            print(f"differs:\n{theirs}{ours}")
print(f"{simple} of {total}")
