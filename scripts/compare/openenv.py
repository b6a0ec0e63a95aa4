"""Compares `wardian serve --env coding_env` with OpenEnv's own coding environment.

    python -m venv venv && venv/bin/pip install openenv==0.10.0 smolagents==1.26.0
    cargo build --release
    venv/bin/python scripts/compare/openenv.py [--json] [--binary target/release/wardian]

The servers run in turn, on the same machine, and are asked by the same client. OpenEnv's package
holds the server and the protocol; the environment itself is its repository's, so what it does is
written down here: smolagents' executor behind OpenEnv's `create_app`, as many sessions as asked for.

A row is ours, theirs and how many times better ours is: milliseconds, steps a second, or MiB.
`--only ours` measures one of them. `--load N` opens N sessions at ours and holds them.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

from websockets.asyncio.client import connect

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRINT = ("print('hello')", "hello")
LOOP = ("s = 0\nfor i in range(10000):\n    s += i\nprint(s)", "49995000")
SESSIONS = 8
MEMORY_SESSIONS = 64
# Whether more is better.
ROWS = {
    "print_p50": False,
    "print_p99": False,
    "print_8_sessions_throughput": True,
    "print_64_sessions_throughput": True,
    "loop_p50": False,
    "loop_8_sessions_throughput": True,
    "cycle_p50": False,
    "noisy_print_p99": False,
    "memory_per_session": False,
}

THEIRS = '''
import sys, traceback, uuid, json
import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from smolagents import LocalPythonExecutor

class CodeAction(Action):
    code: str

class CodeObservation(Observation):
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0

class CodeState(State):
    last_exit_code: int = 0

class CodeEnv(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._fresh()

    def _fresh(self):
        self._executor = LocalPythonExecutor(additional_authorized_imports=[])
        self._executor.send_tools({})
        self._state = CodeState(episode_id=None, step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self._fresh()
        self._state.episode_id = episode_id or str(uuid.uuid4())
        return CodeObservation(reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        stdout, stderr, exit_code = "", "", 0
        try:
            result = self._executor(action.code)
            parts = [result.logs] if result.logs else []
            if result.output is not None:
                try:
                    parts.append(json.dumps(result.output))
                except TypeError:
                    parts.append(repr(result.output))
            stdout = "\\n".join(parts)
        except Exception:
            stderr, exit_code = traceback.format_exc(), 1
        self._state.last_exit_code = exit_code
        return CodeObservation(stdout=stdout, stderr=stderr, exit_code=exit_code, reward=0.1)

    @property
    def state(self):
        return self._state

app = create_app(CodeEnv, CodeAction, CodeObservation, env_name="coding_env", max_concurrent_envs=4096)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(command, port):
    """Starts a server and yields its process once it is healthy."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": "1"})
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).read()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} did not start")
                time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(30)


class Session:
    """A client's side of `/ws`."""

    def __init__(self, port):
        self.url = f"ws://127.0.0.1:{port}/ws"

    async def __aenter__(self):
        self.socket = await connect(self.url, proxy=None, max_size=None, compression=None)
        return self

    async def __aexit__(self, *_):
        await self.socket.send('{"type": "close"}')
        await self.socket.close()

    async def call(self, message):
        await self.socket.send(json.dumps(message))
        return json.loads(await self.socket.recv())

    async def reset(self):
        return await self.call({"type": "reset", "data": {}})

    async def step(self, code, expected):
        answer = await self.call({"type": "step", "data": {"code": code}})
        observation = answer["data"].get("observation", {})
        assert observation.get("stdout", "").strip() == expected, answer


async def timed(work):
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1e3


def p99(times):
    return statistics.quantiles(times, n=100)[98]


async def one_session(port, program, steps):
    """Returns the milliseconds of each step."""
    async with Session(port) as session:
        await session.reset()
        for _ in range(20):
            await session.step(*program)
        return [await timed(session.step(*program)) for _ in range(steps)]


async def throughput(port, program, sessions, seconds):
    """Returns the steps a second of sessions that each take one after the other."""
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(Session(port)) for _ in range(sessions)]
        for session in opened:
            await session.reset()
            await session.step(*program)
        started = time.perf_counter()

        async def work(session):
            count = 0
            while time.perf_counter() - started < seconds:
                await session.step(*program)
                count += 1
            return count

        counts = await asyncio.gather(*map(work, opened))
        return sum(counts) / (time.perf_counter() - started)


async def cycle(port):
    async with Session(port) as session:
        await session.reset()
        await session.step(*PRINT)


async def noisy(port, steps, seconds):
    """Returns the milliseconds of steps beside four sessions that compute."""
    done = asyncio.Event()

    async def neighbour():
        async with Session(port) as session:
            await session.reset()
            while not done.is_set():
                await session.step(*LOOP)

    neighbours = [asyncio.create_task(neighbour()) for _ in range(4)]
    await asyncio.sleep(0.5)
    times = []
    async with Session(port) as session:
        await session.reset()
        deadline = time.perf_counter() + seconds
        while len(times) < steps and time.perf_counter() < deadline:
            times.append(await timed(session.step(*PRINT)))
    done.set()
    await asyncio.gather(*neighbours)
    return times


def memory(process):
    """Returns a process's own memory in MiB."""
    rollup = pathlib.Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    pss = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(pss.split()[1]) / 1024


async def memory_per_session(port, process):
    """Returns the whole server's memory over its sessions, each of which has run a step."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MEMORY_SESSIONS):
            session = await stack.enter_async_context(Session(port))
            await session.reset()
            await session.step("x = list(range(1000))\nprint(len(x))", "1000")
        return memory(process) / MEMORY_SESSIONS


async def measure(port, process, seconds):
    rows = {}
    rows["memory_per_session"] = await memory_per_session(port, process)
    times = await one_session(port, PRINT, 500)
    rows["print_p50"], rows["print_p99"] = statistics.median(times), p99(times)
    rows["print_8_sessions_throughput"] = await throughput(port, PRINT, SESSIONS, seconds)
    rows["print_64_sessions_throughput"] = await throughput(port, PRINT, 64, seconds)
    rows["loop_p50"] = statistics.median(await one_session(port, LOOP, 40))
    rows["loop_8_sessions_throughput"] = await throughput(port, LOOP, SESSIONS, seconds)
    rows["cycle_p50"] = statistics.median([await timed(cycle(port)) for _ in range(50)])
    rows["noisy_print_p99"] = p99(await noisy(port, 300, 3 * seconds))
    return rows


async def hold(port, process, count):
    """Opens `count` sessions that each run a step and stay; says what that took."""
    empty = memory(process)
    opened = []
    started = time.perf_counter()
    for _ in range(count):
        session = await Session(port).__aenter__()
        await session.reset()
        await session.step("x = list(range(1000))\nprint(len(x))", "1000")
        opened.append(session)
    took = time.perf_counter() - started
    held = memory(process)
    for session in opened:
        await session.step("print(len(x))", "1000")
    connects = time.perf_counter()
    for _ in range(10_000):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
    connects = time.perf_counter() - connects
    times = [await timed(opened[-1].step(*PRINT)) for _ in range(300)]
    for session in opened:
        await session.__aexit__()
    return {
        "sessions": count,
        "open_reset_step_ms": took * 1e3 / count,
        "memory_mib_empty": empty,
        "memory_mib_per_session": (held - empty) / count,
        "print_p50_with_all_open": statistics.median(times),
        "ten_thousand_connects_seconds": connects,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=str(ROOT / "target/release/wardian"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=4, help="of each throughput")
    parser.add_argument("--only", choices=["ours", "theirs"])
    parser.add_argument("--load", type=int, metavar="N")
    arguments = parser.parse_args()
    port = free_port()
    commands = {
        "ours": [arguments.binary, "serve", "--quiet", "--env", "coding_env", "--listen", f"127.0.0.1:{port}"],
        "theirs": [sys.executable, "-c", THEIRS, str(port)],
    }
    if arguments.load:
        with server(commands["ours"], port) as process:
            found = asyncio.run(hold(port, process, arguments.load))
        print(json.dumps(found, indent=1))
        return
    measured = {}
    for name, command in commands.items():
        if arguments.only in (None, name):
            with server(command, port) as process:
                measured[name] = asyncio.run(measure(port, process, arguments.seconds))
    rows = {}
    for row, more_is_better in ROWS.items():
        rows[row] = {name: round(found[row], 3) for name, found in measured.items()}
        if len(measured) == 2:
            ours, theirs = measured["ours"][row], measured["theirs"][row]
            rows[row]["times"] = round(ours / theirs if more_is_better else theirs / ours, 2)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        for row, values in rows.items():
            print(f"{row:30}", "  ".join(f"{name} {value:>10}" for name, value in values.items()))


if __name__ == "__main__":
    main()
