"""The first Python code of the guest, linked into the module: makes imports work and loads the boot modules.

`boot` reads one line of JSON from file descriptor 0, `{"modules": {name: source}, "wheels": [[file name, size]]}`, imports
each module, and installs the wheels, whose bytes follow. `hide` then takes the modules out of sight, so that a program's
`import unit_tests` fails as it would anywhere else.
"""

import sys
import _imp
import marshal
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


def boot():
    # The path-based finder comes last: files of a program cannot stand in for the standard library, by mistake or not.
    from _frozen_importlib_external import FileFinder, PathFinder, SourceFileLoader

    sys.meta_path[:] = [_BootImporter, BuiltinImporter, FrozenImporter, StdlibImporter, PathFinder]
    sys.path_hooks.clear()
    sys.path_importer_cache.clear()

    import io
    import json
    import zipimport

    sys.path_hooks[:] = [zipimport.zipimporter, FileFinder.path_hook((SourceFileLoader, [".py"]))]

    with io.open(0, "rb", closefd=False) as stream:
        options = json.loads(stream.readline())
        _boot_sources.update(options["modules"])
        for name in _boot_sources:
            __import__(name)
        sys.modules["_wardian_wheels"].install(options.get("wheels", []), stream)


def hide():
    sys.meta_path.remove(_BootImporter)
    for name in [*_boot_sources, __name__, "_wardian_guest"]:
        sys.modules.pop(name, None)
    _boot_sources.clear()
