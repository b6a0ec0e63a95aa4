"""Writes verl's data sets, train.parquet and test.parquet, of the tasks that `wardian serve --env tasks` serves.

    python examples/verl/tasks.py --server http://127.0.0.1:8000 --held-out 64 --out data

The last `--held-out` tasks of the file are those to measure on.
"""

import argparse
import json
import pathlib
import urllib.request

import pandas

INSTRUCTION = "\n\nTry a draft with `run_python`, then call `submit_solution` with the whole program."


def rows_of(server, agent="wardian", instruction=INSTRUCTION):
    """Returns a row for each task of the server's file; `instruction` stands behind each."""

    def asked(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(server + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    (name,) = asked("/list_environments")
    return [
        {
            "data_source": name,
            "prompt": [{"role": "user", "content": task["instruction"] + instruction}],
            "agent_name": agent,
            "task_id": str(task["id"]),
            # The environment grades; verl wants the column.
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, task in enumerate(asked(f"/{name}/tasks", {"split": "train"})["tasks"])
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--agent", default="wardian", help="a name of agent_loop.yaml")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("data"))
    args = parser.parse_args()
    rows = rows_of(args.server, args.agent)
    if not 0 < args.held_out < len(rows):
        parser.error(f"--held-out must leave some of the {len(rows)} tasks on either side")
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in [("train", rows[: -args.held_out]), ("test", rows[-args.held_out :])]:
        pandas.DataFrame(part).to_parquet(args.out / f"{name}.parquet")
        print(f"{args.out}/{name}.parquet: {len(part)} tasks")


if __name__ == "__main__":
    main()
