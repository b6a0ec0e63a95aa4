"""Starts `wardian serve`, or another command that serves, on a free port."""

import contextlib
import os
import re
import signal
import subprocess


@contextlib.contextmanager
def served(binary, *arguments, command="serve"):
    """Yields the server's address and its process; it must end by itself when asked to."""
    server = subprocess.Popen(
        [binary, command, "--listen", "127.0.0.1:0", *arguments],
        env={**os.environ, "NO_COLOR": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            found = re.search(r"at (http://\S+)", line)
            if found:
                break
        else:
            raise SystemExit(f"the server ended with status {server.wait()}: {''.join(said)}")
        yield found[1], server
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, "the server did not end well"
    finally:
        server.kill()
