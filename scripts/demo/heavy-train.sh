#!/bin/sh
# Trains the carried model on tasks that need a shell, each rollout in gVisor on this machine, 8 at a time:
#
#  1. tasks in Harbor's format, by the model itself, which solves none of them;
#  2. Harbor's tasks and three instances of SWE-bench, by an agent that knows the answers.
#
# Prints what each step's actors cost and how it was rewarded, and fails where something of them is left. Needs root,
# `runsc`, `bwrap`, `git`, and Python 3.11 with pip; builds the repositories in FOLDER first.
#
#     scripts/demo/heavy-train.sh [FOLDER]
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-/tmp/wardian-heavy-tier}
wardian=${WARDIAN:-target/release/wardian}
[ -x "$wardian" ] || cargo build --release
python3 scripts/demo/swebench_instances.py build "$folder" >&2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR="$work/tmp"
mkdir "$TMPDIR" "$work/harbor"
# A program is given one instruction, so the task that has steps is left out.
cp -r examples/harbor/greeting examples/harbor/primes "$work/harbor"

"$wardian" train --config examples/runs/harbor.toml --out "$work/own"
cat >"$work/scripted.toml" <<CONFIG
[model]
path = "starter"
[environments.shell]
path = "$work/harbor"
[environments.issues]
path = "$PWD/examples/swebench/instances.jsonl"
[rollout]
group_size = 4
groups_per_step = 2
max_new_tokens = 40
max_total_tokens = 240
[rollout.agent]
command = ["python3", "$PWD/scripts/demo/scripted_agent.py", "$PWD/examples/swebench/instances.jsonl", "$work/harbor"]
mounts = ["$work/harbor"]
concurrency = 8
[actor]
root = "host"
repositories = "$folder"
max_actors = 8
memory = "1GiB"
disk = "1GiB"
[trainer]
mode = "full"
steps = 2
[eval]
every = 1
CONFIG
"$wardian" train --config "$work/scripted.toml" --out "$work/scripted"
python3 - "$work" <<'PYTHON'
import json, pathlib, sys

work = pathlib.Path(sys.argv[1])
for run in ("own", "scripted"):
    for line in (work / run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        names = ("step", "reward", "episodes/unscorable", "actor/started", "actor/start_seconds",
                 "sandbox/tool_seconds", "sandbox/grade_seconds", "eval/pass_at_1")
        shown = {name: round(row[name], 3) for name in names if row.get(name) is not None}
        print(json.dumps({"run": run, **shown}))
left = [str(path) for base in (work / "tmp").glob("wardian-actors-*") for path in base.iterdir() if path.is_dir()]
for status in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        if b"wardian-actors" in (line := status.read_bytes()) and str(work / "tmp").encode() in line:
            left.append(line.replace(b"\0", b" ").decode(errors="replace"))
    except OSError:
        pass
if left:
    sys.exit(f"left behind: {left}")
print(json.dumps({"left_behind": 0}))
PYTHON
