#!/usr/bin/env python3
"""Compares Wardian's sandbox with others on this machine.

    scripts/compare/sandbox.py                     a table
    scripts/compare/sandbox.py --json              everything measured, as one JSON object
    scripts/compare/sandbox.py --markdown          the table for README.md
    scripts/compare/sandbox.py --write-readme      the same, put between its markers there
    scripts/compare/sandbox.py --from FILE ...     what an earlier run printed with --json
    scripts/compare/sandbox.py --only native,ours --quick

Every peer is a process that is kept alive and answers the requests described in worker.py, so that
all are measured in turn, round by round, and share whatever else the machine does. Each runs in
the configuration its own documentation gives for speed: executor reused, compiled code cached.
Peers from package registries are installed at pinned versions into folders of their own; those of
the system (`bwrap`, `runsc`, `node`) are used if they are on PATH. A peer that cannot be had is
listed as missing, and a program that a peer cannot run is listed as failed and has no time.

Ratios are ours divided by the peer's: the median over rounds of the ratio within a round. CPU
times are of the peer's whole process tree, in a session that was open before, the best of the
rounds; the ratio over programs is a geometric mean over those that both ran.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import report
from comparison import PROGRAMS, compare
from peers import ALIASES, PEERS, Options, native_python, note, replace_table

MARKERS = (
    "<!-- sandbox table: scripts/compare/sandbox.py --write-readme -->",
    "<!-- end -->",
)


def arguments():
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--markdown", action="store_true", help="print the table for README.md")
    parser.add_argument("--write-readme", action="store_true", help="replace it in README.md")
    parser.add_argument("--from", dest="saved", type=Path, help="a report printed with --json")
    parser.add_argument("--only", help=f"of {', '.join(PEERS)}; `ours`, `native`")
    parser.add_argument("--quick", action="store_true", help="a trial: few calls and programs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-rounds", type=int, default=2)
    parser.add_argument("--cpu-timeout", type=float, default=30, help="seconds for one program")
    parser.add_argument("--venv", type=Path, default=cache / "wardian" / "compare",
                        help="where peers are installed")  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="install nothing")
    parser.add_argument("--python", help="the native interpreter")
    parser.add_argument("--bench", type=Path, help="our benchmark, built already")
    return parser.parse_args()


def main():
    given = arguments()
    if given.saved:
        result = json.loads(given.saved.read_text())
    else:
        names = list(PEERS)
        if given.only:
            names = [ALIASES.get(name, name) for name in given.only.split(",")]
            unknown = set(names) - set(PEERS)
            if unknown:
                sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
        programs = PROGRAMS
        if given.quick:
            programs = {name: PROGRAMS[name] for name in ("fib", "dicts", "regexes")}
        options = Options(
            python=native_python(given.python),
            folder=given.venv.resolve(),
            bench=given.bench,
            is_offline=given.offline,
            rounds=2 if given.quick else given.rounds,
            seconds=0.1 if given.quick else 0.6,
            programs=programs,
            cpu_rounds=1 if given.quick else given.cpu_rounds,
            cpu_timeout=given.cpu_timeout,
            max_sessions=10 if given.quick else 1000,
        )
        load = os.getloadavg()[0]
        measured, missing = compare(names, options)
        result = report.make(measured, missing, options, load)
    if given.write_readme:
        replace_table("README.md", MARKERS, report.markdown(result))
    if given.json:
        print(json.dumps(result, indent=2))
    elif given.markdown:
        print(report.markdown(result), end="")
    elif not given.write_readme:
        print(report.text(result), end="")


if __name__ == "__main__":
    main()
