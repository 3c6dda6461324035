"""kvgraft's adapter for transformers: deposit, graft and verify a model's state, byte for byte."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_adapter.joint import JointSession
    from engine_adapter.joint_settings import JointSettings
    from engine_adapter.paged_attention import paged_attention
    from engine_adapter.run import Generation, Run
    from engine_adapter.session import GraftSession
    from engine_adapter.verify import VerifyReport
    from repo_service.client import open_repository

__all__ = [
    "Generation",
    "GraftSession",
    "JointSession",
    "JointSettings",
    "Run",
    "VerifyReport",
    "open_repository",
    "paged_attention",
]

_HOMES = {
    "Generation": "engine_adapter.run",
    "GraftSession": "engine_adapter.session",
    "JointSession": "engine_adapter.joint",
    "JointSettings": "engine_adapter.joint_settings",
    "Run": "engine_adapter.run",
    "VerifyReport": "engine_adapter.verify",
    "open_repository": "repo_service.client",
    "paged_attention": "engine_adapter.paged_attention",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line lists the engine's commands without loading torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
