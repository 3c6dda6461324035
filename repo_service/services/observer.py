"""Who is told what a repository does, so that it can be counted."""

from __future__ import annotations

from repo_service.domain.views import GarbageReport, ScrubReport


class Observer:
    """Told what a repository did, on whichever thread did it; this one takes no notice.

    The methods must neither raise nor wait.
    """

    def read(self, size: int) -> None:
        """A chunk of ``size`` bytes was read and verified."""

    def located(self, chunks: int) -> None:
        """A client was told where to fetch, or put, ``chunks`` chunks itself."""

    def stored(self, size: int) -> None:
        """A chunk of ``size`` bytes arrived and is durable."""

    def matched(self, asked: int, found: int) -> None:
        """Of ``asked`` blocks the first ``found`` are stored."""

    def begun(self) -> None:
        """A push was begun."""

    def offered(self, chunks: int, missing: int) -> None:
        """A push offered ``chunks`` chunks and has to send ``missing`` of them."""

    def committed(self) -> None:
        """A push was committed."""

    def diverged(self) -> None:
        """A push was refused for other bytes under an existing block key (I2)."""

    def damaged(self, found_by: str, count: int) -> None:
        """Stored objects did not verify (I3), found by a ``check``, a ``commit`` or a ``scrub``.

        What a reader meets is not told: it reaches the reader as an error.
        """

    def collected(self, report: GarbageReport, seconds: float) -> None:
        """Garbage was collected."""

    def scrubbed(self, report: ScrubReport, seconds: float) -> None:
        """Everything stored was read."""

    def failed(self, job: str) -> None:
        """A collection of garbage (``gc``) or a ``scrub`` ended with an error."""
