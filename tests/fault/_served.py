"""A service in a process of its own, seen from outside."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

MIB = 2**20

_PROJECT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Served:
    """A service in a process of its own, seen from outside."""

    url: str
    pid: int
    log: Path

    @property
    def netloc(self) -> str:
        return urlsplit(self.url).netloc

    def connect(self) -> socket.socket:
        host, _, port = self.netloc.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def memory(self, field: str = "VmRSS") -> int:
        """Bytes of its memory now, or at most so far (``VmHWM``)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))

    def forget_peak(self) -> None:
        """Let ``VmHWM`` begin again at what it is now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def tracebacks(self) -> int:
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")

    def failures(self) -> list[str]:
        """The first lines of the log that tell of what should not happen."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if re.match(r"[A-Za-z_.]*(Error|Exception)\b", line)][:5]


@contextmanager
def service(root: Path, log: Path, **settings: object) -> Iterator[Served]:
    """Serve the repository at ``root`` under ``settings``; what the process says on standard error is in ``log``."""
    command = [sys.executable, "-m", "repo_service.cli", "serve", "--repo", f"file://{root}", "--port", "0", "--json"]
    names = {f"KVGRAFT_{name.upper()}": str(value) for name, value in settings.items()}
    environment = {**os.environ, "PYTHONPATH": str(_PROJECT), **names}
    with (
        log.open("ab") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            yield Served(json.loads(line)["url"], process.pid, log)
        finally:
            process.terminate()
            process.wait(60)


def settled(what: Callable[[], bool], seconds: float = 15.0) -> bool:
    """True as soon as ``what()`` is; False if it is not for so long."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
