"""A peer's measuring process, and what it used."""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path


class Failed(Exception):
    """A peer could not do what was asked."""


class Unsupported(Failed):
    """A peer has no such thing."""


class Process:
    """A peer's measuring process; started on demand, and anew after a time-out."""

    def __init__(self, name, command):
        self.name = name
        self.command = command
        self.popen = None
        self.errors = tempfile.TemporaryFile()

    def start(self):
        self.popen = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
        )

    def ask(self, timeout=120.0, **request):
        """Returns the answer; raises Failed with the reason if there is none."""
        if self.popen is None:
            self.start()
        try:
            self.popen.stdin.write(json.dumps(request).encode() + b"\n")
            self.popen.stdin.flush()
            answer = json.loads(self.read_line(timeout))
        except (OSError, ValueError) as error:
            self.kill()
            raise Failed(f"its process ended: {self.last_error()}") from error
        if "unsupported" in answer:
            raise Unsupported(answer["unsupported"])
        if "failed" in answer:
            raise Failed(last_line(answer["failed"]))
        return answer

    def read_line(self, timeout):
        line = b""
        give_up = time.monotonic() + timeout
        output = self.popen.stdout.fileno()
        while not line.endswith(b"\n"):
            left = give_up - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                self.kill()
                raise Failed(f"no answer in {timeout:.0f} s")
            part = os.read(output, 1 << 16)
            if not part:
                break
            line += part
        return line

    def last_error(self):
        self.errors.seek(0)
        return last_line(self.errors.read().decode(errors="replace"))

    def kill(self):
        if self.popen:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
            self.popen.stdin.close()
            self.popen.stdout.close()
            self.popen = None

    def close(self):
        """Lets it end by itself, then makes sure."""
        if self.popen:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self.popen.stdin.close()
                self.popen.wait(10)
            self.kill()

    def tree(self):
        children = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(path.parent.name))
        found, todo = [], [self.popen.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            todo += children.get(pid, [])
        return found

    def memory(self):
        """Returns the proportional set size of the process and its descendants, in bytes."""
        total = 0
        for pid in self.tree():
            try:
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
            except OSError:
                continue
        return total

    def cpu_seconds(self):
        total = 0
        for pid in self.tree():
            try:
                # The CPU-time clock of another process, ended threads included.
                total += time.clock_gettime_ns(~pid << 3 | 2)
            except OSError:
                continue
        return total / 1e9


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
