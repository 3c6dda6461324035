"""Whether the store and the index answer, asked so that neither can hold up whoever asks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from repo_service.domain.errors import KvgraftError, Unavailable
from repo_service.services.repository import LocalRepository

DEADLINE_S = 2.0
REUSED_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a probe found.

    Parameters
    ----------
    problem
        What is wrong, None if nothing is.
    seconds
        How long the answer took, or has been waited for.
    value
        What the probe gave, None if it failed.
    """

    problem: str | None
    seconds: float
    value: int | None = None


class Probe:
    """Asks one thing at a time, on a thread of its own, which a hanging disk or database may keep for ever.

    An answer is reused for a second. While one is overdue nothing new is asked.
    """

    def __init__(self, ask: Callable[[], int | None]) -> None:
        self._ask = ask
        self._began = 0.0
        self._asked: Future[Answer] | None = None
        self._last: tuple[float, Answer] | None = None

    async def answer(self) -> Answer:
        asked = self._asked
        if asked is None:
            if self._last is not None and time.monotonic() - self._last[0] < REUSED_S:
                return self._last[1]
            self._asked = asked = Future()
            self._began = time.monotonic()
            threading.Thread(target=self._run, args=(asked,), name="kvgraft-probe", daemon=True).start()
        waited = time.monotonic() - self._began
        if waited < DEADLINE_S:
            await asyncio.wait([asyncio.wrap_future(asked)], timeout=DEADLINE_S - waited)
        if asked.done():
            return asked.result()
        return Answer(f"gives no answer within {DEADLINE_S:g} s", time.monotonic() - self._began)

    def _run(self, asked: Future[Answer]) -> None:
        problem, value = None, None
        try:
            value = self._ask()
        except KvgraftError as error:
            problem = f"fails: {error.code}"
            _log.warning("a probe failed: %s: %s", error.code, error.message)
        except Exception:
            problem = f"fails: {KvgraftError.code}"
            _log.exception("a probe failed")
        ended = time.monotonic()
        answer = Answer(problem, ended - self._began, value)
        self._last, self._asked = (ended, answer), None
        asked.set_result(answer)


class Readiness:
    """Whether a repository can work."""

    def __init__(self, repository: LocalRepository) -> None:
        self._probes = {"store": Probe(repository.probe_store), "index": Probe(repository.probe_index)}

    async def answers(self) -> dict[str, Answer]:
        """What the store and the index answer, within `DEADLINE_S`."""
        found = await asyncio.gather(*(probe.answer() for probe in self._probes.values()))
        return dict(zip(self._probes, found, strict=True))

    async def check(self) -> None:
        """Raises
        ------
        Unavailable
            Names what is down; the log has the reason.
        """
        down = {part: answer.problem for part, answer in (await self.answers()).items() if answer.problem}
        if down:
            listed = "; ".join(f"the {part} {problem}" for part, problem in down.items())
            raise Unavailable(f"not ready: {listed}", down=sorted(down))
