"""What runs beside a test: threads until a block ends, and children that a process forks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def beside(work: Callable[[threading.Event], object], threads: int = 1) -> Iterator[None]:
    """Work in threads, which are told by an event that the block has ended; what they raise is raised then."""
    stop = threading.Event()
    with ThreadPoolExecutor(threads) as pool:
        working = [pool.submit(work, stop) for _ in range(threads)]
        try:
            yield
        finally:
            stop.set()
        for one in working:
            one.result()


def forked(work: Callable[[], object], seconds: int) -> int:
    """The exit code of a child that works: 0, 1 if it raised, or less than 0 where it stood still for too long."""
    if (process := os.fork()) == 0:
        # Threads run on here: what is forked with them must not wait for one.
        code = 1
        try:
            signal.alarm(seconds)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
