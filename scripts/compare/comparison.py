"""Asks every peer in turn, round by round."""

import contextlib
import math
import statistics
import subprocess
import time
from dataclasses import dataclass, field

from features import FEATURES, LIBRARIES
from peers import PEERS, ROOT, Missing, note
from process import Failed, Process, Unsupported, last_line

STEPS = {path.stem: path.read_text() for path in sorted((ROOT / "benches/steps").glob("*.py"))}
PROGRAMS = {
    path.stem: path.read_text() for path in sorted((ROOT / "benches/programs").glob("*.py"))
}
WORKERS = 2
# Between fresh runs: some peers prepare the next instance in the background, and with no time for
# that they seem slower than they are. Their throughput shows what it costs.
PAUSE_SECONDS = 0.002
STEP = "x += 1\nprint(x)"
# A small heap with what programs hold; a copy must keep as much of it as the peer can.
HEAP = """
data = list(range(1000))
class Point:
    def __init__(self, x):
        self.x = x
point = Point(3)
def double(x):
    return x * 2
"""
GENERATOR = """
def count():
    n = 0
    while True:
        yield n
        n += 1
numbers = count()
next(numbers)
"""
# What is kept: the session's code, the copy's first step, and what that prints.
FORKS = {
    "everything": (
        HEAP + GENERATOR,
        "print(len(data), point.x, double(21), next(numbers))",
        "1000 3 42 1",
    ),
    "no generators": (HEAP, "print(len(data), point.x, double(21))", "1000 3 42"),
    "plain data": ("data = list(range(1000))", "print(len(data))", "1000"),
}


@dataclass
class Measured:
    """What one peer gave."""

    facts: dict = field(default_factory=dict)
    # Per measure, a list of microseconds for each round.
    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    throughput: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    session_bytes: float | None = None
    fork_keeps: str | None = None
    cpu: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    features: dict[str, str | None] = field(default_factory=dict)
    libraries: dict[str, str | None] = field(default_factory=dict)


def expected_outputs(python):
    """Runs every program natively: what a peer prints must be the same."""
    outputs = {}
    for name, code in {**STEPS, **PROGRAMS}.items():
        ran = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
        outputs[name] = ran.stdout if ran.returncode == 0 else last_line(ran.stderr).split(":")[0]
    return outputs


def check(answer, expected, must_fail=False):
    """Raises Failed unless a program did what it does natively."""
    if must_fail:
        if answer["ok"] or expected not in answer["stdout"] + answer["error"]:
            raise Failed(f"shows no {expected}")
    elif not answer["ok"]:
        raise Failed(last_line(answer["error"]) or "failed without a word")
    elif answer["stdout"].split() != expected.split():
        raise Failed(f"printed {answer['stdout'][:60]!r}")


class Comparison:
    def __init__(self, processes, options):
        self.processes = processes
        self.options = options
        self.measured = {name: Measured() for name in processes}
        self.expected = expected_outputs(options.python)
        # How many calls fill a round's time, from the calls before.
        self.counts = {}
        # The peers whose last opened session is the one for CPU programs.
        self.warm = set()

    def run(self):
        steps = [
            ("sessions' memory", self.memory),
            *((f"round {n + 1} of {self.options.rounds}", self.round)
              for n in range(self.options.rounds)),
            *((f"CPU programs, {n + 1} of {self.options.cpu_rounds}", self.cpu)
              for n in range(self.options.cpu_rounds)),
            ("language", self.language),
        ]  # fmt: skip
        for number, (title, step) in enumerate(steps):
            note(title)
            # Each round begins with another peer, so that none always follows the same.
            names = list(self.processes)
            first = number % max(1, len(names))
            step(names[first:] + names[:first])

    def attempt(self, name, what, action):
        """Runs a measurement unless it failed before, and keeps the reason if it fails."""
        measured = self.measured[name]
        if what in measured.failures or what in measured.unsupported:
            return
        try:
            action()
        except Unsupported as reason:
            measured.unsupported[what] = str(reason)
        except Failed as reason:
            measured.failures[what] = str(reason)

    def memory(self, names):
        for name in names:
            self.attempt(name, "session memory", lambda name=name: self.memory_of(name))

    def memory_of(self, name):
        process = self.processes[name]
        count = min(PEERS[name].sessions, self.options.max_sessions)
        process.ask(what="open", sessions=2, code="x = 0\nprint(x)")
        before = process.memory()
        process.ask(what="open", sessions=count, code="x = 0\nprint(x)")
        self.measured[name].session_bytes = (process.memory() - before) / count
        process.ask(what="close")

    def round(self, names):
        runs = [(f"fresh {program}", program, PAUSE_SECONDS) for program in STEPS]
        for measure, program, pause in [*runs, ("back to back", "print", 0)]:
            for name in names:
                self.attempt(
                    name,
                    measure,
                    lambda name=name, measure=measure, program=program, pause=pause: self.timed(
                        name,
                        measure,
                        {"what": "fresh", "code": STEPS[program], "pause": pause},
                        self.expected[program],
                        must_fail=program == "traceback",
                    ),
                )
        for name in names:
            self.attempt(name, "session step", lambda name=name: self.session_step(name))
        for name in names:
            self.attempt(name, "fork", lambda name=name: self.fork(name))
        for name in names:
            self.attempt(name, "throughput", lambda name=name: self.throughput(name))
        for name in names:
            if not PEERS[name].is_process:
                self.attempt(name, "cold start", lambda name=name: self.cold_start(name))

    def timed(self, name, measure, request, expected, must_fail=False):
        """Asks for as many calls as fit in a round's time."""
        process = self.processes[name]
        key = (name, measure)
        if key not in self.counts:
            # The first calls warm up and tell how many fit.
            answer = process.ask(**request, count=2)
            if expected is not None:
                check(answer, expected, must_fail)
            self.counts[key] = self.fitting(answer["micros"][1:], request)
        answer = process.ask(**request, count=self.counts[key])
        if expected is not None:
            check(answer, expected, must_fail)
        self.measured[name].rounds.setdefault(measure, []).append(answer["micros"])
        self.counts[key] = self.fitting(answer["micros"], request)

    def fitting(self, micros, request):
        seconds = statistics.median(micros) / 1e6 + request.get("pause", 0)
        return max(1, min(1000, int(self.options.seconds / seconds)))

    def session_step(self, name):
        process = self.processes[name]
        process.ask(what="open", sessions=1, code="x = 0")
        self.timed(name, "session step", {"what": "step", "code": STEP}, None)
        answer = process.ask(what="step", code="x = 41\n" + STEP, count=1)
        check(answer, "42")
        process.ask(what="close")

    def fork(self, name):
        measured = self.measured[name]
        if measured.fork_keeps is None:
            for keeps, (code, probe, expected) in FORKS.items():
                try:
                    check(
                        self.processes[name].ask(what="fork", code=code, probe=probe, count=1),
                        expected,
                    )
                except Failed as error:
                    reason = error
                    continue
                measured.fork_keeps = keeps
                break
            else:
                raise reason
        code, probe, expected = FORKS[measured.fork_keeps]
        self.timed(name, "fork", {"what": "fork", "code": code, "probe": probe}, expected)

    def throughput(self, name):
        seconds = max(self.options.seconds * 2, 0.5)
        answer = self.processes[name].ask(
            what="throughput", code=STEPS["print"], workers=WORKERS, seconds=seconds
        )
        self.measured[name].throughput.append(answer["runs"] / answer["seconds"])

    def cold_start(self, name):
        process = Process(name, self.processes[name].command)
        started = time.perf_counter()
        try:
            answer = process.ask(what="fresh", code=STEPS["print"], count=1, pause=0)
            process.popen.stdin.close()
            process.popen.wait(60)
        finally:
            elapsed = time.perf_counter() - started
            process.kill()
        check(answer, "2")
        self.measured[name].cold.append(elapsed * 1e6)

    def cpu(self, names):
        for program, code in self.options.programs.items():
            for name in names:
                measured = self.measured[name]
                failures = measured.failures
                late = sum(reason.startswith("no answer") for reason in failures.values())
                if late >= 3 and program not in measured.cpu and f"cpu {program}" not in failures:
                    failures[f"cpu {program}"] = "not tried: three others gave no answer"
                self.attempt(
                    name,
                    f"cpu {program}",
                    lambda name=name, program=program, code=code: self.cpu_of(name, program, code),
                )

    def cpu_of(self, name, program, code):
        process = self.processes[name]
        measured = self.measured[name]
        # One session for all programs and rounds: engines that compile in steps get warm.
        if name not in self.warm:
            process.ask(what="open", sessions=1, code="x = 0")
            self.warm.add(name)
        before = process.cpu_seconds()
        try:
            answer = process.ask(what="step", code=code, count=1, timeout=self.options.cpu_timeout)
        except Failed:
            self.end_session(name)
            raise
        seconds = process.cpu_seconds() - before
        try:
            check(answer, self.expected[program])
        except Failed:
            self.end_session(name)
            measured.cpu.pop(program, None)
            raise
        wall = answer["micros"][0] / 1e6
        measured.cpu[program] = min(seconds, measured.cpu.get(program, math.inf))
        measured.wall[program] = min(wall, measured.wall.get(program, math.inf))

    def end_session(self, name):
        """Drops a session in which a program failed, and its process if that does not answer."""
        self.warm.discard(name)
        if self.processes[name].popen:
            with contextlib.suppress(Failed):
                self.processes[name].ask(what="close")

    def language(self, names):
        for name in names:
            self.end_session(name)
            measured = self.measured[name]
            for programs, results in (
                (FEATURES, measured.features),
                (LIBRARIES, measured.libraries),
            ):
                for feature, code in programs.items():
                    results[feature] = None
                    try:
                        answer = self.processes[name].ask(
                            what="fresh", code=code, count=1, pause=0, timeout=60
                        )
                        if not answer["ok"]:
                            results[feature] = last_line(answer["error"]) or "failed"
                    except Failed as reason:
                        results[feature] = str(reason)


def compare(names, options):
    """Installs, starts and measures peers by name; returns what each gave, and who is missing."""
    processes, facts, missing = {}, {}, {}
    try:
        for name in names:
            try:
                processes[name] = Process(name, PEERS[name].command(options))
            except Missing as reason:
                missing[name] = str(reason)
        for name, process in list(processes.items()):
            note(f"{name}: starting")
            try:
                # The first start ever of a WebAssembly peer may compile for minutes.
                facts[name] = process.ask(what="describe", timeout=900)
            except Failed as reason:
                missing[name] = str(reason)
                processes.pop(name).close()
        for name, reason in missing.items():
            note(f"{name}: missing: {reason}")
        comparison = Comparison(processes, options)
        for name, measured in comparison.measured.items():
            measured.facts = facts[name]
        comparison.run()
        return comparison.measured, missing
    finally:
        for process in processes.values():
            process.close()
