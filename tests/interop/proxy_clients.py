"""Runs agents of third parties through `wardian proxy`, and checks what was captured of them.

    python -m venv venv && venv/bin/pip install openai anthropic openenv==0.10.0 'smolagents[openai]==1.26.0'
    venv/bin/python tests/interop/proxy_clients.py target/release/wardian

The carried model is served with a longer context than it was trained for: it says little of use, which
is the harder case, since its tokens are seldom those that its text would give. Every captured call is
then sampled again by `wardian serve`, from the captured prompt ids and with the call's seed: the same ids
and log-probabilities must come. Clients that are not installed are said and skipped. Exits non-zero at
the first thing that is not as it should be.
"""

import importlib.util
import json
import pathlib
import shutil
import sys
import tempfile
import urllib.request

from served import served

MODEL = pathlib.Path(__file__).parents[2] / "examples/starter/model"
TASK = (
    "Write a function f(x) that takes x, adds 7, then takes the remainder modulo 9 and returns "
    "the result. Your code must pass: assert f(9) == 7"
)
CODE = {
    "type": "object",
    "properties": {"code": {"type": "string"}},
    "required": ["code"],
}


def ask(url, body=None, method=None):
    """Sends JSON; returns JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def longer(folder):
    """Copies the carried model with a longer context."""
    model = pathlib.Path(folder) / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    (model / "config.json").write_text(json.dumps(config))
    return str(model)


def openai_sdk(address, session):
    """Chat completions with tools, whole and streamed, then Responses."""
    import openai

    tools = [{"type": "function", "function": {"name": "run_python", "parameters": CODE}}]
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=session, max_retries=0, timeout=120)
    messages = [{"role": "user", "content": TASK}]
    told = []
    for seed in (1, 2):
        answer = client.chat.completions.create(
            model="gpt-9", messages=messages, tools=tools, seed=seed, max_tokens=80,
            extra_body={"return_token_ids": True},
        )
        told.append((answer.prompt_token_ids, answer.choices[0].token_ids))
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
        messages.append({"role": "user", "content": "Go on."})
    with client.chat.completions.stream(
        model="gpt-9", messages=messages, tools=tools, seed=3, max_tokens=80
    ) as stream:
        messages.append(stream.get_final_completion().choices[0].message)
    tools = [{"type": "function", "name": "run_python", "parameters": CODE, "strict": False}]
    answer = client.responses.create(
        model="gpt-9", input=TASK, tools=tools, max_output_tokens=40, extra_body={"seed": 4}
    )
    follow_up = [{"role": "user", "content": TASK}, *answer.output, {"role": "user", "content": "?"}]
    with client.responses.stream(
        model="gpt-9", input=follow_up, tools=tools, max_output_tokens=40, extra_body={"seed": 5}
    ) as stream:
        for event in stream:
            last = event
        assert last.type in ("response.completed", "response.incomplete"), last
    captured = ask(f"{address}/sessions/{session}")["turns"]
    for turn, (prompt, completion) in zip(captured, told):
        assert turn["prompt_token_ids"] == prompt, "the client was told other ids"
        assert turn["completion_token_ids"] == completion, "the client was told other ids"
    return 5, 2


def anthropic_sdk(address, session):
    """Messages with a tool, whole and streamed."""
    import anthropic

    client = anthropic.Anthropic(
        base_url=f"{address}/{session}", api_key="any", max_retries=0, timeout=120
    )
    tools = [{"name": "run_python", "description": "Runs Python.", "input_schema": CODE}]
    messages = [{"role": "user", "content": TASK}]
    request = dict(model="claude-9", max_tokens=80, system="Be brief.", tools=tools)
    counted = client.messages.count_tokens(
        **{key: request[key] for key in ("model", "system", "tools")}, messages=messages
    )
    for seed in (1, 2, 3):
        if seed < 3:
            answer = client.messages.create(**request, messages=messages, extra_body={"seed": seed})
        else:
            with client.messages.stream(
                **request, messages=messages, extra_body={"seed": seed}
            ) as stream:
                answer = stream.get_final_message()
        if seed == 1:
            assert answer.usage.input_tokens == counted.input_tokens, (answer.usage, counted)
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results or "Go on."})
    return 3, 1


def smolagents_code_agent(address, session):
    """A CodeAgent, which executes what the model writes and sends back what came of it."""
    from smolagents import CodeAgent, OpenAIServerModel, tool
    from smolagents.monitoring import LogLevel

    @tool
    def submit(code: str) -> str:
        """Submits a solution.

        Args:
            code: The solution.
        """
        return "taken"

    model = OpenAIServerModel(
        model_id="gpt-9", api_base=f"{address}/{session}/v1", api_key="any", seed=7, max_tokens=60
    )
    agent = CodeAgent(
        tools=[submit], model=model, max_steps=3, verbosity_level=LogLevel.OFF
    )
    # Its own has thousands of tokens, nearly all of the time that this would take.
    agent.prompt_templates["system_prompt"] = "Write Python between <code> and </code>."
    agent.run(TASK)
    return None, None


AGENTS = [
    ("openai", openai_sdk),
    ("anthropic", anthropic_sdk),
    ("smolagents", smolagents_code_agent),
]


def check_rows(address, session, calls, roots):
    """The rows are the calls' ids, end to end; returns the calls."""
    document = ask(f"{address}/sessions/{session}/rollout?include_discarded=true")
    turns = ask(f"{address}/sessions/{session}")["turns"]
    stats = document["stats"]
    assert calls in (None, stats["n_turns"]), stats
    assert roots in (None, stats["n_roots"]), (stats, document["validation"])
    assert stats["n_turns"] > 0 and document["trainable"], document["validation"]
    by_id = {turn["call_id"]: turn for turn in turns}
    for row in document["sequences"]:
        ids, mask, logprobs = [], [], []
        for node in row["node_ids"]:
            turn = by_id[node]
            prompt = turn["prompt_token_ids"]
            assert prompt[: len(ids)] == ids, "a call does not go on from the ids before it"
            context = len(prompt) - len(ids)
            ids = prompt + turn["completion_token_ids"]
            mask += [0] * context + turn["completion_loss_mask"]
            logprobs += [0.0] * context + turn["completion_logprobs"]
        assert row["input_ids"] == ids
        assert row["loss_mask"] == mask
        assert row["logprobs"] == logprobs
    entries = ask(f"{address}/sessions/{session}/trace_entries")["entries"]
    assert len(entries) == stats["n_turns"], "a call is missing"
    check_trace(entries)
    reward = f"{address}/sessions/{session}/trajectories?reward=1&task_id={session}"
    with urllib.request.urlopen(reward, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    assert len(lines) == stats["n_trainable_sequences"], (len(lines), stats)
    return document["turns"], turns


def check_trace(entries):
    """OpenEnv's own reader, which TRL uses, takes the entries."""
    if importlib.util.find_spec("openenv") is None:
        print("   openenv is not installed: its reader of traces is skipped")
        return
    from openenv.core.harness.training import TrainingTrace

    trace = TrainingTrace.from_entries(entries)
    assert len(trace.turns) == len(entries)


def check_sampled_again(serve, turns, captured):
    """The engine samples the same ids from the captured prompt, with the same probabilities."""
    for turn, call in zip(turns, captured):
        sampling = turn["sampling_params"]
        answer = ask(f"{serve}/completions", {
            "model": "m", "prompt": call["prompt_token_ids"], "seed": sampling["seed"],
            "temperature": sampling["temperature"], "max_tokens": sampling["max_tokens"],
            "stop": sampling["stop"], "logprobs": 0, "return_token_ids": True,
        })["choices"][0]
        assert answer["token_ids"] == call["completion_token_ids"], "other ids were captured"
        again = answer["logprobs"]["token_logprobs"]
        assert len(again) == len(call["completion_logprobs"])
        for left, right in zip(again, call["completion_logprobs"]):
            assert abs(min(left, 0.0) - right) < 1e-4, (left, right)


def main():
    with tempfile.TemporaryDirectory() as folder:
        model = longer(folder)
        shown = []
        arguments = ["--model", model, "--served-model-name", "m"]
        with served(sys.argv[1], *arguments, command="proxy") as (url, _):
            address = url.removesuffix("/v1")
            for name, run in AGENTS:
                if importlib.util.find_spec(name) is None:
                    print(f"-- {name} is not installed: skipped")
                    continue
                session = ask(f"{address}/sessions", {"session_id": f"of-{name}"})["session_id"]
                calls, roots = run(address, session)
                turns, captured = check_rows(address, session, calls, roots)
                shown.append((name, turns, captured))
                print("ok", name, len(turns), "calls")
        assert shown, "no client is installed"
        with served(sys.argv[1], *arguments) as (serve, _):
            for name, turns, captured in shown:
                check_sampled_again(serve, turns, captured)
                print("ok", name, "sampled again:", sum(turn["n_sampled"] for turn in turns), "tokens")


if __name__ == "__main__":
    main()
