#!/usr/bin/env python3
"""Does what the tutorials say: runs the shell blocks of each page of docs/tutorials in order, in an empty folder.

    scripts/check_tutorials.py target/release/wardian [PAGE...]

Each page is one session of bash that ends at the first command that fails. Blocks marked `shell` rather than `sh` need
what the gate has not, such as a GPU or a cluster, and are only shown.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 900


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    program = pathlib.Path(sys.argv[1]).resolve(strict=True)
    pages = [pathlib.Path(page) for page in sys.argv[2:]]
    pages = pages or sorted((ROOT / "docs/tutorials").glob("*.md"))
    for page in pages:
        blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        if not blocks:
            sys.exit(f"{page}: there is nothing to run")
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(program, pathlib.Path(folder) / "wardian")
            work = pathlib.Path(folder) / "work"
            work.mkdir()
            variables = dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}")
            started = time.monotonic()
            script = "set -euxo pipefail\n" + "\n".join(blocks)
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=work,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
            seconds = time.monotonic() - started
            if done.returncode != 0:
                sys.exit(f"{done.stdout}\n{page.name}: exit code {done.returncode}")
            print(f"{page.name}: {len(blocks)} blocks in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
