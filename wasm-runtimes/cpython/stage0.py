"""The first Python code of the guest, linked into the module: makes imports work and loads the boot modules.

`boot` reads one JSON object from file descriptor 0, `{"modules": {name: source}}`, and imports each module. `hide` then
takes them out of sight, so that a program's `import unit_tests` fails as it would anywhere else.
"""

import sys
import _imp
import marshal
import posix
from _frozen_importlib import BuiltinImporter, FrozenImporter, ModuleSpec  # `importlib` itself is in the blob

import _wardian_guest

_index_bytes, _code = _wardian_guest.stdlib()
_index = marshal.loads(_index_bytes)
_boot_sources = {}


class StdlibImporter:
    """Finds and loads the standard library in the blob linked into the module."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        entry = _index.get(name)
        if entry is None:
            return None
        _, _, is_package, file_name = entry
        spec = ModuleSpec(name, cls, origin=file_name, is_package=is_package)
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations.append(file_name.removesuffix("/__init__.py"))
        return spec

    @staticmethod
    def create_module(spec):
        return None

    @classmethod
    def exec_module(cls, module):
        exec(cls.get_code(module.__name__), module.__dict__)

    @staticmethod
    def get_code(name):
        offset, length, _, _ = _index[name]
        return marshal.loads(_code[offset:offset + length])

    @staticmethod
    def get_source(name):
        return None

    @staticmethod
    def is_package(name):
        return _index[name][2]


class _BootImporter:
    """Finds and loads the boot modules, before the snapshot only."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return ModuleSpec(name, cls) if name in _boot_sources else None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        name = module.__name__
        exec(compile(_boot_sources[name], f"{name}.py", "exec", dont_inherit=True), module.__dict__)


def _read_all(fd):
    chunks = []
    while chunk := posix.read(fd, 1 << 16):
        chunks.append(chunk)
    return b"".join(chunks)


def boot():
    # No path-based importer: it would only ask the host for files that do not exist.
    sys.meta_path[:] = [_BootImporter, BuiltinImporter, FrozenImporter, StdlibImporter]
    sys.path_hooks.clear()
    sys.path_importer_cache.clear()

    import json

    _boot_sources.update(json.loads(_read_all(0))["modules"])
    for name in _boot_sources:
        __import__(name)


def hide():
    sys.meta_path.remove(_BootImporter)
    for name in [*_boot_sources, __name__, "_wardian_guest"]:
        sys.modules.pop(name, None)
    _boot_sources.clear()
