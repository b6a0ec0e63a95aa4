"""Compiles the standard library for the guest. Run by the native Python of exactly the guest's version.

usage: pack_stdlib.py LIB SYSCONFIGDATA STAGE0 OUT

Writes into OUT: `stdlib.code`, the marshalled code objects one after the other; `stdlib.index`, a marshalled dict from
module name to (offset, length, is package, file name); and `early.NAME`, single code objects of the modules that must
exist before the guest's finder does.
"""

import marshal
import sys
from pathlib import Path

# Where the guest believes its library to be. No such directory exists there; it shows in tracebacks and `__file__`.
GUEST_LIB = "/lib/python3.13"

EARLY = ("encodings", "encodings.aliases", "encodings.utf_8")

# Of no use in the guest: tests, installers, graphics, and what only wraps an extension module or an operating-system
# service that is not there. `_pyrepl` stays: `help` takes its pager from it.
LEFT_OUT = {
    "__phello__", "ctypes", "curses", "ensurepip", "idlelib", "lib2to3", "msilib", "multiprocessing",
    "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo", "venv", "wsgiref", "xmlrpc",
    "__hello__.py", "_aix_support.py", "_android_support.py", "_apple_support.py", "_ios_support.py", "_osx_support.py",
    "antigravity.py", "pty.py", "tty.py", "turtle.py", "webbrowser.py",
}


def modules(directory: Path, prefix: str = ""):
    """Yields (module name, path, is package) for everything under `directory` that is shipped, in a fixed order."""
    for path in sorted(directory.iterdir()):
        if path.name in LEFT_OUT:
            continue
        if path.is_dir():
            if (path / "__init__.py").exists():
                yield f"{prefix}{path.name}", path / "__init__.py", True
                yield from modules(path, f"{prefix}{path.name}.")
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield f"{prefix}{path.stem}", path, False


def compiled(source: bytes, file_name: str) -> bytes:
    return marshal.dumps(compile(source, file_name, "exec", dont_inherit=True, optimize=0))


def main() -> None:
    lib, sysconfigdata, stage0, out = (Path(argument) for argument in sys.argv[1:])
    index: dict[str, tuple[int, int, bool, str]] = {}
    code = bytearray()

    def add(name: str, source: bytes, is_package: bool, file_name: str) -> bytes:
        marshalled = compiled(source, file_name)
        index[name] = (len(code), len(marshalled), is_package, file_name)
        code.extend(marshalled)
        return marshalled

    for name, path, is_package in modules(lib):
        marshalled = add(name, path.read_bytes(), is_package, f"{GUEST_LIB}/{path.relative_to(lib)}")
        if name in EARLY:
            (out / f"early.{name}").write_bytes(marshalled)
    add(sysconfigdata.stem, sysconfigdata.read_bytes(), False, f"{GUEST_LIB}/{sysconfigdata.name}")

    (out / "early._wardian_stage0").write_bytes(compiled(stage0.read_bytes(), "_wardian_stage0.py"))
    (out / "stdlib.code").write_bytes(code)
    (out / "stdlib.index").write_bytes(marshal.dumps(index))
    print(f"{len(index)} modules, {len(code)} bytes of code")


main()
