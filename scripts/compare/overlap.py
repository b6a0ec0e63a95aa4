"""Measures what sampling while a step trains saves: `overlap.py WARDIAN`.

Trains the carried model twice on tasks whose tests compute for a while, with `trainer.async_level` 0 and
1, in turns. Prints the median time of a step, of those that overlap with another one, and the ratio.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path


def tasks(path: Path, loops: int) -> None:
    """Writes tasks of the carried model's, each with a slow test more."""
    starter = Path(__file__).parents[2] / "examples/starter/tasks/train.jsonl"
    slow = f"assert sum(1 for _ in range({loops})) == {loops}"
    with path.open("w") as file:
        for line in starter.read_text().splitlines()[:80]:
            row = json.loads(line)
            row["test_list"].append(slow)
            file.write(json.dumps(row) + "\n")


def run(wardian: str, folder: Path, arguments: argparse.Namespace, level: int) -> list[dict]:
    """Returns the rows of a run's steps but the first, which never overlaps, and the last."""
    settings = [
        f"trainer.async_level={level}",
        f"trainer.steps={arguments.steps}",
        f"rollout.groups_per_step={arguments.groups}",
        "trainer.save_every=0",
        "eval.limit=1",
        "eval.samples=1",
    ]
    command = [wardian, "train", "--tasks", str(folder / "tasks.jsonl"), "--seed", "3", "-q"]
    out = folder / f"level-{level}"
    command += ["--out", str(out)]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True)
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "step_time" in row][1:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wardian", help="the binary")
    parser.add_argument("--loops", type=int, default=1_000_000, help="rounds of each slow test")
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 episodes in a step")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each level, in turns")
    arguments = parser.parse_args()
    times: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(arguments.repeats):
        for level, found in times.items():
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                tasks(folder / "tasks.jsonl", arguments.loops)
                rows = run(arguments.wardian, folder, arguments, level)
            found += [row["step_time"] for row in rows]
            if level == 0:
                parts = {
                    key: round(statistics.median(row[key] for row in rows), 3)
                    for key in ("generate_time", "update_time")
                }
    apart, together = (statistics.median(times[level]) for level in (0, 1))
    print(json.dumps({
        "step_seconds_0": round(apart, 3),
        **parts,
        "step_seconds_1": round(together, 3),
        "ratio": round(together / apart, 3),
    }))


if __name__ == "__main__":
    main()
