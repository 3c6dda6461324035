"""A service in a process of its own, on a free loopback port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from repo_service.client import open_repository
from repo_service.domain.repository import Repository


@contextmanager
def served(root: Path | str) -> Iterator[str]:
    """Serve the repository in a directory, or at a URL; gives the service's URL."""
    url = root if isinstance(root, str) else f"file://{root}"
    command = [sys.executable, "-m", "repo_service.cli", "serve", "--repo", url, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy()) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def reached(how: str, url: str) -> Iterator[Repository]:
    """A repository opened in this process (``embedded``) or through a service of its own (``service``)."""
    with ExitStack() as stack:
        if how == "service":
            url = stack.enter_context(served(url))
        yield stack.enter_context(open_repository(url))
