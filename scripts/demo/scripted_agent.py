"""An agent that knows the answers, for `rollout.agent`: it asks the model once, does not listen, and does in the
episode's sandbox what the task's reference does. It shows that a run works from end to end on tasks that no small
model solves; `scripts/demo/heavy-train.sh` runs it.

    python3 scripts/demo/scripted_agent.py INSTANCES.jsonl HARBOR_FOLDER
"""

import json
import os
import pathlib
import sys
import urllib.request


def post(url, body):
    """Returns what a server answers, as JSON."""
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def bash(command):
    return post(os.environ["WARDIAN_TOOLS"] + "/bash", {"command": command})["output"]


def references(instances, harbor):
    """Returns the commands that solve each task, by its id."""
    commands = {}
    for line in instances.read_text().splitlines():
        row = json.loads(line)
        commands[row["instance_id"]] = f"git apply <<'THE PATCH'\n{row['patch']}\nTHE PATCH"
    for script in harbor.glob("*/solution/solve.sh"):
        commands[script.parent.parent.name] = script.read_text()
    return commands


def main():
    task = json.loads(pathlib.Path(os.environ["WARDIAN_TASK"]).read_text())
    messages = [{"role": "user", "content": "Go."}]
    post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        {"model": os.environ["WARDIAN_MODEL"], "max_tokens": 8, "messages": messages},
    )
    # The ids of tasks begin with the name of their environment.
    name = task["task_id"].split("/", 1)[1]
    print(bash(references(*map(pathlib.Path, sys.argv[1:3]))[name]))


if __name__ == "__main__":
    main()
