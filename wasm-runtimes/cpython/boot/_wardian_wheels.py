"""Unpacks wheels into the guest's file system, before the snapshot.

The files come from outside, so they are checked as such: pure Python only, no path out of the folder, nothing that claims
another version of Python, and no more than the file system holds.
"""

import email.parser
import importlib
import os
import posixpath
import shutil
import sys
import zipfile

import _wardian_guest

SITE_PACKAGES = "/lib/python3.13/site-packages"

_NATIVE = (".so", ".pyd", ".dylib", ".dll", ".a", ".o")


class WheelError(Exception):
    """Says what is wrong with a wheel."""


def _satisfies(specifiers):
    """Whether this Python fulfils a `Requires-Python` such as `>=3.8, !=3.9.*, <4`."""
    own = sys.version_info[:3]
    for specifier in filter(None, (part.strip() for part in specifiers.split(","))):
        operator = next((o for o in ("===", "~=", "==", "!=", "<=", ">=", "<", ">") if specifier.startswith(o)), None)
        if operator is None:
            raise WheelError(f"its Requires-Python is not understood: {specifiers}")
        text = specifier[len(operator):].strip()
        is_prefix = text.endswith(".*")
        try:
            wanted = tuple(int(part) for part in text.removesuffix(".*").split("."))
        except ValueError:
            raise WheelError(f"its Requires-Python is not understood: {specifiers}") from None
        padded = (wanted + (0, 0, 0))[:max(3, len(wanted))]
        is_equal = own[:len(wanted)] == wanted if is_prefix else own == padded
        fulfilled = {
            "==": is_equal,
            "===": is_equal,
            "!=": not is_equal,
            "<": own < padded,
            ">": own > padded,
            "<=": own <= padded,
            ">=": own >= padded,
            "~=": own >= padded and own[:len(wanted) - 1] == wanted[:-1],
        }
        if not fulfilled[operator]:
            return False
    return True


def _target(name):
    """Where a member of the archive goes below SITE_PACKAGES, or None when it is not installed."""
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or ".." in parts or "" in parts[:-1] or "\0" in name:
        raise WheelError(f"it has a member with a path that leads elsewhere: {name!r}")
    if name.lower().endswith(_NATIVE):
        raise WheelError(f"it has native code, {name}; the sandbox runs pure Python only")
    if parts[0].endswith(".data"):
        return "/".join(parts[2:]) if parts[1:2] in (["purelib"], ["platlib"]) else None
    return name


def _metadata(archive, folder, file_name):
    try:
        text = archive.read(f"{folder}/{file_name}").decode("utf-8")
    except KeyError:
        raise WheelError(f"it has no {folder}/{file_name}") from None
    return email.parser.Parser().parsestr(text)


def _unpack(path):
    """Installs the wheel at `path` and returns the names of the packages and modules at its top."""
    with zipfile.ZipFile(path) as archive:
        folders = {name.split("/")[0] for name in archive.namelist()}
        info = [folder for folder in folders if folder.endswith(".dist-info")]
        if len(info) != 1:
            raise WheelError(f"it has {len(info)} .dist-info folders, not 1")
        wheel = _metadata(archive, info[0], "WHEEL")
        if not (wheel.get("Wheel-Version") or "").startswith("1."):
            raise WheelError(f"its Wheel-Version is {wheel.get('Wheel-Version')}, not 1.x")
        requires = _metadata(archive, info[0], "METADATA").get("Requires-Python")
        if requires is not None and not _satisfies(requires):
            raise WheelError(f"it requires Python {requires}, this is {sys.version.split()[0]}")
        tops = set()
        for member in archive.infolist():
            target = _target(member.filename)
            if not target or member.is_dir():
                continue
            destination = posixpath.join(SITE_PACKAGES, target)
            if os.path.exists(destination):
                raise WheelError(f"another wheel has installed {target} before")
            os.makedirs(posixpath.dirname(destination), exist_ok=True)
            with archive.open(member) as source, open(destination, "wb") as file:
                shutil.copyfileobj(source, file)
            top, _, rest = target.partition("/")
            if rest == "__init__.py":
                tops.add(top)
            elif not rest and top.endswith(".py"):
                tops.add(top.removesuffix(".py"))
        return sorted(tops)


def install(wheels, stream):
    """Installs the wheels, whose bytes follow each other in `stream`, and imports them.

    `wheels` are (file name, size). Exits with a message that names the file when one cannot be used.
    """
    if not wheels:
        return
    os.makedirs(SITE_PACKAGES)
    modules = []
    name = activity = ""
    try:
        for name, size in wheels:
            activity = "it cannot be unpacked: "
            path = "/tmp/wheel"
            with open(path, "wb") as file:
                while size > 0 and (chunk := stream.read(min(size, 1 << 16))):
                    file.write(chunk)
                    size -= len(chunk)
            modules += [(name, module) for module in _unpack(path)]
            os.unlink(path)
        importlib.invalidate_caches()
        for name, module in modules:
            activity = f"importing `{module}` failed: "
            importlib.import_module(module)
    except WheelError as error:
        sys.exit(f"{name}: {error}")
    except BaseException as error:
        sys.exit(f"{name}: {activity}{type(error).__name__}: {error}")
    _wardian_guest.seal("/lib")
