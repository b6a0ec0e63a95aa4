#!/usr/bin/env python3
"""Makes `trl_losses.json`: what TRL's own `GRPOTrainer._compute_loss` says about fixed rollouts.

    pip install trl==1.16.0 torch transformers accelerate datasets
    python3 tests/golden/make_trl_losses.py

The trainer is made without a model: the only thing that its loss asks of one is a log-probability and an entropy for
each token, which here come from given logits. Everything is in float64.
"""

import collections
import importlib.metadata
import json
import pathlib
import types

import torch
from trl import GRPOConfig, GRPOTrainer

BATCH, TOKENS, VOCAB, TEMPERATURE = 4, 5, 7, 0.8
MAX_COMPLETION_LENGTH = 8

CASES = {
    "grpo": {"loss_type": "grpo"},
    "grpo_delta": {"loss_type": "grpo", "delta": 1.3},
    "grpo_beta": {"loss_type": "grpo", "beta": 0.04},
    "grpo_beta_uncorrected": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo_entropy": {"loss_type": "dapo", "entropy_coef": 0.01},
    "dapo_off_policy_mask": {"loss_type": "dapo", "off_policy_mask_threshold": -0.1},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
    "gspo_beta": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.04},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "sapo_beta": {"loss_type": "sapo", "beta": 0.04},
}


class OneProcess:
    """What the loss asks of `accelerate`, for one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor):
        return tensor

    def reduce(self, tensor, reduction):
        return tensor


def rollouts():
    torch.manual_seed(0)
    real = dict(dtype=torch.float64)
    logits = 2 * torch.randn(BATCH, TOKENS, VOCAB, **real)
    ids = torch.randint(VOCAB, (BATCH, TOKENS))
    # Completions of different lengths, with a tool's output in the first.
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], **real)
    logps = (logits / TEMPERATURE).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    noise = lambda scale: scale * torch.randn(BATCH, TOKENS, **real)
    return {
        "logits": logits,
        "ids": ids,
        "mask": mask,
        "advantages": torch.tensor([1.3, -0.8, 0.25, -0.75], **real),
        "old": logps + noise(0.3),
        "sampled": logps + noise(0.2),
        "reference": logps + noise(0.4),
    }


def evaluate(data, settings):
    logits = data["logits"].clone().requires_grad_()
    args = GRPOConfig(output_dir="unused", report_to="none", bf16=False, use_cpu=True, **settings)
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.args = args
    trainer.accelerator = OneProcess()
    trainer.model = types.SimpleNamespace(training=True)
    trainer._metrics = {"train": collections.defaultdict(list)}
    trainer.current_gradient_accumulation_steps = 1
    trainer.max_completion_length = MAX_COMPLETION_LENGTH
    trainer.aux_loss_enabled = False
    trainer.use_vllm = False
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer._entropy_bonus_enabled = args.entropy_coef != 0.0
    for name in (
        "beta", "entropy_coef", "importance_sampling_level", "loss_type", "off_policy_mask_threshold",
        "top_entropy_quantile", "use_adaptive_entropy", "vllm_importance_sampling_correction",
    ):
        setattr(trainer, name, getattr(args, name))
    args.steps_per_generation = 1

    def scores(*_, **__):
        distribution = (logits / TEMPERATURE).log_softmax(-1)
        logps = distribution.gather(-1, data["ids"][..., None])[..., 0]
        return logps, -(distribution.exp() * distribution).sum(-1), None

    trainer._get_per_token_logps_and_entropies = scores
    empty = torch.zeros(BATCH, 0, dtype=torch.long)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": data["ids"],
        "completion_mask": data["mask"],
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "sampling_per_token_logps": data["sampled"],
        "ref_per_token_logps": data["reference"],
        "num_items_in_batch": data["mask"].sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return {"loss": loss.item(), "gradient": logits.grad.tolist()}


def main():
    data = rollouts()
    file = {
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers")},
        "temperature": TEMPERATURE,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "rollouts": {name: value.tolist() for name, value in data.items()},
        "cases": {name: {"settings": settings, **evaluate(data, settings)} for name, settings in CASES.items()},
    }
    path = pathlib.Path(__file__).with_name("trl_losses.json")
    path.write_text(json.dumps(file) + "\n")


if __name__ == "__main__":
    main()
