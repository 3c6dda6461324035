"""``kvgraft`` commands as processes of their own, which end when this one does, however it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, Self

from repo_service.cli.errors import INTERNAL, TRACEBACK_VARIABLE, CommandFailed
from repo_service.cli.main import main

_STOP_SECONDS = 20

# Settings that the user made for other repositories and services don't reach the commands.
_PREFIX = "KVGRAFT_"
_INHERITED = {"KVGRAFT_CACHE", "KVGRAFT_WHEELS", TRACEBACK_VARIABLE}
# What they pull comes from where it is said to come from.
_WITHOUT_CACHE = {"KVGRAFT_CACHE_DIR": "off"}


class Children:
    """Starts commands with ``--json``; on exit those that still run are stopped.

    Their standard input is a pipe that this process holds open, so that its end reaches them even
    where this process was killed.
    """

    def __init__(self) -> None:
        self._lifeline, self._held = os.pipe()
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._running:
            child.terminate()
        os.close(self._held)
        os.close(self._lifeline)
        for child in self._running:
            try:
                child.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            for stream in (child.stdout, child.stderr):
                if stream is not None:
                    stream.close()

    def ask(self, *args: str) -> Any:
        """Run a command to its end; returns its result.

        Raises
        ------
        CommandFailed
            With the command's own code, message and exit code.
        """
        child = self._start(args, subprocess.PIPE)
        result, complaint = child.communicate()
        if child.returncode:
            raise _failure(args[0], child.returncode, complaint)
        return json.loads(result)

    def begin(self, *args: str, log: Path) -> Any:
        """Start a command that stays; returns the result it announces itself with.

        Raises
        ------
        CommandFailed
            If it ends before that.
        """
        with log.open("w") as complaints:
            child = self._start(args, complaints)
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise _failure(args[0], child.wait(), log.read_text())
        return json.loads(line)

    def _start(self, args: tuple[str, ...], stderr: int | IO[str]) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, *args, "--json"],
            stdin=self._lifeline,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith(_PREFIX) or k in _INHERITED} | _WITHOUT_CACHE,
        )
        self._running.append(child)
        return child


def _failure(command: str, exit_code: int, complaint: str) -> CommandFailed:
    """The error that a command wrote as the last line of its standard error."""
    last = complaint.strip().rpartition("\n")[2]
    try:
        error = json.loads(last)["error"]
        return CommandFailed(error["code"], f"{command}: {error['message']}", exit_code, **error["details"])
    except (ValueError, KeyError, TypeError):
        message = f"{command} ended with exit code {exit_code}: {last[:500] or 'it said nothing'}"
        return CommandFailed("internal_error", message, INTERNAL)


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(INTERNAL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main())
