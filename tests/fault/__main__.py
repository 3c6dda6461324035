"""Command line of the fault suite."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import machine
from tests.fault.suite import faults

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    known = {fault.name: fault for fault in faults()}
    listed = "\n".join(f"  {name:24}{fault.target}" for name, fault in known.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.fault",
        description="Tries faults on repositories of its own and prints what happened.",
        epilog=f"faults:\n{listed}\n\nexample: python -m tests.fault --full kill-push",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to try; all by default")
    parser.add_argument("--full", action="store_true", help="at the size of the bar; figures are recorded")
    parser.add_argument("--seed", type=int, help="repeat an earlier run")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"no fault {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    missed = 0
    for name in options.names or known:
        fault = known[name]
        print(f"{name} (seed {seed}): {fault.target}", flush=True)
        began = time.monotonic()
        result: dict[str, Any] = {"fault": name, "target": fault.target, "seed": seed, "full": options.full}
        try:
            with tempfile.TemporaryDirectory(prefix="kvgraft-fault-") as directory:
                result["figures"] = fault(Path(directory), seed, full=options.full)
            result["held"] = True
        except AssertionError as error:
            result |= {"held": False, "missed": str(error)}
            missed += 1
        result["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps({k: v for k, v in result.items() if k not in ("fault", "target", "seed")}), flush=True)
        if options.full:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{name}.json").write_text(json.dumps(result | {"machine": machine()}, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
