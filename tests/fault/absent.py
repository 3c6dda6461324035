"""What is another namespace's, asked for by its very id: it must look like what is nowhere (I7)."""

from __future__ import annotations

import http.client
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pushing import push
from synthetic import artifact

from repo_service.domain.access import Scope
from repo_service.services.opening import open_local
from repo_service.services.repository import LocalRepository
from tests.fault._served import Served, service
from tests.fault.suite import Fault

OURS, THEIRS = "team-a", "team-b"

# Of each kind, as many of theirs as of those that are nowhere, so that caches favour neither.
_THINGS = 8
_WARMUP = 100

# The area under the curve of a guesser by time alone, 0.5 for one who knows nothing.
_AUC = 0.55

_CONTROL = "ours"


@dataclass(frozen=True)
class _Probe:
    """A request for something, by a name of theirs and by one that is nobody's."""

    method: str
    path: Callable[[str], str]
    theirs: list[str]
    absent: list[str]
    body: Callable[[str], bytes | None] = lambda _: None


def absent(directory: Path, seed: int, *, samples: int, timed: bool) -> dict[str, Any]:
    generator = random.Random(seed)
    root = directory / "repository"
    with open_local(f"file://{root}") as repository:
        probes = _filled(repository, generator)
        token = repository.create_access_token(Scope.ADMIN, [OURS]).token
    areas: dict[str, float] = {}
    figures: dict[str, Any] = {"samples": samples}
    wrong: list[str] = []
    with service(root, directory / "log", auth="tokens") as served:
        for name, probe in probes.items():
            theirs, nowhere, differing = _ask(served, token, probe, samples, generator)
            if name == _CONTROL:
                # That this one stands out shows that the others are not merely lost in noise.
                figures["control"] = round(_area(theirs, nowhere), 3)
                continue
            if differing:
                wrong.append(f"{name}: {differing[0]}")
            areas[name] = round(_area(theirs, nowhere), 3)
            if timed and abs(areas[name] - 0.5) > _AUC - 0.5:
                wrong.append(f"{name}: its time tells, with an area of {areas[name]}")
        wrong += served.failures()
    assert not wrong, "; ".join(wrong)
    return figures | {"auc": areas} if timed else figures


def _filled(repository: LocalRepository, generator: random.Random) -> dict[str, _Probe]:
    """A repository with things of ours and of theirs; the probes for theirs."""

    def digest(kind: str) -> str:
        return f"{kind}:{generator.randbytes(32).hex()}"

    def nowhere(make: Callable[[], str]) -> list[str]:
        return [make() for _ in range(_THINGS)]

    ours = artifact(range(40), seed=1)
    push(repository, ours, OURS)
    artifacts, chunks, tags, keys, pushes = [], [], [], [], []
    for number in range(_THINGS):
        made = artifact(range(1000 * (number + 1), 1000 * (number + 1) + 40), seed=number + 2)
        info, sent = push(repository, made, THEIRS)
        artifacts.append(info.id)
        chunks.append(sent[0])
        tags.append(f"their-{number}")
        keys.append(made[1][0].key)
        repository.set_tag(THEIRS, tags[-1], info.id)
        running = repository.begin_push(made[0].fingerprint, THEIRS)
        running.offer(made[1])
        pushes.append(running.id)
    base = f"/v1/namespaces/{OURS}"
    ids, no_chunks = nowhere(lambda: digest("sha256")), nowhere(lambda: digest("blake3"))
    no_pushes = nowhere(lambda: generator.randbytes(16).hex())
    no_keys = nowhere(lambda: digest("sha256"))
    one_chunk = dict(zip([*artifacts, *ids], [*chunks, *no_chunks], strict=True))
    return {
        _CONTROL: _Probe("GET", lambda x: f"{base}/artifacts/{x}", [ours[0].id], ids[:1]),
        "artifact": _Probe("GET", lambda x: f"{base}/artifacts/{x}", artifacts, ids),
        "manifest": _Probe("GET", lambda x: f"{base}/artifacts/{x}/manifest", artifacts, ids),
        "chunk": _Probe("GET", lambda x: f"{base}/artifacts/{x}/chunks/{one_chunk[x]}", artifacts, ids),
        "chunk of ours": _Probe("GET", lambda x: f"{base}/artifacts/{ours[0].id}/chunks/{x}", chunks, no_chunks),
        "tag": _Probe("GET", lambda x: f"{base}/artifacts/{x}", tags, [f"nones-{n}" for n in range(_THINGS)]),
        "push": _Probe("POST", lambda x: f"{base}/pushes/{x}/blocks", pushes, no_pushes, lambda _: b'{"records":[]}'),
        "chunk of a push": _Probe(
            "PUT", lambda x: f"{base}/pushes/{x}/chunks/{no_chunks[0]}", pushes, no_pushes, lambda _: bytes(1000)
        ),
        "end of a push": _Probe("DELETE", lambda x: f"{base}/pushes/{x}", pushes, no_pushes),
        "match": _Probe("POST", lambda _: f"{base}/match", keys, no_keys, lambda x: b'{"keys":["%b"]}' % x.encode()),
        "namespace": _Probe("GET", lambda x: f"/v1/namespaces/{x}/stats", [THEIRS], ["team-x"]),
    }


def _ask(
    served: Served, token: str, probe: _Probe, samples: int, generator: random.Random
) -> tuple[list[float], list[float], list[str]]:
    """Seconds that answers took, in an order of chance, for theirs and for what is nowhere; how answers differed."""
    connection = http.client.HTTPConnection(served.netloc, timeout=60)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    times: tuple[list[float], list[float]] = ([], [])
    answers: dict[tuple[Any, ...], str] = {}

    def ask(kind: int) -> None:
        name = generator.choice((probe.theirs, probe.absent)[kind])
        path = probe.path(name)
        began = time.perf_counter()
        connection.request(probe.method, path, probe.body(name), headers)
        answer = connection.getresponse()
        data = answer.read()
        times[kind].append(time.perf_counter() - began)
        text = data.decode()
        for part in path.split("/"):
            if part == name or ":" in part:
                # What was asked for is named in the answer.
                text = text.replace(part, "…")
        shown = sorted((k, v) for k, v in answer.getheaders() if k not in ("date", "content-length", "x-request-id"))
        answers.setdefault((answer.status, text, str(shown), len(data)), name)

    for _ in range(_WARMUP if samples > _WARMUP else 0):
        ask(generator.randrange(2))
    for taken in times:
        taken.clear()
    for _ in range(samples):
        first = generator.randrange(2)
        ask(first)
        ask(1 - first)
    connection.close()
    return *times, [] if len(answers) == 1 else [f"it is answered in {len(answers)} ways: {list(answers)[:3]}"]


def _area(first: list[float], second: list[float]) -> float:
    """The chance that one of the first took longer than one of the second."""
    ranked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks = sum(position for position, (_, kind) in enumerate(ranked, 1) if kind == 0)
    return (ranks - len(first) * (len(first) + 1) / 2) / (len(first) * len(second))


FAULTS = [
    Fault(
        "absent",
        "what another namespace has looks like what is nowhere: status, body, headers, and time to an area of 0.55",
        absent,
        short={"samples": 4, "timed": False},
        full={"samples": 2000, "timed": True},
    )
]
