"""Trains with TRL's GRPOTrainer in tasks that Wardian serves: TRL samples and learns, Wardian runs the model's
programs and grades its submissions, where neither can reach the other.

    pip install trl==1.16.0 openenv==0.10.0 jmespath
    wardian serve --env tasks --tasks examples/starter/tasks/train.jsonl --max-sessions 64 &
    python examples/trl/train.py --model Qwen/Qwen3-0.6B --steps 20

A task file of your own takes the place of the carried one; docs/openenv.md has what the server can do.
"""

import argparse
import json
import urllib.request

from datasets import Dataset
from openenv.core import GenericEnvClient
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

INSTRUCTION = "\n\nTry a draft with `run_python`, then call `submit_solution` with the whole program."


def tasks_of(server):
    """Returns a row for each task of the server's file."""

    def asked(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(server + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    (name,) = asked("/list_environments")
    tasks = asked(f"/{name}/tasks", {"split": "train"})["tasks"]
    return Dataset.from_list([
        {
            "prompt": [{"role": "user", "content": task["instruction"] + INSTRUCTION}],
            "task_id": str(task["id"]),
        }
        for task in tasks
    ])


def environment_of(server):
    """Returns the class whose objects are one rollout's session each; TRL uses an object again and again."""

    class Task:
        def __init__(self):
            self._client = GenericEnvClient(base_url=server).sync()
            self._reward, self._is_over = 0.0, False

        def reset(self, task_id, **_):
            self._client.reset(task_id=task_id)
            self._reward, self._is_over = 0.0, False

        def run_python(self, code: str) -> str:
            """
            Runs a program in a fresh interpreter and returns what it prints.

            Args:
                code: The program.

            Returns:
                What it printed.
            """
            return self._call("run_python", code)

        def submit_solution(self, code: str) -> str:
            """
            Submits the final code for grading and ends the task.

            Args:
                code: The complete solution.

            Returns:
                Whether it was taken.
            """
            return self._call("submit_solution", code)

        def _call(self, tool, code):
            if self._is_over:
                return "The task is over."
            action = {"type": "call_tool", "tool_name": tool, "arguments": {"code": code}}
            result = self._client.step(action)
            self._is_over = result.done
            self._reward = result.reward or 0.0
            return (result.observation["result"] or {}).get("data") or result.observation["error"] or ""

    return Task


def reward(environments, **_):
    """The grader's reward; an episode without a submission has 0."""
    return [environment._reward for environment in environments]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group", type=int, default=8, help="rollouts of one task")
    parser.add_argument("--tasks-per-step", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=1024, help="of an episode, tools' answers included")
    parser.add_argument("--out", default="trl-run")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        environment_factory=environment_of(args.server),
        train_dataset=tasks_of(args.server),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=GRPOConfig(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=args.group * args.tasks_per_step,
            num_generations=args.group,
            max_completion_length=args.max_tokens,
            max_tool_calling_iterations=4,
            learning_rate=5e-5,
            logging_steps=1,
            report_to=[],
            use_cpu=args.cpu,
            bf16=not args.cpu,
            gradient_checkpointing=not args.cpu,
        ),
    )
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    main()
