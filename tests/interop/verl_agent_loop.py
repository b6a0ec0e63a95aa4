"""Plays episodes of examples/verl, verl's agent loop, through verl's own classes.

    python -m venv venv && venv/bin/pip install verl==0.9.1 aiohttp
    venv/bin/python tests/interop/verl_agent_loop.py target/release/wardian

An optional check: verl brings torch and Ray. Real are verl's configuration, its data set, `AgentLoopWorker`,
`LLMServerClient`, and the load balancer as an actor of Ray. In the place of vLLM, which needs a GPU, is `wardian serve`
with the carried model: it tells token ids and log-probabilities by the same fields. What is checked is that episodes of
both agents come back as verl pads and masks them, that ids, mask and log-probabilities are those that the server
sampled, that rewards are the grader's, and that a fault of ours is raised and never scored.
"""

import asyncio
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/verl"
sys.path.insert(0, str(EXAMPLE))
# Actors of Ray are processes of their own.
os.environ["PYTHONPATH"] = str(EXAMPLE)
os.environ["WARDIAN_AGENT"] = str(ROOT / "examples/agents/minimal.py")

import agent_loop as ours
import pandas
import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from served import served
from tasks import rows_of
from transformers import AutoModelForCausalLM
from verl.experimental.agent_loop import AgentLoopWorker
from verl.experimental.agent_loop import agent_loop as registry
from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

MODEL = ROOT / "examples/starter/model"
TASKS = ROOT / "examples/starter/tasks/train.jsonl"
EPISODES = 16
PROMPT, RESPONSE = 96, 128
# Asks the model once; of each three tasks it solves one, leaves a wrong answer for one, and none for the last.
PROGRAM = """
import json, os, urllib.request
task = json.load(open(os.environ["WARDIAN_TASK"]))
body = {{"model": os.environ["WARDIAN_MODEL"], "messages": task["messages"]}}
headers = {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
answer = {{0: {solutions}[task["task_id"]], 1: "def f(x):\\n    return None"}}.get(int(task["task_id"]) % 3)
if answer is not None:
    open(os.environ["WARDIAN_ANSWER"], "w").write(answer)
"""


def configuration(folder):
    """Returns verl's own configuration for the carried model."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[
            f"actor_rollout_ref.model.path={MODEL}",
            "actor_rollout_ref.rollout.name=vllm",
            f"actor_rollout_ref.rollout.prompt_length={PROMPT}",
            f"actor_rollout_ref.rollout.response_length={RESPONSE}",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={EXAMPLE}/agent_loop.yaml",
            f"data.train_files={folder}/train.parquet",
            f"data.val_files={folder}/train.parquet",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={RESPONSE}",
            "data.return_raw_chat=True",
        ])


def batch_of(rows, config, worker, folder, agent):
    """Returns a batch as verl's data set and collation make it."""
    for row in rows:
        row["agent_name"] = agent
    pandas.DataFrame(rows).to_parquet(f"{folder}/train.parquet")
    data = RLHFDataset(f"{folder}/train.parquet", worker.tokenizer, config.data)
    return DataProto.from_single_dict(
        collate_fn([data[at] for at in range(len(data))]), meta_info={"global_steps": 1, "validate": False}
    )


def played(worker, batch, **settings):
    """Plays a batch with settings of the loop; returns what verl makes of it."""
    for entry in registry._agent_loop_registry.values():
        if "environment" in entry:
            OmegaConf.update(entry, "attempts", 1)
            for name, value in settings.items():
                OmegaConf.update(entry, name, value)
    return asyncio.run(worker.generate_sequences(batch))


def check(output, tasks, worker, model, earned=None):
    """Checks what verl got of each episode, and that it earned what `earned` says of its text and its task, without
    which it is that a submission in the text passes; returns the rewards."""
    tokenizer, earned = worker.tokenizer, earned or passes
    rewards = []
    for at, task in enumerate(tasks):
        row = output[at].batch
        prompt = row["prompts"][row["attention_mask"][:PROMPT].bool()]
        is_there = row["attention_mask"][PROMPT:].bool()
        response, mask = row["responses"][is_there], row["response_mask"][is_there]
        assert mask[0] == 1 and row["response_mask"].sum() == mask.sum() > 0, mask
        text = tokenizer.decode(prompt)
        assert task["prompt"].split(".")[0] in text, "the prompt is another task's"
        if "rollout_log_probs" in row:
            logprobs = row["rollout_log_probs"][is_there]
            assert (logprobs[mask == 0] == 0).all(), logprobs
            # Another implementation of the model, under the same ids, gives them the same log-probabilities.
            ids = torch.cat([prompt, response])
            with torch.no_grad():
                scores = model(ids[None]).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            expected = scores.gather(1, response[:, None])[:, 0]
            sampled = mask == 1
            assert torch.allclose(logprobs[sampled], expected[sampled], atol=2e-3), (logprobs, expected)
        reward = row["rm_scores"].sum().item()
        assert row["rm_scores"][int(is_there.sum()) - 1].item() == reward, "the reward is not the last token's"
        assert (reward == 1.0) == earned(tokenizer.decode(response), task), (reward, tokenizer.decode(response))
        rewards.append(reward)
    return rewards


def passes(text, task):
    """Whether what the model submits first passes the task's tests, in an interpreter of this machine."""
    for call in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        try:
            call = json.loads(call)
            code = call["arguments"]["code"]
        except (ValueError, KeyError, TypeError):
            continue
        if call["name"] == "submit_solution":
            program = "\n".join([code, *task["test_list"]])
            return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0
    return False


def check_run_file():
    """verl's own entry point reads what run.sh sets."""
    variables = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}", "MODEL": str(MODEL)}
    shown = subprocess.run(
        [EXAMPLE / "run.sh", "--cfg", "job"], env=variables, capture_output=True, text=True, timeout=300
    )
    assert shown.returncode == 0, shown.stderr
    rollout = OmegaConf.create(shown.stdout).actor_rollout_ref.rollout
    assert rollout.agent.agent_loop_config_path == str(EXAMPLE / "agent_loop.yaml"), rollout.agent
    assert rollout.engine_kwargs.vllm.tool_call_parser == "hermes" and rollout.logprobs_mode == "processed_logprobs"
    print("ok run.sh")


def main(binary):
    check_run_file()
    tasks = [json.loads(line) for line in TASKS.read_text().splitlines()[:EPISODES]]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(binary, "--env", "tasks", "--tasks", str(TASKS)) as (environment, _),
        served(binary) as (server, _),
    ):
        config = configuration(folder)
        # The carried model knows its tasks by their own words alone.
        rows = rows_of(environment, instruction="")[:EPISODES]
        balancer = ray.remote(GlobalRequestLoadBalancer).remote(
            servers={server.removeprefix("http://").removesuffix("/v1"): None}
        )
        worker = AgentLoopWorker(config, LLMServerClient(config, balancer))
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        settings = {"environment": environment, "wardian": binary, "agent": None}

        batch = batch_of(rows, config, worker, folder, "wardian")
        output = played(worker, batch, **settings)
        rewards = check(output, tasks, worker, model)
        assert 0 < sum(rewards) < EPISODES, f"nothing can be told from {rewards}"
        print(f"ok {EPISODES} episodes, rewards {rewards}, turns {output.non_tensor_batch['__num_turns__'].tolist()}")

        program = pathlib.Path(folder) / "agent.py"
        program.write_text(PROGRAM.format(solutions={str(task["task_id"]): task["code"] for task in tasks}))
        batch = batch_of(rows, config, worker, folder, "wardian_program")
        output = played(worker, batch, **{**settings, "agent": [sys.executable, str(program)]})
        check(output, tasks, worker, model, earned=lambda _, task: task["task_id"] % 3 == 0)
        assert (output.non_tensor_batch["__num_turns__"] == 2).all()
        print(f"ok {EPISODES} episodes of an agent that is a program of its own")

        batch = batch_of(rows, config, worker, folder, "wardian")
        batch.meta_info["validate"] = True
        first, second = (played(worker, batch, **settings) for _ in range(2))
        check(first, tasks, worker, model)
        assert (first.batch["responses"] == second.batch["responses"]).all(), "measuring is greedy by default"
        assert "rollout_log_probs" not in first.batch
        print("ok measuring")

        wrap = registry.DictConfigWrap
        loop = ours.WardianAgentLoop(
            trainer_config=wrap(config), server_manager=worker.llm_client, tokenizer=worker.tokenizer, processor=None,
            dataset_cls=worker.dataset_cls, data_config=wrap(config.data), several_rows=True, **settings,
        )
        outputs = asyncio.run(loop.run({"temperature": 1.0}, raw_prompt=rows[0]["prompt"], task_id=rows[0]["task_id"]))
        assert isinstance(outputs, list) and outputs[0].reward_score is not None, outputs
        print("ok several rows")

        for name, value in [("environment", "http://127.0.0.1:9"), ("wardian", "/bin/false")]:
            ours.Proxy._all.clear()
            try:
                played(worker, batch, **{**settings, name: value})
            except ours.Fault as fault:
                print(f"ok {name} that is not there: {str(fault)[:80]}")
            else:
                raise AssertionError(f"episodes without {name} were scored")
    ray.shutdown()


if __name__ == "__main__":
    main(str(pathlib.Path(sys.argv[1]).resolve()))
