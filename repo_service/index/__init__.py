"""SQL only: what is published, what is being pushed, and where to find it. No bytes of state pass through here."""

from repo_service.index.damage import PublishedChunk
from repo_service.index.entry import Entry
from repo_service.index.index import Index
from repo_service.index.orphans import Objects
from repo_service.index.pushes import Offered, PushRow
from repo_service.index.rebuild import Rebuilt, Unkept
from repo_service.index.reclaim import Reclaimable
from repo_service.index.retention import LetGo
from repo_service.index.unsettled import DIVERGENCE, ENTRY, TAG, Noted, Settled

__all__ = [
    "DIVERGENCE",
    "ENTRY",
    "TAG",
    "Entry",
    "Index",
    "LetGo",
    "Noted",
    "Objects",
    "Offered",
    "PublishedChunk",
    "PushRow",
    "Rebuilt",
    "Reclaimable",
    "Settled",
    "Unkept",
]
