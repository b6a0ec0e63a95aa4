"""Trains the carried model for a step on what agents of third parties had it sample.

    python -m venv venv && venv/bin/pip install openai anthropic 'smolagents[openai]==1.26.0'
    venv/bin/python tests/interop/train_agents.py target/release/wardian

Answers earn by their length, so that those of a group differ whatever they say. Checked are the rows of
each agent (sampled ids with a mask, several calls), that the trainer computes the probabilities that they
were sampled with, and that the step moved the weights. Clients that are not installed are said and
skipped. Exits non-zero at the first thing that is not as it should be.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

from agents import AGENTS
from proxy_clients import MODEL, longer


def train(binary, name, folder):
    """Trains for a step with an agent; returns the run folder."""
    run = pathlib.Path(folder) / name
    agents = pathlib.Path(__file__).parent / "agents.py"
    command = json.dumps([sys.executable, str(agents), name])
    sets = [
        "trainer.steps=1", "trainer.mode=\"full\"", "trainer.learning_rate=1e-4", "eval.limit=2",
        "eval.samples=1", "eval.temperature=1.0", "rollout.groups_per_step=2", "rollout.group_size=3",
        "rollout.max_total_tokens=4096", "reward.length=1.0", "reward.length_limit=1000",
        "reward.length_margin=1000", f"rollout.agent.command={command}",
        # Its interpreter may be anywhere.
        "rollout.agent.isolation=\"none\"", "rollout.agent.concurrency=3",
    ]
    arguments = [part for each in sets for part in ("--set", each)]
    model = folder / "model"
    subprocess.run(
        [binary, "train", "--model", str(model), "--out", str(run), *arguments], check=True, timeout=600
    )
    return run


def check(run, name):
    """Checks the rows of a run's step, and what it did."""
    lines = (run / "rollouts/step-1.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if "trace" in row]
    assert len(rows) >= 6, f"{name}: {len(rows)} rows of 6 episodes"
    sampled = sum(sum(row["trace"]["loss_mask"]) for row in rows)
    calls = sum(len(row["turns"]) for row in rows)
    assert sampled > 0 and calls > 6, (name, sampled, calls)
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["grad_norm"] > 0, metrics
    assert metrics["episodes/unscorable"] == 0, metrics
    difference = metrics["sampling/sampling_logp_difference/max"]
    assert difference < 1e-3, f"{name}: other ids were learned from: {difference}"
    moved = (run / "final/model.safetensors").read_bytes() != (MODEL / "model.safetensors").read_bytes()
    assert moved, f"{name}: the step changed nothing"
    print(
        f"{name}: {len(rows)} rows, {calls} calls, {sampled} sampled tokens; log-probabilities agree to "
        f"{difference:.1e}; gradient {metrics['grad_norm']:.3f}"
    )


def main():
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        longer(folder)
        for name in AGENTS:
            if importlib.util.find_spec(name) is None:
                print(f"{name} is not installed: skipped")
                continue
            check(train(sys.argv[1], name, folder), name)


if __name__ == "__main__":
    main()
