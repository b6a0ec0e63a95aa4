"""Turns what was measured into ratios, one JSON object and tables."""

import datetime
import math
import os
import platform
import statistics
import textwrap
from pathlib import Path

from comparison import PAUSE_SECONDS, WORKERS
from peers import NATIVE, OURS, PEERS, python_facts


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(value) for value in values))


def milliseconds(rounds):
    """Returns the median and, of 100 or more calls, the 99th percentile."""
    micros = sorted(value for values in rounds for value in values)
    p99 = micros[min(len(micros) - 1, int(0.99 * len(micros)))] if len(micros) >= 100 else None
    return {
        "p50": rounded(statistics.median(micros) / 1e3),
        "p99": rounded(p99 / 1e3) if p99 is not None else None,
        "samples": len(micros),
    }


def rounded(value, digits=4):
    return float(f"{value:.{digits}g}")


def cpu_ratio(mine, theirs, programs):
    """Returns the ratio over the programs that both ran, if they are at least half of all.

    The few that a small subset of the language runs are those that leave the work to a library.
    """
    common = mine.cpu.keys() & theirs.cpu.keys()
    if len(common) * 2 < len(programs):
        return None
    return rounded(geometric_mean(mine.cpu[p] / theirs.cpu[p] for p in common))


def ratio_of_rounds(mine, theirs):
    pairs = [
        statistics.median(a) / statistics.median(b)
        for a, b in zip(mine, theirs, strict=False)
        if a and b
    ]
    return rounded(statistics.median(pairs)) if pairs else None


def ratios(measured, programs):
    """Returns ours divided by each peer's, by name."""
    found = {}
    mine = measured.get(OURS)
    if mine is None:
        return found
    for name, theirs in measured.items():
        if name == OURS:
            continue
        for measure, title in (
            ("fresh print", "fresh_p50"),
            ("fresh function_asserts", "fresh_asserts_p50"),
            ("fresh traceback", "fresh_traceback_p50"),
            ("fresh json", "fresh_json_p50"),
            ("back to back", "back_to_back_p50"),
            ("session step", "session_step"),
            ("fork", "fork"),
        ):
            if measure in mine.rounds and measure in theirs.rounds:
                found[f"{title}_vs_{name}"] = ratio_of_rounds(
                    mine.rounds[measure], theirs.rounds[measure]
                )
        for title, a, b in (
            ("throughput", mine.throughput, theirs.throughput),
            ("cold_start", mine.cold, theirs.cold),
        ):
            if a and b:
                found[f"{title}_vs_{name}"] = ratio_of_rounds([[x] for x in a], [[x] for x in b])
        if mine.session_bytes and theirs.session_bytes:
            found[f"session_memory_vs_{name}"] = rounded(mine.session_bytes / theirs.session_bytes)
        cpu = cpu_ratio(mine, theirs, programs)
        if cpu is not None:
            found["cpu_vs_native_geomean" if name == NATIVE else f"cpu_vs_{name}"] = cpu
    return found


def summary(name, one, native, programs):
    """Returns one peer's part of the report."""
    result = {"title": PEERS[name].title, **one.facts}
    result["fresh_ms"] = {
        measure.removeprefix("fresh "): milliseconds(rounds)
        for measure, rounds in one.rounds.items()
        if measure.startswith("fresh ")
    }
    for measure, key in (
        ("back to back", "back_to_back_ms"),
        ("session step", "session_step_ms"),
        ("fork", "fork_ms"),
    ):
        if measure in one.rounds:
            result[key] = milliseconds(one.rounds[measure])
    if one.fork_keeps:
        result["fork_keeps"] = one.fork_keeps
    if one.throughput:
        result["runs_per_second"] = rounded(statistics.median(one.throughput))
    if one.cold:
        result["cold_start_ms"] = rounded(statistics.median(one.cold) / 1e3)
    if one.session_bytes is not None:
        result["session_mib"] = rounded(one.session_bytes / 2**20)
    if one.cpu:
        result["cpu_seconds"] = {p: rounded(s) for p, s in sorted(one.cpu.items())}
        result["wall_seconds"] = {p: rounded(one.wall[p]) for p in sorted(one.cpu)}
        cpu = cpu_ratio(one, native, programs) if native else None
        if cpu is not None:
            result["cpu_vs_native"] = cpu
    result["language"] = {
        "works": sum(reason is None for reason in one.features.values()),
        "of": len(one.features),
        "fails": {f: reason for f, reason in one.features.items() if reason is not None},
        "libraries": [lib for lib, reason in one.libraries.items() if reason is None],
    }
    result["failures"] = one.failures
    result["unsupported"] = one.unsupported
    return result


def make(measured, missing, options, load):
    """Returns the whole report."""
    native = measured.get(NATIVE)
    return {
        **ratios(measured, options.programs),
        "direction": {
            "ratios": "ours divided by the peer's",
            "throughput": "higher is better",
            "all others": "lower is better",
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(options, load),
        "rounds": options.rounds,
        "cpu_rounds": options.cpu_rounds,
        "programs": list(options.programs),
        "peers": {
            name: summary(name, one, native, options.programs) for name, one in measured.items()
        },
        "missing": missing,
    }


def machine(options, load):
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    facts = python_facts(options.python)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "native_python": ".".join(map(str, facts["version"])),
        "load_at_start": round(load, 2),
        "load_at_end": round(os.getloadavg()[0], 2),
    }


COLUMNS = (
    "isolation",
    "fresh `print`, p50 / p99 ms",
    "back to back, ms",
    "function + asserts, ms",
    "json + re, ms",
    f"runs/s, {WORKERS} workers",
    "live step, ms",
    "MiB a session",
    "copy of a live session, ms",
    "cold start, ms",
    "CPU, × native",
    "language",
)


def digits(value):
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def row(peer, programs):
    def fresh(program):
        return digits(peer["fresh_ms"].get(program, {}).get("p50"))

    printed = peer["fresh_ms"].get("print")
    first = "fails"
    if printed:
        first = digits(printed["p50"])
        if printed["p99"] is not None:
            first += f" / {digits(printed['p99'])}"
    copy = digits(peer.get("fork_ms", {}).get("p50"))
    if peer.get("fork_keeps", "everything") != "everything":
        copy += f" ({peer['fork_keeps']})"
    cpu = f"{peer['cpu_vs_native']:.2f}" if "cpu_vs_native" in peer else "–"
    ran = len(peer.get("cpu_seconds", {}))
    if ran < len(programs):
        cpu += f" (ran {ran} of {len(programs)})"
    language = peer["language"]
    spoken = f"{language['works']}/{language['of']}"
    if language["libraries"]:
        spoken += ", " + ", ".join(language["libraries"])
    return [
        f"{peer['title']} {peer['version']}",
        peer["isolation"],
        first,
        digits(peer.get("back_to_back_ms", {}).get("p50")),
        fresh("function_asserts"),
        fresh("json"),
        digits(peer.get("runs_per_second")),
        digits(peer.get("session_step_ms", {}).get("p50")),
        digits(peer.get("session_mib")),
        copy,
        digits(peer.get("cold_start_ms")),
        cpu,
        spoken,
    ]


def rows(report):
    return [row(peer, report["programs"]) for peer in report["peers"].values()]


def conditions(report):
    """Returns what one must know to read the table, a paragraph each."""
    facts = report["machine"]
    lines = [
        f"{report['date'][:10]}, {facts['cpu']}, {facts['cores']} cores, load "
        f"{facts['load_at_start']} at the start, Linux {facts['kernel']}; native Python "
        f"{facts['native_python']}, the fastest found. All measured in turn in "
        f"{report['rounds']} rounds, engines warm. Fresh runs are "
        f"{PAUSE_SECONDS * 1e3:.0f} ms apart, in which some peers prepare the next instance; back "
        "to back and runs/s leave no such time. A copy of a live session includes its first step. "
        "A cold start is a host process from start to exit around one fresh run. CPU: process "
        f"time in a live session, best of {report['cpu_rounds']}, geometric mean over the "
        f"{len(report['programs'])} programs of `benches/programs`. Language: small programs of "
        "`scripts/compare/features.py` that work, and libraries included. A dash: it cannot.",
    ]
    if report["missing"]:
        lines.append(
            "Missing: "
            + "; ".join(
                f"{plain(PEERS[name].title)} ({reason})"
                for name, reason in report["missing"].items()
            )
            + "."
        )
    return lines


def fresh_runs(report):
    """Returns what each peer does for a fresh run, as list items."""
    return [
        f"- {plain(peer['title'])} (Python {peer['python']}): {peer['fresh']}"
        for peer in report["peers"].values()
    ]


def plain(title):
    return title.replace("*", "")


def notes(report):
    parts = [*conditions(report), "A fresh run is:"]
    paragraphs = [textwrap.fill(part, 100, break_on_hyphens=False) for part in parts]
    return "\n\n".join([*paragraphs, "\n".join(fresh_runs(report))])


def markdown(report):
    lines = [
        "| | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *("| " + " | ".join(cells) + " |" for cells in rows(report)),
    ]
    return "\n".join(lines) + f"\n\n{notes(report)}\n"


def text(report):
    """Returns the report for a terminal: a block for each peer, then ratios and failures."""
    lines = []
    for name, cells in zip(report["peers"], rows(report), strict=True):
        lines.append(f"{plain(cells[0])}  [{name}]")
        lines += [f"    {title:32} {cell}" for title, cell in zip(COLUMNS, cells[1:], strict=True)]
        peer = report["peers"][name]
        lines += [f"    {what:32} failed: {why}" for what, why in peer["failures"].items()]
        if peer["language"]["fails"]:
            lines.append(f"    {'does not work':32} {', '.join(peer['language']['fails'])}")
    lines.append("\nours / theirs (throughput: higher is better; all others: lower)")
    lines += [f"    {key:40} {value:g}" for key, value in report.items() if "_vs_" in key]
    return "\n".join(lines) + f"\n\n{notes(report)}\n"
