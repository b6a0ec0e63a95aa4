"""Measures torch with PEFT and TRL for trainer.py; runs in their environment.

    trainer_worker.py GGUF

Reads requests and prints answers, one JSON object a line:

    {"what": "describe"}                                  versions and settings
    {"what": "step", "setting": "f32", "sequences": 8, "length": 256, "prompt": 64, "rank": 16}
                                                          {"seconds": .., "grad_norm": .., "peak_bytes": ..}
    {"what": "grpo", "setting": "f32", "prompts": [..], "tests": [..], "group": 8, "tokens": 128,
     "rank": 16}                                          {"seconds": .., "completion_tokens": ..}

A step is a LoRA step as benches/trainer.rs makes it: log-probabilities of the same tokens (only the
completions' logits are computed, as TRL does), forward, backward, clipping, AdamW. `grpo` trains two
steps with TRL's GRPOTrainer on prompts in the order given and times the second.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

from engine_worker import THREADS, Torch, prompts

GRADE_SECONDS = 10


def grade(program):
    """Whether a program ends well in a process of its own: what a reward function of TRL's users does."""
    command = [sys.executable, "-I", "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GRADE_SECONDS)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(done.returncode == 0)


def code_of(completion):
    """The first fenced block of an answer, or all of it."""
    _, fence, rest = completion.partition("```")
    return rest.partition("```")[0].removeprefix("python") if fence else completion


class Trainer:
    # Each is tried; the comparison takes the fastest.
    STEP_SETTINGS = ("f32", "f32 checkpointed", "bf16", "bf16 checkpointed")
    GRPO_SETTINGS = ("f32", "bf16")

    def __init__(self, path):
        import peft
        import torch

        self.peft, self.torch = peft, torch
        self.path = path
        self.source = Torch(path)
        self.steps = {}

    def describe(self):
        from importlib.metadata import version

        names = ("torch", "transformers", "peft", "trl")
        return {
            "version": ", ".join(f"{name} {version(name)}" for name in names),
            "step_settings": list(self.STEP_SETTINGS),
            "grpo_settings": list(self.GRPO_SETTINGS),
        }

    def lora(self, rank):
        return self.peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )

    def model(self):
        self.source.models.clear()
        model, _ = self.source.model(False)
        return model.train()

    def step(self, setting, sequences, length, prompt, rank):
        torch = self.torch
        if setting not in self.steps:
            # One model at a time, so that the peak is that of this setting or an earlier one.
            self.steps.clear()
            model = self.peft.get_peft_model(self.model(), self.lora(rank))
            if "checkpointed" in setting:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.enable_input_require_grads()
            variables = [p for p in model.parameters() if p.requires_grad]
            self.steps[setting] = (model, variables, torch.optim.AdamW(variables, lr=1e-4))
        model, variables, optimizer = self.steps[setting]
        tokens = torch.tensor(prompts(sequences, length))
        signs = torch.tensor([1.0 if index % 2 == 0 else -1.0 for index in range(sequences)])
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="bf16" in setting):
            output = model(input_ids=tokens, use_cache=False, logits_to_keep=length - prompt + 1)
        logits = output.logits[:, :-1].float()
        chosen = logits.gather(-1, tokens[:, prompt:].unsqueeze(-1)).squeeze(-1)
        logprobs = chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
        ratios = torch.exp(logprobs - logprobs.detach())
        (-(ratios * signs[:, None]).mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(variables, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": seconds, "grad_norm": float(norm), "peak_bytes": peak}

    def tokenizer(self):
        """Makes the tokenizer from the GGUF file's tokens and merges."""
        import tokenizers
        from gguf import GGUFReader
        from tokenizers import pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        fields = GGUFReader(self.path)
        tokens = fields.get_field("tokenizer.ggml.tokens").contents()
        merges = fields.get_field("tokenizer.ggml.merges").contents()
        kinds = fields.get_field("tokenizer.ggml.token_type").contents()
        vocabulary = {token: index for index, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ")) for merge in merges]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True),
             pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )  # fmt: skip
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        # Type 3 is a control token.
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
        tokenizer.add_special_tokens(control)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<|im_end|>",
            pad_token="<|im_end|>",
            padding_side="left",
        )

    def grpo(self, setting, prompts, tests, group, tokens, rank):
        import datasets
        import transformers
        import trl

        rows = {"prompt": prompts, "tests": tests}
        marks, lengths = [], []

        def reward(completions, tests, completion_ids, **_):
            lengths.append([len(ids) for ids in completion_ids])
            programs = [f"{code_of(c)}\n{t}" for c, t in zip(completions, tests, strict=True)]
            with ThreadPoolExecutor(THREADS) as pool:
                return list(pool.map(grade, programs))

        class Clock(transformers.TrainerCallback):
            def on_step_begin(self, *_, **__):
                marks.append(time.perf_counter())

            def on_step_end(self, *_, **__):
                marks.append(time.perf_counter())

        with tempfile.TemporaryDirectory(prefix="wardian-compare-") as folder:
            config = trl.GRPOConfig(
                output_dir=folder,
                max_steps=2,
                per_device_train_batch_size=group * len(prompts) // 2,
                num_generations=group,
                max_completion_length=tokens,
                learning_rate=5e-5,
                use_cpu=True,
                bf16=setting == "bf16",
                gradient_checkpointing=False,
                shuffle_dataset=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
            )
            trainer = trl.GRPOTrainer(
                model=self.model(),
                reward_funcs=reward,
                args=config,
                train_dataset=datasets.Dataset.from_dict(rows),
                processing_class=self.tokenizer(),
                peft_config=self.lora(rank),
                callbacks=[Clock()],
            )
            trainer.train()
        return {
            "seconds": marks[3] - marks[2],
            "completion_tokens": sum(lengths[1]),
            "completions": len(lengths[1]),
        }


def main():
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = Trainer(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(peer, request.pop("what"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
