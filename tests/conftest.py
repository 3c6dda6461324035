"""Fixtures that several test files share."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models run several times faster on one thread than on two; real ones ask for more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# The machines that run this are shared; how long an example takes says nothing.
settings.register_profile("kvgraft", deadline=None)
settings.load_profile("kvgraft")


@pytest.fixture(scope="session")
def matrix() -> list[str]:
    """The graft points that were compared, one line each."""
    return []
