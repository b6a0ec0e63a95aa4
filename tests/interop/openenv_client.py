"""Uses `wardian serve --env` through OpenEnv's own client, as users do.

    python -m venv venv && venv/bin/pip install openenv==0.10.0
    venv/bin/python tests/interop/openenv_client.py target/release/wardian

Exits non-zero at the first thing that is not as it should be.
"""

import concurrent.futures
import json
import sys
import tempfile

from openenv.core import GenericEnvClient

from served import served


def client(address, **options):
    return GenericEnvClient(base_url=address, **options).sync()


def check_coding_env(address):
    with client(address, headers={"ate-target-actor": "actor-7"}) as env:
        result = env.reset()
        assert result.observation == {"metadata": {}, "stdout": "", "stderr": "", "exit_code": 0}, result
        assert (result.reward, result.done) == (0.0, False), result
        for code, stdout, reward, exit_code in [
            ("print('hello')", "hello\n", 0.1, 0),
            ("x = 41", "41", 0.1, 0),
            ("print(x + 1)", "42\n", 0.1, 0),
            ("1/0", "", 0.1, 1),
            ("import os", "", -0.9, 1),
            ("x = (", "", -0.1, 1),
            ("for i in range(3):\n    print(i)", "0\n1\n2\n", 0.1, 0),
            ("'é☃'", '"\\u00e9\\u2603"', 0.1, 0),
            ("print('a'*5)\nimport math\nmath.sqrt(2)", "aaaaa\n\n1.4142135623730951", 0.1, 0),
        ]:
            result = env.step({"code": code})
            assert result.observation["stdout"] == stdout, (code, result)
            assert result.observation["exit_code"] == exit_code, (code, result)
            assert result.reward == reward, (code, result)
            assert result.metadata["last_code"] == code, (code, result)
        state = env.state()
        assert state["step_count"] == 9, state
        try:
            env.step({"code": "print(1)", "timeout_s": 3})
        except RuntimeError as error:
            assert "VALIDATION_ERROR" in str(error), error
        else:
            raise AssertionError("an unknown field was taken")
        env.reset(episode_id="mine", seed=3)
        assert env.state()["episode_id"] == "mine"


def check_python(address):
    with client(address) as env:
        try:
            env.step({"code": "print(1)"})
        except RuntimeError as error:
            assert "no episode" in str(error), error
        else:
            raise AssertionError("a step without an episode was taken")
        env.reset()
        env.step({"code": "import json, sys\ndef f(n):\n    global last\n    last = n\n    return n"})
        result = env.step({"code": "print(json.dumps(f(3)), last, file=sys.stderr)"})
        assert result.observation["stderr"] == "3 3\n", result
        result = env.step({"code": "while True: pass"})
        assert result.observation["exit_code"] == 137, result
        assert result.observation["metadata"]["exit"]["kind"] == "out_of_fuel", result
        try:
            env.step({"code": "print(f)"})
        except RuntimeError as error:
            assert "state was lost" in str(error), error
        else:
            raise AssertionError("the state came back from nowhere")
        env.reset()
        assert env.step({"code": "print(1)"}).observation["stdout"] == "1\n"

    def episode(number):
        with client(address) as env:
            env.reset()
            env.step({"code": f"x = {number}"})
            return env.step({"code": "print(x)"}).observation["stdout"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(episode, range(64))) == [f"{number}\n" for number in range(64)]


def check_tasks(address):
    with client(address) as env:
        result = env.reset(task_id="double")
        assert "doubles" in result.observation["instruction"], result

        def call(tool, **arguments):
            return env.step({"type": "call_tool", "tool_name": tool, "arguments": arguments})

        result = call("run_python", code="print(2 * 21)")
        assert result.observation["result"]["data"] == "42", result
        result = call("submit_solution", code="def double(x):\n    return 2 * x")
        assert (result.reward, result.done) == (1.0, True), result


def check_capacity(address):
    with client(address) as first:
        first.reset()
        second = client(address)
        try:
            with second:
                second.reset()
        except RuntimeError as error:
            assert "CAPACITY_REACHED" in str(error), error
        else:
            raise AssertionError("there was a second session")


def main(binary):
    with served(binary, "--env", "coding_env") as (address, _):
        check_coding_env(address)
    with served(binary, "--env", "python", "--fuel", "2000000000") as (address, _):
        check_python(address)
    with served(binary, "--env", "python", "--max-sessions", "1") as (address, _):
        check_capacity(address)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        task = {
            "grader": "unit_tests",
            "task_id": "double",
            "entry_points": ["double"],
            "prompt": "Write double(x), which doubles x.",
            "tests": ["assert double(2) == 4", "assert double(-1) == -2"],
        }
        file.write(json.dumps(task) + "\n")
        file.flush()
        with served(binary, "--env", "tasks", "--tasks", file.name) as (address, _):
            check_tasks(address)
    print("OpenEnv's client works with every environment")


if __name__ == "__main__":
    main(sys.argv[1])
