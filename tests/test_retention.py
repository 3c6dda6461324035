"""Retention and quotas: rules let go of what they name and of nothing else, and pushes stay within their quota."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from places import INSIDE, Place
from pushing import Artifact, offer, push, writing_to_index
from pydantic import ValidationError
from sqlalchemy import update
from synthetic import artifact, fingerprint

from repo_service.cli.main import main
from repo_service.client import open_repository
from repo_service.domain.errors import (
    ArtifactNotFound,
    DocumentCorrupt,
    InvalidInput,
    MalformedName,
    PushNotFound,
    QuotaExceeded,
    StorageFull,
)
from repo_service.domain.policy import Policy
from repo_service.domain.record import BlockRecord
from repo_service.domain.repository import Repository
from repo_service.domain.schedule import Step
from repo_service.domain.views import ArtifactInfo, GarbageReport
from repo_service.index import Index, uses
from repo_service.index.models import Artifact as ArtifactRow
from repo_service.services.documents import PolicyDocument, seal
from repo_service.services.opening import open_local
from repo_service.services.repository import LocalRepository
from repo_service.services.retention import Clock

pytestmark = pytest.mark.everywhere

MADE_WITH = fingerprint()
DAY = timedelta(days=1)
NS = "default"


@pytest.fixture
def local(root: Place) -> Iterator[LocalRepository]:
    with open_local(root.as_uri()) as opened:
        yield opened


def made(seed: int, count: int = 40, prefix: int = 0) -> Artifact:
    """An artifact; those with a ``prefix`` share the state of so many tokens."""
    shared = random.Random(0).choices(range(1000), k=prefix)
    return artifact(shared + random.Random(seed).choices(range(1000), k=count - prefix), MADE_WITH)


def size_of(what: Artifact) -> int:
    return sum(map(len, what[2].values()))


def turn_back(root: Place, column: str, ages: dict[str, timedelta], namespace: str = NS) -> None:
    """Set times of artifacts to so long ago."""
    with writing_to_index(root) as connection:
        for name, age in ages.items():
            at = int((datetime.now(UTC) - age).timestamp() * 1_000_000)
            digest = bytes.fromhex(name.removeprefix("sha256:"))
            row = update(ArtifactRow).where(ArtifactRow.digest == digest, ArtifactRow.namespace == namespace)
            assert connection.execute(row.values({column: at})).rowcount == 1


def left(repository: Repository, *infos: ArtifactInfo, namespace: str = NS) -> list[bool]:
    """Which of the artifacts are there; those are whole."""
    found = []
    for info in infos:
        try:
            found.append(repository.check(info.id, namespace).ok)
        except ArtifactNotFound:
            found.append(False)
    return found


def let_go(report: GarbageReport) -> list[str]:
    return [removed.name for removed in report.removed if removed.kind == "artifact"]


def files(root: Place, folder: str) -> set[str]:
    return {str(path.relative_to(root)) for path in (root / folder).rglob("*") if path.is_file()}


# Policies


def test_a_namespace_has_no_rules_until_it_is_given_some(repository: Repository) -> None:
    assert repository.policy(NS) == Policy()
    rules = Policy(keep_tags=["release-*"], max_age_s=60, max_idle_s=61, max_bytes=62, quota_bytes=63)
    assert repository.set_policy("team", rules) == rules
    assert repository.policy("team") == rules
    assert repository.policy(NS) == Policy()
    assert repository.set_policy("team", Policy()) == Policy()
    assert repository.policy("team") == Policy()


@pytest.mark.everywhere(but={"postgres": INSIDE, "s3": INSIDE})
def test_a_policy_survives_reindex_and_a_lost_index(root: Place) -> None:
    rules = Policy(keep_tags=[], max_bytes=0)
    with open_local(root.as_uri()) as repository:
        repository.set_policy(NS, rules)
        assert repository.reindex().corrupt == []
        assert repository.policy(NS) == rules
    for path in root.glob("index.sqlite*"):
        path.unlink()
    with open_local(root.as_uri()) as repository:
        assert repository.policy(NS) == rules


@pytest.mark.parametrize(
    "field",
    [
        {"max_age_s": 0},
        {"max_age_s": -1},
        {"max_age_s": 1.5},
        {"max_age_s": True},
        {"max_idle_s": "60"},
        {"max_idle_s": 2**70},
        {"max_bytes": -1},
        {"quota_bytes": 2**63},
        {"quota_bytes": float("nan")},
        {"keep_tags": None},
        {"keep_tags": "*"},
        {"keep_tags": [""]},
        {"keep_tags": ["a\n"]},
        {"keep_tags": ["../x"]},
        {"keep_tags": ["é"]},
        {"keep_tags": ["a" * 129]},
        {"keep_tags": ["*"] * 65},
        {"keep_forever": True},
    ],
)
def test_what_is_no_policy_is_refused(local: LocalRepository, field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Policy.model_validate(field)
    with pytest.raises(InvalidInput, match=next(iter(field))):
        local.set_policy(NS, Policy().model_copy(update=field))
    assert local.policy(NS) == Policy()


def test_a_policy_needs_a_namespace(repository: Repository) -> None:
    for namespace in ("", "..", "A", "a/b", "a" * 64, "x\n"):
        with pytest.raises(MalformedName):
            repository.policy(namespace)
        with pytest.raises(MalformedName):
            repository.set_policy(namespace, Policy(max_bytes=0))


def test_a_pattern_of_many_stars_takes_no_time() -> None:
    assert not Policy(keep_tags=["*a" * 60 + "b"]).pins(["a" * 128])


# Rules


def test_what_is_older_than_its_age_goes_and_the_rest_stays(repository: Repository, root: Place) -> None:
    old, young, pinned = (push(repository, made(seed))[0] for seed in range(3))
    repository.set_tag(NS, "kept", pinned.id)
    elsewhere, _ = push(repository, made(4), "elsewhere")
    turn_back(root, "created_at", {old.id: 3 * DAY, pinned.id: 3 * DAY})
    turn_back(root, "created_at", {elsewhere.id: 3 * DAY}, "elsewhere")
    turn_back(root, "last_used_at", {old.id: timedelta(0)})
    repository.set_policy(NS, Policy(max_age_s=2 * 86400))
    report = repository.collect_garbage(grace_s=0)
    assert let_go(report) == [old.id]
    assert report.artifacts == report.manifests == 1
    assert left(repository, old, young, pinned) == [False, True, True]
    assert left(repository, elsewhere, namespace="elsewhere") == [True]
    assert repository.collect_garbage(grace_s=0).removed == []


def test_what_is_not_used_goes_and_what_is_used_stays(repository: Repository, root: Place) -> None:
    never, long_ago, lately, matched = (push(repository, made(seed))[0] for seed in range(4))
    turn_back(root, "created_at", dict.fromkeys((never.id, long_ago.id, lately.id, matched.id), 30 * DAY))
    turn_back(root, "last_used_at", {long_ago.id: 8 * DAY, lately.id: 6 * DAY})
    match = repository.match(NS, [record.key for record in made(3)[1]])
    assert match is not None
    assert match.artifact_id == matched.id
    repository.set_policy(NS, Policy(max_idle_s=7 * 86400))
    report = repository.collect_garbage(grace_s=0)
    assert sorted(let_go(report)) == sorted([never.id, long_ago.id])
    assert left(repository, lately, matched) == [True, True]


def test_a_use_is_recorded_to_within_ten_minutes_and_the_rule_allows_for_that(
    repository: Repository, root: Place
) -> None:
    info, _ = push(repository, made(1))
    turn_back(root, "created_at", {info.id: DAY})
    turn_back(root, "last_used_at", {info.id: timedelta(minutes=9)})
    repository.manifest(info.id, NS)
    repository.set_policy(NS, Policy(max_idle_s=60))
    assert repository.collect_garbage(grace_s=0).artifacts == 0
    turn_back(root, "last_used_at", {info.id: timedelta(minutes=12)})
    assert repository.collect_garbage(grace_s=0).artifacts == 1


def test_the_least_recently_used_go_until_the_rest_fits(repository: Repository, root: Place) -> None:
    artifacts = [made(seed) for seed in range(5)]
    infos = [push(repository, one)[0] for one in artifacts]
    turn_back(root, "created_at", {info.id: 30 * DAY for info in infos})
    # From the longest unused: 3, 0 (never used), 2, 4, 1.
    turn_back(root, "last_used_at", {infos[i].id: days * DAY for i, days in ((3, 40), (2, 20), (4, 10), (1, 1))})
    repository.set_tag(NS, "kept", infos[0].id)
    repository.set_policy(NS, Policy(max_bytes=3 * size_of(artifacts[0])))
    report = repository.collect_garbage(grace_s=0)
    assert let_go(report) == [infos[3].id, infos[2].id]
    assert report.bytes == 2 * size_of(artifacts[0])
    assert left(repository, *infos) == [True, True, False, False, True]
    assert repository.stats(NS).unique_bytes <= 3 * size_of(artifacts[0])


def test_bytes_are_counted_once_however_many_artifacts_share_them(repository: Repository, root: Place) -> None:
    artifacts = [made(seed, count=64, prefix=48) for seed in range(1, 4)]
    infos = [push(repository, one)[0] for one in artifacts]
    turn_back(root, "last_used_at", {info.id: (9 - i) * DAY for i, info in enumerate(infos)})
    unique = repository.stats(NS).unique_bytes
    assert unique < sum(map(size_of, artifacts))
    repository.set_policy(NS, Policy(max_bytes=unique))
    assert repository.collect_garbage(grace_s=0).artifacts == 0
    repository.set_policy(NS, Policy(max_bytes=unique - 1))
    assert let_go(repository.collect_garbage(grace_s=0)) == [infos[0].id]
    assert left(repository, *infos) == [False, True, True], "what they shared stays"


def test_pinned_artifacts_stay_even_if_they_do_not_fit(repository: Repository) -> None:
    pinned, other = (push(repository, made(seed))[0] for seed in range(2))
    repository.set_tag(NS, "kept", pinned.id)
    repository.set_policy(NS, Policy(max_bytes=0))
    assert let_go(repository.collect_garbage(grace_s=0)) == [other.id]
    assert left(repository, pinned, other) == [True, False]


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["*"], [True, True, True, False]),
        (["release-*"], [True, False, False, False]),
        (["RELEASE-*"], [False, False, False, False]),
        (["x[0-9]", "*-2"], [False, False, True, False]),
        ([], [False, False, False, False]),
    ],
)
def test_tags_that_match_pin(local: LocalRepository, patterns: list[str], kept: list[bool]) -> None:
    infos = [push(local, made(seed))[0] for seed in range(4)]
    for info, tag in zip(infos, ("release-1", "draft", "x7"), strict=False):
        local.set_tag(NS, tag, info.id)
    local.set_policy(NS, Policy(keep_tags=patterns, max_bytes=0))
    local.collect_garbage(grace_s=0)
    assert left(local, *infos) == kept
    assert local.stats(NS).tags == sum(kept), "tags go with their artifacts"


def test_a_dry_run_lists_what_would_go_and_changes_nothing(repository: Repository, root: Place) -> None:
    artifacts = [made(seed, count=64, prefix=48) for seed in range(1, 5)]
    infos = [push(repository, one)[0] for one in artifacts]
    push(repository, artifacts[1], "elsewhere")
    running = repository.begin_push(MADE_WITH, NS)
    offer(running, artifacts[2][0], artifacts[2][1])
    repository.set_tag(NS, "kept", infos[3].id)
    repository.set_policy(NS, Policy(max_bytes=0))
    before = {name for folder in ("chunks", "blocks", "artifacts", "entries", "tags") for name in files(root, folder)}
    rehearsed = repository.collect_garbage(grace_s=0, dry_run=True)
    assert sorted(let_go(rehearsed)) == sorted(info.id for info in infos[:3])
    after = {name for folder in ("chunks", "blocks", "artifacts", "entries", "tags") for name in files(root, folder)}
    assert after == before
    assert left(repository, *infos) == [True] * 4
    report = repository.collect_garbage(grace_s=0)
    key = [(r.kind, r.name, r.namespace, r.reason) for r in rehearsed.removed]
    assert sorted(key, key=repr) == sorted(((r.kind, r.name, r.namespace, r.reason) for r in report.removed), key=repr)
    counts = {"dry_run", "removed"}
    assert report.model_dump(exclude=counts) == rehearsed.model_dump(exclude=counts)
    assert report.chunks > 0
    assert report.block_records > 0
    assert report.manifests == 2
    assert left(repository, infos[1], namespace="elsewhere") == [True]
    assert running.commit(artifacts[2][0]).id == infos[2].id


def test_each_artifact_let_go_has_a_line_with_its_rule(
    local: LocalRepository, root: Place, caplog: pytest.LogCaptureFixture
) -> None:
    old, idle, beyond = (push(local, made(seed))[0] for seed in range(3))
    turn_back(root, "created_at", {old.id: 9 * DAY, idle.id: 5 * DAY})
    local.set_policy(NS, Policy(max_age_s=6 * 86400, max_idle_s=86400, max_bytes=0))
    with caplog.at_level(logging.INFO, "kvgraft.audit"):
        local.collect_garbage(grace_s=0)
    lines = [json.loads(record.getMessage())["removed"] for record in caplog.records if record.name == "kvgraft.audit"]
    reasons = {line["name"]: line["reason"] for line in lines if line["kind"] == "artifact"}
    assert "max_age_s 518400" in reasons[old.id]
    assert "max_idle_s 86400" in reasons[idle.id]
    assert "max_bytes 0" in reasons[beyond.id]
    assert local.reindex().artifacts == 0, "their entries are gone from the store"


@pytest.mark.parametrize("event", ["tagged", "used", "policy taken away", "policy damaged", "deleted"])
def test_what_changes_between_choosing_and_deleting_counts(
    local: LocalRepository, root: Place, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    info, _ = push(local, made(1))
    local.set_policy(NS, Policy(max_bytes=0))
    choose = Index.let_go

    def then(self: Index, *args: Any) -> Any:
        chosen = choose(self, *args)
        with open_local(root.as_uri()) as other:
            if event == "tagged":
                other.set_tag(NS, "kept", info.id)
            elif event == "used":
                other.manifest(info.id, NS)
            elif event == "policy taken away":
                other.set_policy(NS, Policy())
            elif event == "policy damaged":
                (root / "policies" / "default.json").write_text("{}")
            else:
                other.delete(info.id, NS)
        return chosen

    monkeypatch.setattr(Index, "let_go", then)
    assert local.collect_garbage(grace_s=0).artifacts == 0
    assert left(local, info) == [event != "deleted"]
    assert not local._index.unsettled()


@pytest.mark.everywhere(but={"postgres": INSIDE, "s3": INSIDE})
def test_after_an_index_was_lost_nothing_counts_as_idle(root: Place) -> None:
    with open_local(root.as_uri()) as repository:
        info, _ = push(repository, made(1))
        repository.set_policy(NS, Policy(max_idle_s=1))
        turn_back(root, "last_used_at", {info.id: timedelta(hours=1)})
        repository.reindex()
        known = repository.artifact(info.id, NS).last_used_at
        assert known is not None
        assert datetime.now(UTC) - known > timedelta(minutes=59), "a rebuild keeps what the index knew"
    for path in root.glob("index.sqlite*"):
        path.unlink()
    with open_local(root.as_uri()) as repository:
        assert repository.collect_garbage(grace_s=0).artifacts == 0
        assert left(repository, info) == [True]


# Clocks


def test_times_in_the_future_count_as_now(local: LocalRepository, root: Place) -> None:
    created, used = (push(local, made(seed))[0] for seed in range(2))
    turn_back(root, "created_at", {created.id: -DAY, used.id: 9 * DAY})
    turn_back(root, "last_used_at", {used.id: -DAY})
    local.set_policy(NS, Policy(max_idle_s=3600))
    assert local.collect_garbage(grace_s=0).artifacts == 0
    local.manifest(used.id, NS)
    found = local.artifact(used.id, NS).last_used_at
    assert found is not None
    assert abs(found - datetime.now(UTC)) < timedelta(minutes=1), "the next use corrects it"


def test_a_clock_that_is_set_while_the_process_runs_lets_nothing_go_too_early() -> None:
    wall, running = 1_000_000.0, 500.0
    clock = Clock(lambda: wall, lambda: running)

    def passes(seconds: float, *, step: float = 0.0) -> float:
        nonlocal wall, running
        wall, running = wall + seconds + step, running + seconds
        return clock.now().timestamp()

    assert passes(10) == 1_000_010
    assert passes(10, step=86400) == 1_000_020, "set forward: not believed"
    assert passes(10, step=-86400) == 1_000_030
    assert passes(10, step=-86400) == 1_000_040 - 86400, "set back: believed, for nothing gets older"
    assert passes(10, step=86400) == 1_000_050 - 86400
    assert passes(86400) == 1_000_050 + 86400, "believed when it has stood for a day"
    assert passes(3600, step=30) == 1_000_050 + 86400 + 3630, "drift is followed"


# Last use


def test_reading_and_matching_are_uses_and_looking_is_none(repository: Repository, root: Place) -> None:
    one = made(1)
    info, _ = push(repository, one)
    assert info.last_used_at is None
    calls: dict[str, tuple[Callable[[], object], bool]] = {
        "manifest": (lambda: repository.manifest(info.id, NS), True),
        "records": (lambda: repository.records(one[0], NS), True),
        "match": (lambda: repository.match(NS, [record.key for record in one[1]]), True),
        "artifact": (lambda: repository.artifact(info.id, NS), False),
        "check": (lambda: repository.check(info.id, NS), False),
        "stats": (lambda: repository.stats(NS), False),
    }
    for name, (call, counts) in calls.items():
        with writing_to_index(root) as connection:
            connection.execute(update(ArtifactRow).values(last_used_at=None))
        call()
        found = repository.artifact(info.id, NS).last_used_at
        assert (found is not None) is counts, name
        assert found is None or abs(found - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_use_is_written_once_in_ten_minutes(
    local: LocalRepository, root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, _ = push(local, made(1))
    written: list[int] = []
    write = uses._write

    def counted(connection: Any, taken: Any) -> None:
        written.append(len(taken))
        write(connection, taken)

    monkeypatch.setattr(uses, "_write", counted)
    for _ in range(20):
        local.manifest(info.id, NS)
    assert written == [1]
    turn_back(root, "last_used_at", {info.id: timedelta(minutes=11)})
    local.manifest(info.id, NS)
    assert written == [1, 1]


def test_a_read_does_not_wait_for_a_writer_and_its_use_is_not_lost(root: Place) -> None:
    with open_local(root.as_uri()) as local:
        info, _ = push(local, made(1))
        with writing_to_index(root):
            begun = datetime.now(UTC)
            for _ in range(5):
                local.manifest(info.id, NS)
            assert datetime.now(UTC) - begun < timedelta(seconds=1)
        assert local.artifact(info.id, NS).last_used_at is None
    with open_local(root.as_uri()) as local:
        found = local.artifact(info.id, NS).last_used_at
        assert found is not None
        assert found >= begun - timedelta(seconds=1)


def test_a_use_that_nobody_could_write_keeps_its_artifact(local: LocalRepository, root: Place) -> None:
    info, _ = push(local, made(1))
    turn_back(root, "created_at", {info.id: DAY})
    local.set_policy(NS, Policy(max_idle_s=3600))
    with writing_to_index(root):
        local.manifest(info.id, NS)
    assert local.collect_garbage(grace_s=0).artifacts == 0


def test_uses_in_a_repository_in_memory() -> None:
    with open_repository("memory:") as repository:
        info, _ = push(repository, made(1))
        repository.manifest(info.id, NS)
        assert repository.artifact(info.id, NS).last_used_at is not None


# Quotas


def test_a_push_beyond_the_quota_is_refused_early_and_leaves_nothing(repository: Repository, root: Place) -> None:
    one, two = made(1), made(2)
    push(repository, one)
    before = files(root, "chunks"), files(root, "blocks"), files(root, "artifacts")
    repository.set_policy(NS, Policy(quota_bytes=size_of(one) + size_of(two) - 1))
    running = repository.begin_push(MADE_WITH, NS)
    for digest in running.offer(two[1]):
        running.put(digest, two[2][digest])
    assert two[0].tokens is not None
    with pytest.raises(QuotaExceeded) as refused:
        running.offer_tokens(two[0].token_count, two[0].tokens)
    details = refused.value.details
    assert details["quota"] == size_of(one) + size_of(two) - 1
    assert details["used"] + details["wanted"] == size_of(one) + size_of(two)
    assert "kvgraft retain --quota" in refused.value.message
    assert isinstance(refused.value, StorageFull)
    assert (files(root, "chunks"), files(root, "blocks"), files(root, "artifacts")) == before
    with pytest.raises(PushNotFound):
        running.commit(two[0])
    assert repository.stats(NS).running_pushes == 0
    assert repository.collect_garbage(grace_s=0).removed == []
    repository.set_policy(NS, Policy(quota_bytes=size_of(one) + size_of(two)))
    push(repository, two)
    assert repository.check(two[0].id, NS).ok


def test_what_is_there_is_free(repository: Repository) -> None:
    one = made(1, count=64, prefix=48)
    push(repository, one)
    repository.set_policy(NS, Policy(quota_bytes=size_of(one)))
    assert push(repository, one)[1] == []
    repository.set_policy(NS, Policy(quota_bytes=0))
    assert push(repository, one)[1] == [], "even where the quota was lowered since"
    with pytest.raises(QuotaExceeded):
        push(repository, made(2, count=64, prefix=48))
    push(repository, made(2), "elsewhere")


def test_an_offer_made_twice_counts_once(repository: Repository) -> None:
    one = made(1)
    repository.set_policy(NS, Policy(quota_bytes=size_of(one)))
    for _ in range(2):
        with repository.begin_push(MADE_WITH, NS) as running:
            for _ in range(3):
                missing = offer(running, one[0], one[1])
            for digest in missing[:2]:
                running.put(digest, one[2][digest])
    push(repository, one)


def test_pushes_at_once_do_not_exceed_the_quota_together(repository: Repository) -> None:
    one, two = made(1), made(2)
    repository.set_policy(NS, Policy(quota_bytes=size_of(one) + size_of(two) - 1))
    first = repository.begin_push(MADE_WITH, NS)
    missing = offer(first, one[0], one[1])
    with pytest.raises(QuotaExceeded):
        push(repository, two)
    repository.set_policy(NS, Policy(quota_bytes=0))
    for digest in missing:
        first.put(digest, one[2][digest])
    assert first.commit(one[0]).id == one[0].id, "what an offer accepted, the commit does not refuse"


def test_leftovers_of_other_pushes_do_not_use_the_quota_up(repository: Repository, root: Place) -> None:
    one, two = made(1), made(2)
    repository.set_policy(NS, Policy(quota_bytes=size_of(one)))
    given_up = repository.begin_push(MADE_WITH, NS)
    for digest in offer(given_up, one[0], one[1]):
        given_up.put(digest, one[2][digest])
    given_up.abort()
    assert files(root, "chunks")
    push(repository, two)
    assert len(files(root, "chunks")) == len(two[2])


def test_i8_a_quota_counts_a_chunk_by_the_most_that_any_push_may_send(repository: Repository) -> None:
    one = made(1)
    repository.set_policy(NS, Policy(quota_bytes=size_of(one) - 1))
    arrays = [
        {"name": "k", "dtype": "float8_e4m3fn", "heads": len(one[2]), "dim": 1, "chunk_layers": 1, "chunk_heads": 1}
    ]
    groups = [{"name": "full", "kind": "full", "layers": [0], "window": None, "arrays": arrays}]
    bytes_only = fingerprint(block_tokens=1, state={"groups": groups})
    said = BlockRecord(one[1][0].key, None, 0, 1, (Step("prefill", 0, 1),), {"full/k": tuple(one[2])})
    assert set(repository.begin_push(bytes_only, NS).offer([said])) == set(one[2]), "each said to have one byte"
    with pytest.raises(QuotaExceeded):
        push(repository, one)


# Damage


def test_under_a_policy_that_cannot_be_read_nothing_goes(
    local: LocalRepository, root: Place, caplog: pytest.LogCaptureFixture
) -> None:
    info, _ = push(local, made(1))
    other, _ = push(local, made(2), "other")
    for namespace in (NS, "other"):
        local.set_policy(namespace, Policy(max_bytes=0, quota_bytes=10**9))
    path = root / "policies" / "default.json"
    whole = path.read_bytes()
    for damaged in (whole.replace(b'"max_bytes":0', b'"max_bytes":1'), whole[:-1], b"", b"\xff", b"[" * 100_000):
        path.write_bytes(damaged)
        caplog.clear()
        report = local.collect_garbage(grace_s=0)
        assert report.unreadable == ["policies/default.json"]
        assert "policies/default.json" in caplog.text
        assert left(local, info) == [True]
    assert left(local, other, namespace="other") == [False]
    assert local.reindex().corrupt == ["policies/default.json"]
    with pytest.raises(DocumentCorrupt, match="default"):
        local.policy(NS)
    with pytest.raises(DocumentCorrupt, match="retain --clear"):
        push(local, made(3))
    local.set_policy(NS, Policy())
    push(local, made(3))
    assert local.collect_garbage(grace_s=0).unreadable == []


def test_a_policy_moved_to_another_namespace_is_damaged(local: LocalRepository, root: Place) -> None:
    info, _ = push(local, made(1))
    local.set_policy("other", Policy(max_bytes=0))
    (root / "policies" / "other.json").rename(root / "policies" / "default.json")
    (root / "policies" / "NOT-A-NAMESPACE.json").write_text("{}")
    (root / "policies" / "default.txt").write_text("{}")
    assert local.collect_garbage(grace_s=0).unreadable == [
        "policies/NOT-A-NAMESPACE.json",
        "policies/default.json",
        "policies/default.txt",
    ]
    assert left(local, info) == [True]


def test_a_policy_of_a_later_version_lets_nothing_go(local: LocalRepository) -> None:
    info, _ = push(local, made(1))

    class Later(Policy):
        keep_forever: bool = True

    class LaterDocument(PolicyDocument):
        policy: Later

    later = LaterDocument(namespace=NS, policy=Later(max_bytes=0))
    local._store.put("policies/default.json", seal(later))
    assert local.collect_garbage(grace_s=0).unreadable == ["policies/default.json"]
    assert left(local, info) == [True]


# The command


def retain(root: Place, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    code = main(["retain", "--repo", root.as_uri(), "--json", *options])
    captured = capsys.readouterr()
    return json.loads(captured.out) if code == 0 else (code, json.loads(captured.err)["error"])


def test_the_command_sets_shows_and_clears(
    local: LocalRepository, root: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = {"namespace": NS, **Policy().model_dump()}
    assert retain(root, capsys) == empty
    shown = retain(root, capsys, "--keep-tag", "release-*", "--keep-tag", "x?", "--max-age", "30d", "--quota", "1.5GB")
    assert shown == empty | {"keep_tags": ["release-*", "x?"], "max_age_s": 30 * 86400, "quota_bytes": 1_500_000_000}
    shown = retain(root, capsys, "--max-age", "none", "--max-idle", "1w", "--max-bytes", "64GiB", "--keep-tag", "")
    assert shown == empty | {
        "keep_tags": [], "max_idle_s": 7 * 86400, "max_bytes": 64 * 2**30, "quota_bytes": 1_500_000_000,
    }  # fmt: skip
    assert local.policy(NS).model_dump() == {name: value for name, value in shown.items() if name != "namespace"}
    assert main(["retain", "--repo", root.as_uri()]) == 0
    text = capsys.readouterr().out
    assert "1w" in text
    assert "64.0 GiB" in text
    assert retain(root, capsys, "--namespace", "other") == empty | {"namespace": "other"}
    (root / "policies" / "default.json").write_text("damaged")
    assert retain(root, capsys)[1]["code"] == "document_corrupt"
    assert retain(root, capsys, "--max-age", "1d")[1]["code"] == "document_corrupt"
    assert retain(root, capsys, "--clear", "--max-age", "90m") == empty | {"max_age_s": 5400}
    assert retain(root, capsys, "--clear") == empty
    assert not (root / "policies" / "default.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--max-age", "30"),
        ("--max-age", "d"),
        ("--max-age", "-1d"),
        ("--max-age", "0s"),
        ("--max-age", "1e9d"),
        ("--max-age", "9" * 40 + "d"),
        ("--max-age", "9" * 18 + "w"),
        ("--max-idle", "1 month"),
        ("--max-idle", "١d"),
        ("--max-bytes", "lots"),
        ("--max-bytes", "-5GB"),
        ("--max-bytes", "5XB"),
        ("--quota", ""),
        ("--quota", "999999999TB"),
        ("--keep-tag", "a b"),
        ("--keep-tag", "../*"),
    ],
)
def test_the_command_says_what_is_wrong_and_changes_nothing(
    local: LocalRepository, root: Place, capsys: pytest.CaptureFixture[str], options: tuple[str, str]
) -> None:
    code, error = retain(root, capsys, *options)
    assert code == 2
    assert error["code"] == "invalid_input"
    assert len(error["message"]) < 500
    assert local.policy(NS) == Policy()
