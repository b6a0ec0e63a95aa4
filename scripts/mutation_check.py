#!/usr/bin/env python3
"""Compares verdicts on mutated reference solutions with what native CPython says.

Takes reference solutions of MBPP, makes small semantic changes to each (a number off by one, an operator swapped, a
branch dropped, a condition negated), runs every mutant with the task's own tests in a native subprocess, and lets
`wardian grade` judge the same mutants. A mutant passes natively when its process exits with code 0. Prints every
disagreement, and exits with 1 if there is one.

The same arguments make the same mutants. A mutant that runs into the time limit natively has to meet a limit here, too:
it must not pass.

    cargo build --release
    scripts/mutation_check.py --tasks sanitized-mbpp.json --wardian target/release/wardian
"""

import argparse
import ast
import collections
import concurrent.futures
import copy
import json
import pathlib
import random
import resource
import subprocess
import sys
import tempfile

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Pow: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
MEMORY = 2 << 30


def changes(node):
    """Returns (kind, function that changes such a node in place) for each change that can be made to `node`."""
    found = []
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            for step in (1, -1):
                found.append(("off by one", lambda n, step=step: setattr(n, "value", n.value + step)))
        case ast.Constant(value=bool()):
            found.append(("negated constant", lambda n: setattr(n, "value", not n.value)))
        case ast.Compare(ops=[operator, *_]) if type(operator) in COMPARISONS:
            found.append(("swapped comparison", lambda n: n.ops.__setitem__(0, COMPARISONS[type(n.ops[0])]())))
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in OPERATORS:
            found.append(("swapped operator", lambda n: setattr(n, "op", OPERATORS[type(n.op)]())))
        case ast.BoolOp(op=operator):
            other = ast.And if isinstance(operator, ast.Or) else ast.Or
            found.append(("swapped and/or", lambda n: setattr(n, "op", other())))
        case ast.If():
            found.append(("dropped branch", lambda n: setattr(n, "body", [ast.Pass()])))
            found.append(("negated condition", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))))
            if node.orelse:
                found.append(("dropped else", lambda n: setattr(n, "orelse", [])))
        case ast.IfExp() | ast.While():
            found.append(("negated condition", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))))
        case ast.Return(value=ast.expr()):
            found.append(("dropped result", lambda n: setattr(n, "value", None)))
        case ast.For():
            found.append(("dropped first turn", lambda n: setattr(n, "iter", ast.parse(
                f"list({ast.unparse(n.iter)})[1:]", mode="eval").body)))
        case ast.Subscript(slice=ast.expr() as index) if not isinstance(index, (ast.Slice, ast.Tuple)):
            found.append(("index off by one", lambda n: setattr(
                n, "slice", ast.BinOp(n.slice, ast.Sub(), ast.Constant(1)))))
        case ast.Call(args=[_, _, *_]):
            found.append(("swapped arguments", lambda n: n.args.__setitem__(slice(0, 2), n.args[1::-1])))
    return found


def mutate(tree, steps):
    """Returns the program after `steps`: (number of the node, number of the change) in turn."""
    tree = copy.deepcopy(tree)
    kinds = []
    for place, choice in steps:
        node = list(ast.walk(tree))[place]
        kind, change = changes(node)[choice]
        kinds.append(kind)
        change(node)
    return " and ".join(kinds), ast.unparse(ast.fix_missing_locations(tree))


def mutants(code, count, chance):
    """Returns at least `count` different mutants of a program as (kind, program), where that many can be made."""
    tree = ast.parse(code)
    sites = [(place, choice) for place, node in enumerate(ast.walk(tree)) for choice in range(len(changes(node)))]
    chance.shuffle(sites)
    known = {ast.unparse(tree)}
    made = []
    # One change each; where the program is too small for that, two.
    pairs = [(first, second) for first in sites for second in sites if first[0] > second[0]]
    for steps in [*[(site,) for site in sites], *pairs]:
        if len(made) >= count:
            break
        kind, program = mutate(tree, steps)
        if program not in known:
            known.add(program)
            made.append((kind, program))
    return made


def read_tasks(path):
    text = path.read_text()
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [row for row in rows if "code" in row and "test_list" in row]


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def run_natively(python, row, program, seconds):
    """Returns "passed", "failed" or "timeout"."""
    parts = [*row.get("test_imports", []), program, row.get("test_setup_code", ""), *row["test_list"]]
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = subprocess.run(
                [python, "-I", "-B", "-c", "\n".join(parts)],
                cwd=folder, timeout=seconds, preexec_fn=limit_memory,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return "timeout"
    return "passed" if outcome.returncode == 0 else "failed"


def grade(wardian, tasks, mutated):
    """Returns the verdicts of `wardian grade`, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "mutants.jsonl"
        rows = [json.dumps({"task_id": row["task_id"], "code": program}) for row, _, program in mutated]
        path.write_text("\n".join(rows) + "\n")
        outcome = subprocess.run(
            [wardian, "grade", "--tasks", tasks, "--submissions", path, "--format", "json", "--quiet"],
            stdout=subprocess.PIPE, text=True,
        )
    verdicts = [json.loads(line) for line in outcome.stdout.splitlines()]
    if len(verdicts) != len(mutated):
        sys.exit(f"wardian gave {len(verdicts)} verdicts for {len(mutated)} mutants, exit code {outcome.returncode}")
    return verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=pathlib.Path, required=True, help="MBPP, sanitized or full")
    parser.add_argument("--wardian", default="target/release/wardian", help="the binary")
    parser.add_argument("--count", type=int, default=100, help="reference solutions")
    parser.add_argument("--mutants", type=int, default=5, help="mutants of each, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=15, help="seconds of a native run")
    parser.add_argument("--jobs", type=int, default=2, help="native runs at once")
    arguments = parser.parse_args()

    chance = random.Random(arguments.seed)
    rows = read_tasks(arguments.tasks)
    chance.shuffle(rows)
    mutated = []
    taken = 0
    for row in rows:
        made = mutants(row["code"], arguments.mutants, chance)
        if len(made) < arguments.mutants:
            continue
        mutated += [(row, kind, program) for kind, program in made]
        taken += 1
        if taken == arguments.count:
            break
    print(f"{len(mutated)} mutants of {taken} reference solutions, native Python {sys.version.split()[0]}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        native = list(pool.map(lambda m: run_natively(sys.executable, m[0], m[2], arguments.timeout), mutated))
    verdicts = grade(arguments.wardian, arguments.tasks, mutated)

    counts = collections.Counter()
    disagreements = 0
    for (row, kind, program), expected, verdict in zip(mutated, native, verdicts):
        agrees = (expected == "passed") == (verdict["status"] == "passed") and verdict["status"] != "infra_error"
        counts[expected, verdict["status"]] += 1
        if not agrees:
            disagreements += 1
            tests = [f"{test['name']}: {test['status']} {test['message']}" for test in verdict["tests"]]
            print(f"\ntask {row['task_id']}, {kind}: native {expected}, ours {verdict['status']}")
            print(program, *row["test_list"], *tests, sep="\n")
    for (expected, status), count in sorted(counts.items()):
        print(f"native {expected:8} ours {status:12} {count}")
    print(f"{len(mutated) - disagreements} of {len(mutated)} agree")
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
