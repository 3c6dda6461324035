"""Runs a program as ``python`` does, and tells of the requests to a service that broke and have to be sent again.

Usage: ``python retries.py FILE -m MODULE ARGUMENTS`` or ``python retries.py FILE SCRIPT ARGUMENTS``. A line
for each is added to FILE; where the last attempt breaks too, the program fails.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from repo_service.client.transport import LOST, Transport


def main() -> None:
    seen, *arguments = sys.argv[1:]
    attempt = Transport._try

    def tell(transport: Transport, method: str, path: str, *rest: Any) -> Any:
        try:
            return attempt(transport, method, path, *rest)
        except LOST as error:
            with Path(seen).open("a") as file:
                file.write(f"{method} {path}: {type(error).__name__} {error}\n")
            raise

    Transport._try = tell  # type: ignore[method-assign]
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
