"""kvgraft's adapter for transformers: deposit, graft and verify a model's state, byte for byte."""

from engine_adapter.run import Generation, Run
from engine_adapter.session import GraftSession
from engine_adapter.verify import VerifyReport
from repo_service.client import open_repository

__all__ = ["Generation", "GraftSession", "Run", "VerifyReport", "open_repository"]
