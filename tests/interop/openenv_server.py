"""Trains and measures the carried model in environments of OpenEnv's own server.

    python -m venv venv && venv/bin/pip install openenv==0.10.0
    venv/bin/python tests/interop/openenv_server.py target/release/wardian

Three environments are served by its `create_app`, under uvicorn: one that is acted on in text, one with
tools (FastMCP), and one that has room for one session, as those that say nothing about it. With smolagents
installed (1.26.0) a fourth is its `coding_env`'s executor. Exits non-zero at the first thing that is not as
it should be.
"""

import contextlib
import importlib.util
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

COMMON = """
import random, sys, uuid
import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

def serve(env, action, observation):
    app = create_app(env, action, observation, env_name="interop", max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""

# Rewards long answers; says a number that its seed makes.
TEXT = COMMON + """
class Say(Action):
    message: str

class Said(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        return Said(text=f"The number is {random.Random(seed).randrange(1000)}.")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        done = self._state.step_count == 2
        return Said(text=action.message[:20], reward=min(len(action.message), 200) / 200, done=done)

    @property
    def state(self):
        return self._state

serve(Echo, Say, Said)
"""

# Runs nothing: says how long the code is, and rewards it at its submission.
TOOLS = COMMON + """
from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("interop")

        @mcp.tool
        def run_python(code: str) -> str:
            '''Runs a program.'''
            return f"{len(code)} characters"

        @mcp.tool
        def submit_solution(code: str) -> str:
            '''Submits a program.'''
            if not code:
                raise ValueError("there is no code")
            return "taken"

        super().__init__(mcp)
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        return Observation(done=False, reward=0.0, metadata={"status": "ready"})

    def step(self, action, timeout_s=None, **_):
        observation = super().step(action, timeout_s=timeout_s)
        return self._rewarded(action, observation)

    async def step_async(self, action, timeout_s=None, **_):
        observation = await super().step_async(action, timeout_s=timeout_s)
        return self._rewarded(action, observation)

    def _rewarded(self, action, observation):
        if getattr(action, "tool_name", "") == "submit_solution":
            observation.reward = min(len(str(action.arguments.get("code", ""))), 100) / 100
            observation.done = True
        return observation

    def _step_impl(self, action, timeout_s=None, **_):
        return Observation(done=False, reward=None, metadata={"error": "unknown action"})

    @property
    def state(self):
        return self._state

serve(Tools, CallToolAction, CallToolObservation)
"""

# What OpenEnv's `coding_env` does with a step, as `scripts/compare/openenv.py` writes it down.
CODING = COMMON + """
import json, traceback
from smolagents import LocalPythonExecutor

class CodeAction(Action):
    code: str

class CodeObservation(Observation):
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0

class Code(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._fresh()

    def _fresh(self):
        self._executor = LocalPythonExecutor(additional_authorized_imports=[])
        self._executor.send_tools({})
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self._fresh()
        return CodeObservation(reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        reward = 0.1 if len(action.code.strip()) <= 100 else 0.0
        try:
            result = self._executor(action.code)
            return CodeObservation(stdout=result.logs + json.dumps(result.output, default=repr), reward=reward)
        except Exception:
            return CodeObservation(stderr=traceback.format_exc(), exit_code=1, reward=reward - 0.2)

    @property
    def state(self):
        return self._state

serve(Code, CodeAction, CodeObservation)
"""


@contextlib.contextmanager
def openenv(program, sessions):
    """Yields the address of OpenEnv's server of `program`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", program, str(port), str(sessions)])
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1).read()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("OpenEnv's server did not start")
                time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def train(binary, run, env, *sets):
    sets = [
        "trainer.steps=2", "rollout.groups_per_step=2", "rollout.group_size=4", "eval.limit=2",
        "eval.samples=2", "rollout.max_turns=3", "task.path=", *(f"env.{key}={value}" for key, value in env.items()),
        *sets,
    ]
    arguments = [part for each in sets for part in ("--set", each)]
    return subprocess.run(
        [binary, "train", "--out", str(run), *arguments], stderr=subprocess.PIPE, text=True, timeout=600
    )


def rows(run, step):
    lines = (run / f"rollouts/step-{step}.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [row for row in found if "trace" in row]


def check(run, ended):
    """Checks a run of two steps, and returns the episodes of its first."""
    assert ended.returncode == 0, ended.stderr
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert metrics["episodes/unscorable"] == 0, metrics
    first = rows(run, 1)
    assert len(first) == 8, first
    return first


def check_text(binary, folder):
    with openenv(TEXT, 8) as address:
        env = {"url": address, "episodes": 10, "reward": "sum"}
        runs = [folder / "text", folder / "again"]
        for run in runs:
            # What the model writes, as calls as a rule, is text here.
            episodes = check(run, train(binary, run, env, "rollout.tool_call_format=llama3"))
        opened = {}
        for row in episodes:
            assert row["messages"][0]["content"].startswith("The number is "), row["messages"]
            opened.setdefault(row["task_id"], set()).add(row["messages"][0]["content"])
            # A turn that is cut off is no action.
            assert 0 <= row["reward"] <= 2, row
            assert len(row["turns"]) <= 2, row
        assert any(row["reward"] > 0 for row in episodes), episodes
        assert len(opened) == 2 and all(len(said) == 1 for said in opened.values()), opened
        weights = [(run / "final/model.safetensors").read_bytes() for run in runs]
        assert weights[0] == weights[1], "the same run led elsewhere"
        arguments = ["eval", "--config", str(runs[0] / "run.toml"), "--model", str(runs[0] / "final")]
        subprocess.run([binary, *arguments], check=True, timeout=600, stdout=subprocess.DEVNULL)
    print("text: the run is done, and the same again")


def check_tools(binary, folder):
    prompts = folder / "prompts.jsonl"
    task = "Write a function f(x) that takes x, adds {}."
    prompts.write_text("".join(json.dumps({"prompt": task.format(n)}) + "\n" for n in range(10)))
    with openenv(TOOLS, 8) as address:
        run = folder / "tools"
        ended = train(binary, run, {"url": address}, f"task.path={prompts}")
        episodes = check(run, ended)
    calls = sum(turn["tool_calls"] for row in episodes for turn in row["turns"])
    assert calls > 0, episodes
    assert any(row["reward"] > 0 for row in episodes), [row["reward"] for row in episodes]
    print(f"tools: {calls} calls in {len(episodes)} episodes")


def check_capacity(binary, folder):
    with openenv(TEXT, 1) as address:
        env = {"url": address, "episodes": 10, "retry_timeout": "1s"}
        run = folder / "full"
        ended = train(binary, run, env, "rollout.groups_per_step=1")
        # One session has room and the others have not: their episodes are left out, and nothing is learned.
        failed = [row["status"] for row in rows(run, 1) if row["reward"] is None]
    assert len(failed) == 3, failed
    assert all("no room for another session" in json.dumps(status) for status in failed), failed
    assert "could not be scored" in ended.stderr, ended.stderr
    print("capacity: those without a session are left out, and it is said")


def check_coding(binary, folder):
    prompts = folder / "code.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Print {n}."}) + "\n" for n in range(10)))
    with openenv(CODING, 8) as address:
        run = folder / "coding"
        # What the model writes, as calls as a rule, is code here.
        as_text = "rollout.tool_call_format=llama3"
        episodes = check(run, train(binary, run, {"url": address}, f"task.path={prompts}", as_text))
        episodes += rows(run, 2)
    answers = [m["content"] for row in episodes for m in row["messages"][2:] if m["role"] == "user"]
    assert answers and all("Error" in answer for answer in answers), answers
    rewards = sorted({row["reward"] for row in episodes})
    assert rewards[0] < 0, rewards
    print(f"coding: {len(answers)} steps in {len(episodes)} episodes, rewards {rewards}")


def main(binary):
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        check_text(binary, folder)
        check_tools(binary, folder)
        check_capacity(binary, folder)
        if importlib.util.find_spec("smolagents"):
            check_coding(binary, folder)
        else:
            print("smolagents is not installed: its executor is skipped")


if __name__ == "__main__":
    main(sys.argv[1])
