"""What the sandbox does not have says so: the functions raise, and the modules' absence is explained.

Where natively an exception of the same kind is possible, programs meet that kind: OSError for processes and the network,
RuntimeError for threads, ModuleNotFoundError for modules.
"""

import _signal
import _socket
import _thread
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import types

_PROCESSES = "the sandbox has no processes"
_NETWORK = "the sandbox has no network"
_SIGNALS = "the sandbox has no signals but those that a program raises itself"
_TERMINAL = "the sandbox has no terminal"
_USERS = "the sandbox has no users"
_LIBRARIES = "the sandbox loads no native code"
_INSTALLING = "the sandbox installs no packages; they are added when its runtime is built"
_SCREEN = "the sandbox has no screen"

# Missing modules of the standard library, and of what usually comes with it.
_MODULES = {
    "_ctypes": _LIBRARIES,
    "_multiprocessing": _PROCESSES,
    "_posixsubprocess": _PROCESSES,
    "_ssl": _NETWORK,
    "_tkinter": _SCREEN,
    "ctypes.util": _LIBRARIES,
    "ctypes.wintypes": _LIBRARIES,
    "curses": _TERMINAL,
    "ensurepip": _INSTALLING,
    "fcntl": "the sandbox has no file locks and no devices",
    "grp": _USERS,
    "idlelib": _SCREEN,
    "mmap": "the sandbox maps no files",
    "multiprocessing": _PROCESSES,
    "pip": _INSTALLING,
    "pty": _TERMINAL,
    "pwd": _USERS,
    "readline": _TERMINAL,
    "resource": "a program's limits are set outside the sandbox",
    "syslog": "the sandbox has no system log",
    "termios": _TERMINAL,
    "tkinter": _SCREEN,
    "tty": _TERMINAL,
    "turtle": _SCREEN,
    "venv": _INSTALLING,
    "webbrowser": _SCREEN,
}


# Packages with native code that the science runtime has.
_IN_SCIENCE_RUNTIME = set("lxml matplotlib numpy pandas PIL scipy sklearn statsmodels".split())

_SCIENCE_NOTE = (
    "{} is in the sandbox's science runtime, not in this one: choose it with `--runtime science`, or "
    '`sandbox.runtime = "science"` in a run file; `wardian runtime build --runtime science` says how to get it'
)


class AbsentFinder:
    """Comes after every other finder, and explains why a module was not found."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        reason = _MODULES.get(name)
        if reason is not None:
            raise ModuleNotFoundError(f"No module named {name!r}: {reason}", name=name)
        # Programs ask for the spec of such a package to see whether it is there: only an import explains.
        if name in _IN_SCIENCE_RUNTIME and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            error = ModuleNotFoundError(f"No module named {name!r}", name=name)
            error.add_note(_SCIENCE_NOTE.format(name))
            raise error
        return None


def _raising(name, make_error):
    def absent(*args, **kwargs):
        raise make_error()

    absent.__name__ = absent.__qualname__ = name
    return absent


def _os_error(message):
    return lambda: OSError(errno.ENOTSUP, message)


def _put(module, names, make_error):
    for name in names.split():
        setattr(module, name, _raising(name, make_error))


# Sizes on this platform, which is what packages of pure Python ask ctypes for.
_C_TYPES = {
    "c_bool": 1, "c_byte": 1, "c_ubyte": 1, "c_char": 1, "c_short": 2, "c_ushort": 2, "c_int": 4, "c_uint": 4,
    "c_long": 4, "c_ulong": 4, "c_longlong": 8, "c_ulonglong": 8, "c_size_t": 4, "c_ssize_t": 4, "c_void_p": 4,
    "c_wchar": 4, "c_float": 4, "c_double": 8, "c_int8": 1, "c_uint8": 1, "c_int16": 2, "c_uint16": 2, "c_int32": 4,
    "c_uint32": 4, "c_int64": 8, "c_uint64": 8,
}  # fmt: skip


def _ctypes():
    """A `ctypes` that knows the sizes of C types, and says for all else that there is none."""
    module = types.ModuleType("ctypes", f"The sizes of C types; {_LIBRARIES}.")
    for name, size in _C_TYPES.items():
        setattr(module, name, type(name, (), {"_size": size, "__module__": "ctypes"}))

    def sizeof(c_type):
        size = getattr(c_type, "_size", None)
        if size is None:
            raise TypeError("this type has no size")
        return size

    def absent(name):
        raise AttributeError(f"module 'ctypes' has no attribute {name!r}: {_LIBRARIES}", name=name, obj=module)

    module.__path__ = []  # a package, whose modules AbsentFinder knows
    module.sizeof = sizeof
    module.__getattr__ = absent
    _put(module, "CDLL PyDLL", _os_error(_LIBRARIES))
    return module


def install():
    """Replaces what cannot work. Runs before the snapshot, once the standard library is loaded."""
    no_processes = _os_error(_PROCESSES)
    _put(
        os,
        "execl execle execlp execlpe execv execve execvp execvpe fork forkpty kill killpg pipe popen posix_spawn "
        "posix_spawnp spawnl spawnle spawnlp spawnlpe spawnv spawnve spawnvp spawnvpe system wait waitpid",
        no_processes,
    )
    _put(subprocess.Popen, "__init__", no_processes)
    # A Popen that was never made has nothing to wait for at its end.
    subprocess.Popen.__del__ = lambda self, **kwargs: None

    no_threads = lambda: RuntimeError("can't start new thread: the sandbox has no threads")
    _put(_thread, "start_new_thread start_joinable_thread start_new", no_threads)
    threading._start_new_thread = _thread.start_new_thread
    threading._start_joinable_thread = _thread.start_joinable_thread

    no_network = _os_error(_NETWORK)
    _put(
        _socket,
        "getaddrinfo gethostbyaddr gethostbyname gethostbyname_ex getnameinfo getservbyname socketpair",
        no_network,
    )
    _put(socket, "gethostbyaddr gethostbyname gethostbyname_ex getnameinfo getservbyname socketpair", no_network)
    _put(socket.socket, "__init__", no_network)
    _socket.gethostname = socket.gethostname = lambda: "localhost"
    # It looks at what `__init__` would have set.
    socket.socket.__repr__ = lambda self: "<socket.socket [closed]>"
    socket.socket.__del__ = lambda self: None

    no_signals = _os_error(_SIGNALS)
    for module in (_signal, signal):
        _put(module, "alarm pause setitimer sigwait", no_signals)

    sys.modules["ctypes"] = _ctypes()
    sys.meta_path.append(AbsentFinder)
