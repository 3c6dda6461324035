"""A short version of every fault; ``python -m tests.fault --full`` runs them at their full size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.suite import Fault, faults


@pytest.mark.parametrize("fault", list(faults()), ids=lambda fault: fault.name)
def test_fault(fault: Fault, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if fault.name.startswith("s3-"):
        # It is shared with the other tests.
        request.getfixturevalue("s3")
    fault(tmp_path, seed=1, full=False)
