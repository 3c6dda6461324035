"""Bytes by key, and nothing else: what they mean is the domain's, who may read them the services'."""

from repo_service.storage.local import LocalStore
from repo_service.storage.memory import MemoryStore
from repo_service.storage.s3 import S3Store, parse_s3_url
from repo_service.storage.store import Store

__all__ = ["LocalStore", "MemoryStore", "S3Store", "Store", "parse_s3_url"]
