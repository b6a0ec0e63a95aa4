"""Trains two steps of TRL's GRPOTrainer against `wardian serve --env python`.

    python -m venv venv && venv/bin/pip install openenv==0.10.0 trl==1.16.0 jmespath
    venv/bin/python tests/interop/trl_grpo.py target/release/wardian

An optional check: TRL brings torch. The policy is a tiny random Qwen3, so what it writes is noise; so
that its tool loop runs all the same, every other completion is replaced by a call of the tool before
TRL parses it. What is checked is that TRL's own loop resets the environments, calls their tools over
the wire, masks what they answer, gets their rewards and takes two optimizer steps. Then examples/trl/train.py runs as the
tutorial has it, with that policy, and what it saves is measured by `wardian eval`.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from datasets import Dataset
from openenv.core import GenericEnvClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from served import served

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ROOT = pathlib.Path(__file__).resolve().parents[2]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"]
CALL = '<tool_call>\n{"name": "run_python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call><|im_end|>'


def tiny_tokenizer():
    from trl.chat_template_utils import qwen3_chat_template

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(MARKS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.chat_template = qwen3_chat_template
    return fast


def main(binary):
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    ))
    seen = {"resets": 0, "calls": 0}

    with served(binary, "--env", "python") as (address, _), tempfile.TemporaryDirectory() as folder:

        class PythonEnvironment:
            """One rollout's session; TRL makes one a rollout and uses it again."""

            def __init__(self):
                self._client = GenericEnvClient(base_url=address).sync()
                self._output = ""

            def reset(self, **_):
                seen["resets"] += 1
                self._client.reset()
                self._output = ""

            def run_python(self, code: str) -> str:
                """
                Runs a program and returns what it prints.

                Args:
                    code: The program.

                Returns:
                    What it printed.
                """
                seen["calls"] += 1
                self._output = self._client.step({"code": code}).observation["stdout"]
                return self._output

        def solved(environments, **_):
            return [float(environment._output == "42\n") for environment in environments]

        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=solved,
            environment_factory=PythonEnvironment,
            train_dataset=Dataset.from_dict(
                {"prompt": [[{"role": "user", "content": "What is 6 * 7?"}]] * 8}
            ),
            args=GRPOConfig(
                output_dir=folder, max_steps=2, per_device_train_batch_size=4, num_generations=4,
                max_completion_length=160, max_tool_calling_iterations=1, learning_rate=1e-3,
                logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
                gradient_checkpointing=False,
            ),
        )
        sample = trainer._generate_single_turn
        call = tokenizer.encode(CALL, add_special_tokens=False)
        turns = iter(range(1_000_000))

        def sometimes_a_call(*arguments, **options):
            ids, *rest = sample(*arguments, **options)
            if next(turns) % 2 == 0:
                ids = [call if number % 2 == 0 else own for number, own in enumerate(ids)]
                if rest and rest[0] is not None:
                    rest[0] = [
                        [0.0] * len(call) if number % 2 == 0 else own for number, own in enumerate(rest[0])
                    ]
            return (ids, *rest)

        trainer._generate_single_turn = sometimes_a_call
        before = [parameter.detach().clone() for parameter in model.parameters()]
        trainer.train()
        moved = any((old != new).any() for old, new in zip(before, model.parameters()))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"{len(losses)} steps, {seen['resets']} resets, {seen['calls']} tool calls, losses {losses}")
        assert trainer.state.global_step == 2 and moved, "the policy did not move"
        assert seen["resets"] >= 8 and seen["calls"] >= 4, seen
    check_example(binary, model, tokenizer)


def check_example(binary, model, tokenizer):
    """Runs the example's commands, and measures the adapter that it saves."""
    tasks = ROOT / "examples/starter/tasks/train.jsonl"
    with (
        served(binary, "--env", "tasks", "--tasks", str(tasks), "--max-sessions", "64") as (address, _),
        tempfile.TemporaryDirectory() as folder,
    ):
        policy, out = f"{folder}/policy", f"{folder}/trl-run"
        model.save_pretrained(policy)
        tokenizer.save_pretrained(policy)
        subprocess.run(
            [sys.executable, ROOT / "examples/trl/train.py", "--server", address, "--model", policy, "--steps", "2",
             "--group", "2", "--tasks-per-step", "2", "--max-tokens", "64", "--out", out, "--cpu"],
            check=True, timeout=900,
        )
        measured = subprocess.run(
            [binary, "eval", "--model", out, "--tasks", str(tasks), "--format", "json", "--set", "eval.limit=4",
             "--set", "eval.samples=1", "--set", "rollout.max_new_tokens=16", "--set", "rollout.max_total_tokens=2048"],
            check=True, timeout=900, stdout=subprocess.PIPE, text=True,
        )
        report = json.loads(measured.stdout)
        print(f"the example's adapter is measured: {measured.stdout[:200]}")
        assert report["tasks"] == 4, report


if __name__ == "__main__":
    main(sys.argv[1])
