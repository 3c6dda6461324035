"""SQL only: what is published, what is being pushed, and where to find it. No bytes of state pass through here."""

from repo_service.index.entry import Entry
from repo_service.index.index import Index
from repo_service.index.pushes import Offered, PushRow
from repo_service.index.rebuild import Rebuilt

__all__ = ["Entry", "Index", "Offered", "PushRow", "Rebuilt"]
