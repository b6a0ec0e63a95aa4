"""An agent that is a program of its own, for `rollout.agent`: it asks the model once, and leaves the code
that it gets as its answer. Only Python's standard library is needed.

    wardian train --config examples/runs/agent.toml

What it is given is in docs/proxy.md: the task and the place of the answer as files, the model behind an
address and a key that any client of OpenAI's or Anthropic's API takes from the environment.
"""

import json
import os
import re
import urllib.request

SUBMIT = {
    "type": "function",
    "function": {
        "name": "submit_solution",
        "description": "Submits the final code for grading and ends the task.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The complete solution."}},
            "required": ["code"],
        },
    },
}


def ask(messages):
    """Returns the model's message."""
    body = {"model": os.environ["WARDIAN_MODEL"], "messages": messages, "tools": [SUBMIT]}
    headers = {
        "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "content-type": "application/json",
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def code_of(message):
    """Returns the code of the first call that can be read, or of a code block."""
    for call in message.get("tool_calls") or []:
        try:
            return json.loads(call["function"]["arguments"])["code"]
        except (ValueError, KeyError):
            continue
    blocks = re.findall(r"```(?:python)?\n(.*?)```", message.get("content") or "", re.DOTALL)
    return blocks[-1] if blocks else None


def main():
    with open(os.environ["WARDIAN_TASK"]) as file:
        task = json.load(file)
    code = code_of(ask([{"role": "user", "content": task["instruction"]}]))
    # Without an answer nothing is graded, which earns what no submission earns.
    if code is not None:
        with open(os.environ["WARDIAN_ANSWER"], "w") as file:
            file.write(code)


if __name__ == "__main__":
    main()
