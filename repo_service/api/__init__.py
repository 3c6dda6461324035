"""HTTP translation, and nothing else: requests to calls of a repository, answers and errors to JSON or octets."""

from repo_service.api.app import create_app
from repo_service.api.server import serve

__all__ = ["create_app", "serve"]
