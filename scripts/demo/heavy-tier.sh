#!/bin/sh
# Grades the reference, nothing and a cheat on three instances of SWE-bench, each in gVisor on this machine: a JSON
# line each. Needs root, `runsc`, `git`, `patch` and Python 3.11 with pip; builds the repositories in FOLDER first.
#
#     scripts/demo/heavy-tier.sh [FOLDER]
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-/tmp/wardian-heavy-tier}
wardian=${WARDIAN:-target/release/wardian}
[ -x "$wardian" ] || cargo build --release
python3 scripts/demo/swebench_instances.py build "$folder" >&2
exec "$wardian" task grade --instances examples/swebench/instances.jsonl --repositories "$folder" \
    --patch gold --patch empty --patch examples/swebench/cheat.diff
