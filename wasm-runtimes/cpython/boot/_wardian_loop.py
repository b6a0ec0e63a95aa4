"""An asyncio event loop without sockets.

CPython's loops wake themselves through a socket pair, which WASI does not have. With no threads, no signals and no
sockets, nothing can happen to a loop from outside: all it ever waits for is its own next timer. So its selector sleeps.
"""

import errno
import time
from asyncio import base_events, events


class _Sleeper:
    """Stands for the selector: waits, and never has an event to report."""

    def select(self, timeout):
        if timeout is None:
            # Natively this would wait for ever.
            raise RuntimeError("deadlock: every task of the event loop is waiting and nothing can wake one")
        if timeout > 0:
            time.sleep(timeout)
        return ()


class EventLoop(base_events.BaseEventLoop):
    """The event loop behind `asyncio.run`: tasks, timers, queues, locks."""

    def __init__(self):
        super().__init__()
        self._selector = _Sleeper()

    def _process_events(self, event_list):
        pass

    def _write_to_self(self):
        pass

    async def _make_subprocess_transport(self, *args, **kwargs):
        raise OSError(errno.ENOTSUP, "the sandbox has no processes")

    def run_in_executor(self, executor, func, *args):
        """Runs `func` at once: there are no threads. The result is awaitable as usual."""
        self._check_closed()
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class EventLoopPolicy(events.BaseDefaultEventLoopPolicy):
    """Makes `EventLoop` the default of `asyncio.run` and `asyncio.new_event_loop`."""

    _loop_factory = EventLoop
