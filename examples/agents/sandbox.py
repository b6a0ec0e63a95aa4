"""An agent that is a program of its own, for tasks that need a shell: it asks the model what to do, does it in the
episode's sandbox, and shows the model what came of it. Only Python's standard library is needed.

    wardian train --config RUN.toml --set 'rollout.agent.command=["python3", "examples/agents/sandbox.py"]'

`WARDIAN_TOOLS` is the address of the sandbox's tools, which take their arguments as JSON; the key is the model's.
What the sandbox is like when the agent ends is judged.
"""

import json
import os
import urllib.request

TURNS = 20

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in a shell and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}


def post(url, body):
    """Returns what a server answers, as JSON."""
    headers = {
        "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "content-type": "application/json",
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def ask(messages):
    """Returns the model's message."""
    body = {"model": os.environ["WARDIAN_MODEL"], "messages": messages, "tools": [BASH]}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]


def use(call):
    """Does what a call of the model asks for, in the sandbox, and returns what came of it."""
    try:
        command = json.loads(call["function"]["arguments"])["command"]
    except (ValueError, KeyError, TypeError):
        return "error: `bash` needs the argument `command`"
    return post(os.environ["WARDIAN_TOOLS"] + "/bash", {"command": command})["output"]


def main():
    with open(os.environ["WARDIAN_TASK"]) as file:
        task = json.load(file)
    messages = [{"role": "user", "content": task["instruction"]}]
    for _ in range(TURNS):
        message = ask(messages)
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            break
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": use(call)})


if __name__ == "__main__":
    main()
