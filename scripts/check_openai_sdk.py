"""Asks `wardian serve` through OpenAI's Python SDK, as users do.

    python -m venv venv && venv/bin/pip install openai
    venv/bin/python scripts/check_openai_sdk.py target/release/wardian

The carried model is served: it calls tools, and knows nothing but its tasks. Exits non-zero at the
first thing that is not as it should be.
"""

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
from typing import Literal

import openai
import pydantic

TASK = (
    "Write a function f(x) that takes x, adds 7, then takes the remainder modulo 9 and returns "
    "the result. Your code must pass: assert f(9) == 7"
)
CODE = {
    "type": "object",
    "properties": {"code": {"type": "string"}},
    "required": ["code"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": CODE}}
    for name in ("run_python", "submit_solution")
]
MESSAGES = [{"role": "user", "content": TASK}]


def start(binary):
    """Starts the server on a free port; returns it and its address."""
    server = subprocess.Popen(
        [binary, "serve", "--listen", "127.0.0.1:0", "--api-key-env", "WARDIAN_TEST_KEY",
         "--max-requests", "32"],
        env={**os.environ, "WARDIAN_TEST_KEY": "secret", "NO_COLOR": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in server.stderr:
        found = re.search(r"at (http://\S+)", line)
        if found:
            return server, found[1]
    raise SystemExit(f"the server ended with status {server.wait()}")


def check_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == ["starter"], models
    assert client.models.retrieve("starter").max_model_len == 256
    try:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
    else:
        raise AssertionError("an unknown model was served")
    try:
        client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was accepted")


def check_tools(client):
    """Tool calls, whole and streamed, are the same; their results can be sent back."""
    request = dict(model="starter", messages=MESSAGES, tools=TOOLS, seed=1, temperature=0.1)
    whole = client.chat.completions.create(**request)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    call = choice.message.tool_calls[0]
    assert call.function.name in ("run_python", "submit_solution"), call
    assert "def f(x)" in json.loads(call.function.arguments)["code"], call

    name, arguments, finish, usage = "", "", None, None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**request, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or []:
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
    assert (name, arguments) == (call.function.name, call.function.arguments), (name, arguments)
    assert finish == "tool_calls", finish
    assert usage.completion_tokens == whole.usage.completion_tokens, usage

    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments

    result = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
    messages = [*MESSAGES, whole.choices[0].message, result]
    again = client.chat.completions.create(
        model="starter", messages=messages, tools=TOOLS, max_completion_tokens=4
    )
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens >= 32, again.usage


def check_logprobs(client):
    answer = client.chat.completions.create(
        model="starter", messages=MESSAGES, seed=3, n=2, logprobs=True, top_logprobs=3,
        max_completion_tokens=12, extra_body={"return_token_ids": True},
    )
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert len(entries) == len(choice.token_ids) <= 12
        for entry in entries:
            assert entry.logprob <= 1e-4 and len(entry.top_logprobs) == 3, entry
            assert bytes(entry.bytes).decode() == entry.token
    completion = client.completions.create(
        model="starter", prompt="def f(x):", max_tokens=8, logprobs=2, seed=1
    )
    assert len(completion.choices[0].logprobs.tokens) == completion.usage.completion_tokens
    streamed = client.completions.create(
        model="starter", prompt="def f(x):", max_tokens=8, seed=1, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in streamed)
    assert text == completion.choices[0].text, (text, completion)


def check_parameters(client):
    def ask(**fields):
        return client.chat.completions.create(
            model="starter", messages=MESSAGES, seed=5, max_completion_tokens=20, **fields
        ).choices[0]

    whole = ask(temperature=0).message.content
    cut = ask(temperature=0, stop=[whole[4:7]])
    assert cut.message.content == whole[:whole.index(whole[4:7])], (whole, cut)
    assert cut.finish_reason == "stop"
    ask(presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"40": -100}, top_p=0.9)
    for fields in (
        {"temperature": -1.0},
        {"n": 0},
        {"tool_choice": "required"},
        {"max_tokens": 1000, "extra_body": {"max_completion_tokens": None}},
    ):
        try:
            ask(**fields)
        except openai.BadRequestError as error:
            assert error.type == "invalid_request_error", error
        else:
            raise AssertionError(f"{fields} were accepted")


class Move(pydantic.BaseModel):
    direction: Literal["north", "south"]
    steps: int = pydantic.Field(ge=1, le=9)


def check_guided(client):
    """The carried model has never seen JSON of this kind, and writes it nevertheless."""
    chat = client.chat.completions
    for seed in range(3):
        parsed = chat.parse(
            model="starter", messages=MESSAGES, response_format=Move, seed=seed, temperature=1.0
        ).choices[0]
        assert parsed.finish_reason == "stop" and 1 <= parsed.message.parsed.steps <= 9, parsed
    answer = chat.create(
        model="starter", messages=MESSAGES, seed=1, temperature=1.5, tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "submit_solution"}},
    ).choices[0]
    if answer.finish_reason != "length":
        assert [call.function.name for call in answer.message.tool_calls] == ["submit_solution"]
        assert list(json.loads(answer.message.tool_calls[0].function.arguments)) == ["code"], answer
    tool = openai.pydantic_function_tool(Move)
    call = chat.parse(
        model="starter", messages=MESSAGES, tools=[tool], tool_choice="required", seed=2,
        extra_body={"parallel_tool_calls": False},
    ).choices[0].message.tool_calls[0]
    assert call.function.parsed_arguments.direction in ("north", "south"), call


def check_load(client):
    """The same seed gets the same text whatever else is under way."""

    def ask(seed):
        return client.chat.completions.create(
            model="starter", messages=MESSAGES, seed=seed, temperature=1.0
        ).choices[0].message.content

    alone = [ask(seed) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, [seed % 4 for seed in range(16)]))
    assert together == alone * 4, "answers depend on the load"


def main():
    server, url = start(sys.argv[1])
    try:
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=30)
        checks = (
            check_models, check_tools, check_logprobs, check_parameters, check_guided, check_load,
        )
        for check in checks:
            check(client)
            print("ok", check.__name__)
    finally:
        server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=30) == 0, "the server did not stop cleanly"
    print("ok, and stopped")


if __name__ == "__main__":
    main()
