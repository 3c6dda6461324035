"""Documents that lie, and requests that nobody should send."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import requests
import schemathesis
import urllib3
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from pushing import offer
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from synthetic import artifact

from repo_service.client import open_repository
from repo_service.domain.errors import KvgraftError
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord
from repo_service.domain.repository import Push, Repository
from repo_service.services.opening import open_local
from tests.fault._served import Served, service
from tests.fault.suite import Fault

_VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 255, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 1.5, float("inf"), "", "a", "\0"),
    *("x" * 5000, "\ud800", "\u202e", f"sha256:{'0' * 64}", f"blake3:{'0' * 64}", "sha256:", f"SHA256:{'A' * 64}"),
    *(
        [],
        {},
        [[]],
        [[]] * 1000,
        [None] * 100,
        {"": ""},
        {"a" * 200: "b"},
        {"class": "lossy", "codec": "a", "error": "b"},
    ),
]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in pairs:
        yield value, name
        yield from _places(item)


def _mutated(document: Any, rng: random.Random) -> Any:
    """A copy with a few values replaced, removed, added, moved or doubled."""
    value = copy.deepcopy(document)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = list(_places(value))
        if not places:
            break
        # Half of the time what an artifact says of itself, which is where a change may be valid.
        free = [place for place in places if place[1] in ("text", "annotations", "author", "parent", "exactness")]
        holder, name = rng.choice(free if free and rng.random() < 0.5 else places)
        match rng.randrange(6):
            case 0 | 1:
                holder[name] = copy.deepcopy(rng.choice(_VALUES))
            case 2:
                del holder[name]
            case 3 if isinstance(holder, dict):
                holder[rng.choice(["", "more", "version", "\0", "k" * 300, "class"])] = copy.deepcopy(
                    rng.choice(_VALUES)
                )
            case 3:
                holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice([*holder, *_VALUES])))
            case 4 if isinstance(holder[name], int):
                holder[name] += rng.choice([-1, 1, 2**32, -(2**64)])
            case 4 if isinstance(holder[name], str) and holder[name]:
                at = rng.randrange(len(holder[name]))
                holder[name] = holder[name][:at] + rng.choice("0aZ:\u00e9\0") + holder[name][at + 1 :]
            case _:
                other, elsewhere = rng.choice(places)
                with suppress(KeyError, IndexError):
                    holder[name] = copy.deepcopy(other[elsewhere])
    return value


def _written(value: Any, rng: random.Random) -> bytes:
    """JSON, most of it canonical, some of it broken as text."""
    data = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    at = rng.randrange(len(data))
    depth = rng.choice([50, 70, 1000, 100_000])
    broken: list[Callable[[], bytes]] = [
        lambda: data.replace(b'"version":1', b'"version":1,"version":1'),
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: data[:at],
        lambda: data + rng.choice([b" ", b"\0", b"{}", b"\xff", data]),
        lambda: data.replace(b'"text":', b'"text":' + b"[" * depth + b"]" * depth + b',"t":'),
        lambda: data.replace(b'"count":', b'"count":' + b"9" * rng.choice([18, 25, 5000])),
    ]
    turn = rng.randrange(40)
    return broken[turn]() if turn < len(broken) else data


class _Target:
    """A repository that fuzzed documents are pushed to."""

    def __init__(self, repository: Repository, commit: Callable[[Push, bytes], str | None]) -> None:
        self.repository = repository
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._commit = commit
        self._running: Push | None = None

    def try_manifest(self, data: bytes) -> None:
        if self._running is None:
            manifest, records, contents = artifact(range(20))
            self._running = self.repository.begin_push(manifest.fingerprint, "default")
            for digest in offer(self._running, manifest, records):
                self._running.put(digest, contents[digest])
        published = self.attempt(data, lambda: self._commit(self._running, data) if self._running else None)
        if published is None:
            return
        self._running = None
        self.counts["published"] += 1
        found = self.repository.manifest(published, "default")
        whole = found.data == data and self.repository.check(published, "default").ok
        if not whole or len(self.repository.records(found, "default")) != len(found.blocks):
            self.wrong.append(f"published, but does not read back: {data[:200]!r}")

    def attempt(self, what: object, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except KvgraftError as error:
            self.counts["refused"] += 1
            if error.code in ("internal_error", "repository_error", "service_error", "unavailable"):
                self.wrong.append(f"{error.code}: {error.message[:200]}")
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error} for {what!r}"[:400])
        return None


def fuzz(directory: Path, seed: int, *, count: int, examples: int, every: int) -> dict[str, Any]:
    rng = random.Random(seed)
    base, records, _ = artifact(range(20), annotations={"author": "someone"}, text="words")
    document = json.loads(base.data)
    figures: dict[str, Any] = {"manifests": count}
    wrong: list[str] = []
    with (
        open_local(f"file://{directory}/embedded", create=True) as local,
        service(directory / "served", directory / "log") as served,
        open_repository(served.url) as remote,
    ):
        pool = urllib3.PoolManager()

        def post(running: Push, data: bytes) -> str | None:
            answer = pool.request("POST", f"{served.url}/v1/pushes/{running.id}/commit", body=data, retries=False)
            if answer.status >= 500 or b"Traceback" in answer.data:
                wrong.append(f"commit answered {answer.status} to {data[:200]!r}")
            targets[1].counts[str(answer.status)] += 1
            return json.loads(answer.data)["id"] if answer.status == 201 else None

        targets = [_Target(local, lambda running, data: running.commit(Manifest.parse(data)).id), _Target(remote, post)]
        for turn in range(count):
            mutant = _mutated(document, rng)
            data = _written(mutant, rng)
            for target in targets:
                target.try_manifest(data)
                if turn % 5 == 0:
                    _try_begin(target, mutant, _mutated([json.loads(record.data) for record in records], rng))
        for target in targets:
            wrong += target.wrong
            if corrupt := target.repository.reindex().corrupt:
                wrong.append(f"a rebuild finds {corrupt[:3]} corrupt")
        figures |= {"embedded": dict(targets[0].counts), "http": dict(targets[1].counts)}
        figures["requests"] = _fuzz_operations(served, seed, examples, every, wrong)
        wrong += served.failures()
    assert not wrong, "; ".join(wrong[:5])
    return figures | {"tracebacks": 0, "5xx": 0}


def _try_begin(target: _Target, manifest: Any, records: Any) -> None:
    """Offer fuzzed records in a push that begins under a fuzzed fingerprint, or under a valid one."""
    for sections in (manifest.get("fingerprint"), artifact([1])[0].fingerprint.sections):
        running = target.attempt(sections, partial(_begin, target.repository, sections))
        if running is not None:
            target.attempt(records, partial(_offer, running, records))
            running.abort()


def _begin(repository: Repository, sections: Any) -> Push:
    return repository.begin_push(Fingerprint(sections), "default")


def _offer(running: Push, records: Any) -> list[str]:
    return running.offer([BlockRecord.from_json(record) for record in records])


def _fuzz_operations(served: Served, seed: int, examples: int, every: int, wrong: list[str]) -> dict[str, int]:
    """Requests that follow the OpenAPI document, and requests that break it, for every operation."""
    counts: Counter[str] = Counter()
    quiet = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    schema = schemathesis.openapi.from_url(f"{served.url}/v1/openapi.json")
    session = requests.Session()
    for operation in [*schema.get_all_operations()][seed % every :: every]:
        assert isinstance(operation, Ok)
        described = operation.ok()
        # A path's texts can't be made wrong: a search for such would try in vain.
        breakable = len(described.body) or len(described.query)
        for mode in (GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if breakable else [])):

            def ask(case: schemathesis.Case[Any]) -> None:
                try:
                    answer = case.call(session=session)
                except requests.RequestException as error:
                    counts[type(error).__name__] += 1
                    return
                counts[f"{answer.status_code // 100}xx"] += 1
                full = answer.status_code == 503 and "retry-after" in answer.headers
                if (answer.status_code >= 500 and not full) or b"Traceback" in answer.content:
                    wrong.append(f"{answer.status_code} for {case.as_curl_command()[:300]}")

            with suppress(Unsatisfiable):
                seeded(seed)(quiet(given(described.as_strategy(generation_mode=mode))(ask)))()
        counts["operations"] += 1
    return dict(sorted(counts.items()))


FAULTS = [
    Fault(
        "fuzz",
        "10,000 fuzzed manifests, and requests to every operation: 0 tracebacks, 0 5xx, what is published reads back",
        fuzz,
        short={"count": 40, "examples": 1, "every": 8},
        full={"count": 10_000, "examples": 100, "every": 1},
    ),
]
