"""An agent loop for verl whose episodes are Wardian's: the environment runs the model's programs and grades them, and
the capture proxy keeps the exact tokens of every call between the agent and verl's rollout server.

    agent (here, or a program of its own)  ->  wardian proxy  ->  verl's rollout server (vLLM)
            |                                       |
    wardian serve --env tasks                the rows that verl learns from

For each episode the loop takes a server from verl's load balancer, opens a session at the proxy in front of it, resets
a session of the environment to the row's task, and lets the agent work. What the proxy kept is then given to verl as
token ids, mask and log-probabilities; nothing is tokenised again. README.md beside this file says how to run it.

A fault of ours (the environment, the proxy or the server breaks) is never a reward: the episode is tried again, and
if it fails each time the error is raised.
"""

import asyncio
import contextlib
import json
import logging
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from uuid import uuid4

import aiohttp
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

logger = logging.getLogger(__name__)

# What an environment, a server or a program may say at most, in bytes.
MOST_BYTES = 64 << 20
# What is told of a program that failed, in bytes.
MOST_WORDS = 2000
# Sampling under which a model's own distribution is drawn from, up to the temperature.
NEUTRAL = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}


class Fault(Exception):
    """Something of ours failed, by no doing of the policy's."""


class Environment:
    """One session of an environment server, over OpenEnv's protocol."""

    def __init__(self, socket):
        self._socket = socket
        self.reward, self.is_over = 0.0, False

    @classmethod
    @contextlib.asynccontextmanager
    async def session(cls, http, url, key, timeout):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = aiohttp.ClientWSTimeout(ws_receive=timeout, ws_close=10)
        try:
            opened = http.ws_connect(f"{url}/ws", headers=headers, timeout=limits, max_msg_size=MOST_BYTES)
            async with opened as socket:
                yield cls(socket)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Fault(f"the environment at {url}: {error!r}") from error

    async def _ask(self, kind, data):
        await self._socket.send_json({"type": kind, "data": data})
        frame = await self._socket.receive()
        if frame.type != aiohttp.WSMsgType.TEXT:
            raise Fault(f"the environment closed its connection: {frame.type.name} {frame.data} {frame.extra or ''}")
        answer = json.loads(frame.data)
        if answer.get("type") == "error":
            raise Fault(f"the environment: {answer['data']}")
        return answer["data"]

    async def reset(self, task_id):
        """Begins an episode; returns what the environment says of it."""
        self.reward, self.is_over = 0.0, False
        return (await self._ask("reset", {"task_id": str(task_id)}))["observation"]

    async def tools(self):
        """Returns the tools of the episode, as OpenAI's API takes them."""
        listed = (await self._ask("step", {"type": "list_tools"}))["observation"]["tools"]
        return [
            {"type": "function", "function": {
                "name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"],
            }}
            for tool in listed
        ]

    async def call(self, name, arguments):
        """Uses a tool; returns what came of it."""
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        result = await self._ask("step", action)
        self.is_over = self.is_over or result["done"]
        if result["reward"] is not None:
            self.reward = float(result["reward"])
        elif result["done"]:
            raise Fault("the environment ended the episode without a reward")
        observation = result["observation"]
        told = (observation.get("result") or {}).get("data")
        error = observation.get("error") or {}
        return told if told is not None else f"error: {error.get('message', error)}"


class Proxy:
    """A `wardian proxy` in front of one rollout server: a process that ends with this one."""

    _all, _lock = {}, threading.Lock()

    def __init__(self, address, program, host):
        self._command = [
            # It ends with the thread that starts it, also when this process is killed.
            "setpriv", "--pdeathsig", "TERM", program, "proxy", "--listen", f"{host}:0",
            "--upstream", f"http://{address}/v1", "--upstream-model", _model_of(address),
        ]
        self._told, self._process, self.url = queue.Queue(), None, None
        threading.Thread(target=self._keep, daemon=True).start()
        said = []
        while self.url is None:
            line = self._told.get()
            if line is None:
                raise Fault(f"`{program} proxy` did not start: {''.join(said)[-MOST_WORDS:]}")
            said.append(line)
            found = re.search(r"at (http://[^/\s]+)", line)
            self.url = found and found[1]

    def _keep(self):
        """Runs the process, for as long as it runs."""
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                env={**os.environ, "NO_COLOR": "1"}, text=True, errors="replace",
            )
            for line in self._process.stderr:
                if self.url is None:
                    self._told.put(line)
                else:
                    logger.warning("%s", line.rstrip())
        except OSError as error:
            self._told.put(str(error))
        self._told.put(None)

    @classmethod
    def before(cls, address, program, host):
        """Returns the one in front of a server, and starts it if it is not there."""
        with cls._lock:
            known = cls._all.get(address)
            if known is None or known._process.poll() is not None:
                cls._all[address] = known = cls(address, program, host)
            return known


def _model_of(address):
    """Returns the name that a server goes by, whatever an agent calls it."""
    try:
        with urllib.request.urlopen(f"http://{address}/v1/models", timeout=60) as answer:
            return json.load(answer)["data"][0]["id"]
    except (OSError, ValueError) as error:
        raise Fault(f"the rollout server at {address}: {error!r}") from error


class Session:
    """One episode's session at a proxy: what the agent asks the model, kept as tokens."""

    def __init__(self, http, proxy, purpose):
        self._http, self._proxy, self.purpose = http, proxy, purpose
        self.id = f"verl-{uuid4().hex}"
        self.base_url = f"{proxy.url}/{self.id}/v1"

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, http, proxy, sampling):
        """Opens a session; what is drawn from another distribution than the model's own is to measure alone."""
        sampling = {name: sampling[name] for name in ("temperature", *NEUTRAL) if name in sampling}
        is_own = sampling.get("temperature", 1.0) > 0 and all(
            sampling.get(name, neutral) == neutral for name, neutral in NEUTRAL.items()
        )
        session = cls(http, proxy, "train" if is_own else "eval")
        pinned = {"temperature": sampling.get("temperature", 1.0)} if is_own else sampling
        fields = {"purpose": session.purpose, "sampling" if is_own else "eval_sampling": pinned}
        await session._ask("POST", "", fields)
        try:
            yield session
        finally:
            with contextlib.suppress(Fault):
                await session._ask("DELETE", "")

    async def _ask(self, method, path, body=None, **query):
        url = f"{self._proxy.url}/sessions/{self.id}{path}"
        try:
            async with self._http.request(method, url, json=body, params=query) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Fault(f"the proxy at {url}: {error!r}") from error
        if answer.status >= 400:
            raise Fault(f"the proxy at {url}: {answer.status} {text[:MOST_WORDS]}")
        return text

    async def rows(self, task_id, reward):
        """Ends the session; returns its rows, each as ids, the prompt's length, mask and log-probabilities."""
        await self._ask("POST", "/complete")
        progress = json.loads(await self._ask("GET", ""))
        if progress["faults"]:
            raise Fault(f"{progress['faults']} calls of the agent failed by no fault of its own")
        if not progress["turns"]:
            raise Fault("the agent never asked the model")
        if self.purpose == "eval":
            return [_path(progress["turns"])]
        labels = {"task_id": str(task_id), "reward": str(reward), "sample": "0"}
        lines = (await self._ask("GET", "/trajectories", **labels)).splitlines()
        traces = [json.loads(line)["trace"] for line in lines if line]
        return [(trace["ids"], trace["prompt_len"], trace["loss_mask"], trace["logprobs"]) for trace in traces]


def _path(turns):
    """Returns the row that ends in the last turn, of which nothing is learned."""
    by_id = {turn["call_id"]: turn for turn in turns}
    turn = turns[-1]
    ids = turn["prompt_token_ids"] + turn["completion_token_ids"]
    mask, first = [0] * len(ids), turn
    while turn is not None:
        start = len(turn["prompt_token_ids"])
        mask[start : start + len(turn["completion_token_ids"])] = [1] * len(turn["completion_token_ids"])
        first, turn = turn, by_id.get(turn["parent_call_id"])
    return ids, len(first["prompt_token_ids"]), mask, None


class WardianAgentLoop(AgentLoopBase):
    """The loop. A row of the data set has `raw_prompt`, the messages, and `task_id`, the task in the environment."""

    def __init__(
        self,
        *args,
        environment="http://127.0.0.1:8000",
        environment_key_env=None,
        agent=None,
        agent_timeout=600.0,
        max_turns=8,
        max_turn_tokens=None,
        step_timeout=120.0,
        attempts=3,
        wardian="wardian",
        proxy_host="127.0.0.1",
        several_rows=False,
        **kwargs,
    ):
        """Args, of which all but verl's own stand in agent_loop.yaml:

        environment: Address of `wardian serve --env tasks`.
        environment_key_env: Variable that holds its key.
        agent: Command of an agent that is a program of its own; none is the agent below, which uses the tools.
        agent_timeout: Seconds after which such a program is ended.
        max_turns: Calls of the model that the agent below makes.
        max_turn_tokens: Tokens that one of its answers may have; none is what the response has room for.
        step_timeout: Seconds that a step of the environment may take.
        attempts: How often an episode is tried that fails by a fault of ours.
        wardian: The program `wardian`.
        proxy_host: Address that proxies listen at: one that agents reach.
        several_rows: Whether all rows of an episode are returned, which verl's V1 trainer takes; else the one with the
            most tokens to learn from.
        """
        super().__init__(*args, **kwargs)
        self.environment = environment.rstrip("/")
        self.environment_key = os.environ[environment_key_env] if environment_key_env else None
        self.agent, self.agent_timeout = (list(agent) if agent else None), agent_timeout
        self.max_turns, self.max_turn_tokens = max_turns, max_turn_tokens
        self.step_timeout, self.attempts = step_timeout, attempts
        self.wardian, self.proxy_host = wardian, proxy_host
        self.several_rows = several_rows
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.response_length

    async def run(self, sampling_params, **kwargs):
        """Plays one episode; returns verl's output, or several of them if `several_rows` is set."""
        for attempt in range(1, self.attempts + 1):
            try:
                return await self._episode(sampling_params, list(kwargs["raw_prompt"]), kwargs["task_id"])
            except Fault as fault:
                logger.warning("attempt %d of %d of task %s: %s", attempt, self.attempts, kwargs["task_id"], fault)
                if attempt == self.attempts:
                    # verl has no episode without a score: a 0 in its place would be learned from.
                    raise
                await asyncio.sleep(min(2**attempt, 30))

    async def _episode(self, sampling, messages, task_id):
        request_id = uuid4().hex
        # verl names a rollout server by its address. It is held for the whole episode, whose prefix it caches.
        address, _ = await self.server_manager._acquire_server(request_id)
        try:
            limits = aiohttp.ClientTimeout(total=self.agent_timeout)
            async with aiohttp.ClientSession(timeout=limits) as http:
                proxy = await asyncio.to_thread(Proxy.before, address, self.wardian, self.proxy_host)
                environment = Environment.session(http, self.environment, self.environment_key, self.step_timeout)
                session = Session.opened(http, proxy, sampling)
                async with session as session, environment as environment:
                    began = time.monotonic()
                    await environment.reset(task_id)
                    tools = await environment.tools()
                    if self.agent:
                        turns, tool_seconds = await self._program(session, environment, tools, messages, task_id)
                    else:
                        turns, tool_seconds = await self._converse(http, session, environment, tools, messages)
                    rows = await session.rows(task_id, environment.reward)
                    seconds = time.monotonic() - began
        finally:
            self.server_manager._release_server(address, request_id=request_id)
        metrics = AgentLoopMetrics(generate_sequences=seconds - tool_seconds, tool_calls=tool_seconds)
        rows.sort(key=lambda row: sum(row[2]))
        kept = rows if self.several_rows else rows[-1:]
        outputs = [self._output(row, environment.reward, turns, metrics, len(rows) - len(kept)) for row in kept]
        return outputs if self.several_rows else outputs[0]

    async def _converse(self, http, session, environment, tools, messages):
        """An agent that asks the model and uses the environment's tools until the episode is over."""
        messages, opening, tool_seconds = list(messages), None, 0.0
        room = self.response_length
        for _ in range(self.max_turns):
            body = {"messages": messages, "tools": tools, "max_tokens": min(room, self.max_turn_tokens or room)}
            try:
                async with http.post(f"{session.base_url}/chat/completions", json=body) as answer:
                    told = await answer.json()
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                raise Fault(f"the proxy at {session.base_url}: {error!r}") from error
            if answer.status == 400 and opening is not None:
                break  # the context is full
            if answer.status != 200:
                raise Fault(f"the model: {answer.status} {str(told)[:MOST_WORDS]}")
            message = told["choices"][0]["message"]
            messages.append(message)
            opening = told["usage"]["prompt_tokens"] if opening is None else opening
            room = self.response_length - (told["usage"]["total_tokens"] - opening)
            for call in message.get("tool_calls") or []:
                if environment.is_over:
                    break
                began = time.monotonic()
                content = await self._use(environment, call["function"])
                tool_seconds += time.monotonic() - began
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if environment.is_over or not message.get("tool_calls") or room <= 0:
                break
        return len(messages), tool_seconds

    @staticmethod
    async def _use(environment, function):
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return "error: the arguments are not a JSON object"
        return await environment.call(function["name"], arguments)

    async def _program(self, session, environment, tools, messages, task_id):
        """Runs an agent that is a program of its own, and submits the answer that it leaves."""
        instruction = "\n\n".join(message["content"] for message in messages if message["role"] == "user")
        with tempfile.TemporaryDirectory(prefix="wardian-agent-") as folder:
            task, answer, words = (os.path.join(folder, name) for name in ("task.json", "answer", "words"))
            with open(task, "w") as file:
                json.dump({"task_id": str(task_id), "instruction": instruction, "messages": messages}, file)
            variables = {
                "PATH": os.environ.get("PATH", ""),
                "LANG": os.environ.get("LANG", "C.UTF-8"),
                "OPENAI_BASE_URL": session.base_url,
                "OPENAI_API_KEY": session.id,
                "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": session.id,
                "WARDIAN_MODEL": "policy",
                "WARDIAN_TASK": task,
                "WARDIAN_ANSWER": answer,
            }
            if len(instruction.encode()) <= 100 << 10:
                variables["WARDIAN_INSTRUCTION"] = instruction
            with open(words, "wb") as told:
                process = await asyncio.create_subprocess_exec(
                    *self.agent, cwd=folder, env=variables, stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL, stderr=told, start_new_session=True,
                )
            try:
                await asyncio.wait_for(process.wait(), self.agent_timeout)
            except TimeoutError:
                pass  # what it has left by now is its answer
            finally:
                # With all that it has started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if process.returncode:
                with open(words, "rb") as told:
                    text = told.read(MOST_WORDS).decode(errors="replace")
                logger.info("the agent of task %s ended with %s: %s", task_id, process.returncode, text)
            try:
                with open(answer, "rb") as file:
                    submitted = file.read(MOST_BYTES).decode(errors="replace")
            except FileNotFoundError:
                return 2, 0.0  # no submission earns 0
        began = time.monotonic()
        submit = [tool["function"] for tool in tools if tool["function"]["name"].startswith("submit_")]
        if len(submit) != 1:
            raise ValueError(f"the environment has {len(submit)} tools to submit by, not one")
        (name,) = submit[0]["parameters"]["required"]
        await environment.call(submit[0]["name"], {name: submitted})
        return 2, time.monotonic() - began

    def _output(self, row, reward, turns, metrics, left_out):
        ids, prompt_len, mask, logprobs = row
        if prompt_len > self.prompt_length:
            # Cut, it would be another prompt than the one that was answered.
            raise ValueError(
                f"a prompt of {prompt_len} tokens is longer than `data.max_prompt_length`, {self.prompt_length}"
            )
        end = prompt_len + self.response_length
        return AgentLoopOutput(
            prompt_ids=ids[:prompt_len],
            response_ids=ids[prompt_len:end],
            response_mask=mask[prompt_len:end],
            response_logprobs=logprobs and logprobs[prompt_len:end],
            reward_score=reward,
            num_turns=turns,
            metrics=metrics,
            extra_fields={
                "reward_extra_info": {}, "turn_scores": [], "tool_rewards": [], "rows_left_out": left_out,
            },
        )
