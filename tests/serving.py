"""A service in a process of its own, on a free loopback port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
