"""Who may do what at a service: every route against every kind of caller, and what tokens are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import urllib3
from fastapi import APIRouter
from places import Place
from pushing import push, writing_to_index
from serving import served
from sqlalchemy import select, update
from synthetic import artifact
from test_api import NO_DIGEST, Service, error_of, serving

import repo_service.services.access
from repo_service.api.access import GuardedRoute, guarded_routes, needs
from repo_service.api.app import create_app
from repo_service.api.server import serve
from repo_service.cli.main import main
from repo_service.client import open_repository
from repo_service.domain.access import Scope, parse_token
from repo_service.domain.errors import (
    AccessDenied,
    ArtifactNotFound,
    ChunkNotFound,
    InvalidInput,
    KvgraftError,
    PushNotFound,
    TokenNotFound,
    Unauthenticated,
)
from repo_service.index.models import TokenRow
from repo_service.services.access import REMEMBERED_S
from repo_service.services.opening import open_local
from repo_service.services.repository import LocalRepository
from repo_service.settings import Settings

pytestmark = pytest.mark.everywhere

PAGE = Path(__file__).parent.parent / "docs" / "access.md"

NONE, READ, WRITE, ADMIN = "none", "read", "write", "admin"
EVERYWHERE = "admin for *"
MADE = artifact([1, 2, 3])
PUSH = "0" * 32

# Below /v1/namespaces/{namespace}, and below /v1 for the default one: what it needs, a body, and the answer to those
# who may ask for what is not there.
IN_NAMESPACES: dict[tuple[str, str], tuple[str, Any, int]] = {
    ("GET", "/artifacts/{ref}"): (READ, None, 404),
    ("DELETE", "/artifacts/{artifact_id}"): (ADMIN, None, 404),
    ("GET", "/artifacts/{ref}/manifest"): (READ, None, 404),
    ("GET", "/artifacts/{ref}/blocks"): (READ, None, 404),
    ("POST", "/artifacts/{ref}/check"): (READ, None, 404),
    ("GET", "/artifacts/{artifact_id}/chunks/{digest}"): (READ, None, 404),
    ("GET", "/artifacts/{artifact_id}/chunks/{digest}/urls"): (READ, None, 404),
    ("GET", "/artifacts/{ref}/zarr/{key}"): (READ, None, 410),
    ("HEAD", "/artifacts/{ref}/zarr/{key}"): (READ, None, 410),
    ("POST", "/artifacts/query"): (READ, {}, 200),
    ("POST", "/match"): (READ, {"keys": []}, 200),
    ("GET", "/tags"): (READ, None, 200),
    ("PUT", "/tags/{name}"): (WRITE, {"artifact_id": NO_DIGEST["sha256"]}, 404),
    ("DELETE", "/tags/{name}"): (WRITE, None, 404),
    ("GET", "/stats"): (READ, None, 200),
    ("GET", "/policy"): (READ, None, 200),
    ("PUT", "/policy"): (ADMIN, {}, 200),
    ("GET", "/divergences"): (READ, None, 200),
    ("POST", "/pushes"): (WRITE, {"fingerprint": MADE[0].fingerprint.sections}, 201),
    ("POST", "/pushes/{push_id}/blocks"): (WRITE, {"records": []}, 404),
    ("PUT", "/pushes/{push_id}/chunks/{digest}"): (WRITE, b"1234", 404),
    ("POST", "/pushes/{push_id}/uploads"): (WRITE, {"digests": [NO_DIGEST["blake3"]]}, 404),
    ("POST", "/pushes/{push_id}/uploads/{digest}"): (WRITE, None, 404),
    ("POST", "/pushes/{push_id}/commit"): (WRITE, MADE[0].data, 404),
    ("DELETE", "/pushes/{push_id}"): (WRITE, None, 204),
}

ELSEWHERE: dict[tuple[str, str], tuple[str, Any, int]] = {
    ("GET", "/healthz"): (NONE, None, 200),
    ("GET", "/readyz"): (NONE, None, 200),
    ("GET", "/metrics"): (NONE, None, 200),
    ("GET", "/v1/info"): (READ, None, 200),
    ("GET", "/v1/namespaces"): (READ, None, 200),
    ("POST", "/v1/gc"): (EVERYWHERE, {}, 200),
    ("POST", "/v1/scrub"): (EVERYWHERE, {}, 200),
    ("POST", "/v1/reindex"): (EVERYWHERE, None, 200),
    ("GET", "/v1/tokens"): (EVERYWHERE, None, 200),
    ("POST", "/v1/tokens"): (EVERYWHERE, {"scope": "read", "namespaces": ["team-a"]}, 201),
    ("DELETE", "/v1/tokens/{token_id}"): (EVERYWHERE, None, 404),
}

IN_A, IN_B = "/v1/namespaces/team-a", "/v1/namespaces/team-b"


@dataclass
class Callers:
    """A service that asks for tokens, and the Authorization header of each kind of caller."""

    service: Service
    headers: dict[str, str | None]

    def token(self, caller: str) -> str:
        return str(self.headers[caller]).removeprefix("Bearer ")

    def ask(self, caller: str, method: str, path: str, body: Any = None) -> urllib3.BaseHTTPResponse:
        header = self.headers[caller]
        more = {} if header is None else {"Authorization": header}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return self.service.request(method, path, data, Content_Type="application/json", **more)


@pytest.fixture(scope="module")
def callers(module_root: Place) -> Iterator[Callers]:
    with serving(module_root, auth="tokens") as service:
        repository = service.repository

        def bearer(scope: Scope, *namespaces: str, **options: Any) -> str:
            return f"Bearer {repository.create_access_token(scope, namespaces, **options).token}"

        names = ("default", "team-a")
        headers: dict[str, str | None] = {
            "nobody": None,
            "malformed": "Bearer kvg_secret",
            "unknown": f"Bearer kvg_{'0' * 12}_{'0' * 64}",
            "expired": bearer(Scope.ADMIN, "*", lifetime_s=1),
            "revoked": bearer(Scope.ADMIN, "*"),
            "basic": "Basic a3ZnOmt2Zw==",
            "other namespace": bearer(Scope.ADMIN, "team-c"),
            READ: bearer(Scope.READ, *names),
            WRITE: bearer(Scope.WRITE, *names),
            ADMIN: bearer(Scope.ADMIN, *names),
            EVERYWHERE: bearer(Scope.ADMIN, "*"),
        }
        wrong = str(headers[READ])
        headers["wrong secret"] = wrong[:-1] + ("0" if wrong[-1] != "0" else "1")
        repository.revoke_access_token(str(headers["revoked"])[11:23])
        with writing_to_index(module_root) as connection:
            expired = update(TokenRow).where(TokenRow.name == str(headers["expired"])[11:23])
            connection.execute(expired.values(expires_at=1))
        yield Callers(service, headers)


INVALID = ("nobody", "malformed", "unknown", "expired", "revoked", "basic", "wrong secret")
VALID = ("other namespace", READ, WRITE, ADMIN, EVERYWHERE)


def allowed(caller: str, need: str, *, in_namespace: bool) -> bool:
    if caller == EVERYWHERE or need == NONE:
        return True
    if caller == "other namespace":
        return not in_namespace and need == READ
    order = (READ, WRITE, ADMIN)
    return need != EVERYWHERE and order.index(caller) >= order.index(need)


def table() -> Iterator[tuple[str, str, str, Any, int, bool]]:
    for (method, path), (need, body, status) in ELSEWHERE.items():
        yield method, path, need, body, status, False
    for (method, path), (need, body, status) in IN_NAMESPACES.items():
        for prefix in "/v1", "/v1/namespaces/{namespace}":
            yield method, prefix + path, need, body, status, True


def filled(path: str, namespace: str = "team-a") -> str:
    values = {
        "namespace": namespace,
        "ref": "absent",
        "artifact_id": NO_DIGEST["sha256"],
        "digest": NO_DIGEST["blake3"],
        "key": "zarr.json",
        "name": "absent",
        "push_id": PUSH,
        "token_id": "0" * 12,
    }
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], path)


def test_every_route_is_in_the_table(callers: Callers) -> None:
    schema = json.loads(callers.ask(READ, "GET", "/v1/openapi.json").data)
    routes = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    assert routes == {(method, path) for method, path, *_ in table()}


@pytest.mark.parametrize(("method", "path", "need", "body", "status", "in_namespace"), list(table()))
def test_every_route_answers_those_who_may_ask_and_refuses_the_others(
    callers: Callers, method: str, path: str, need: str, body: Any, status: int, in_namespace: bool
) -> None:
    for caller in INVALID:
        answer = callers.ask(caller, method, filled(path), body)
        assert answer.status == (401 if need != NONE else 200), caller
        if need != NONE:
            assert answer.headers["www-authenticate"] == "Bearer"
    for caller in VALID:
        answer = callers.ask(caller, method, filled(path), body)
        expected = status if allowed(caller, need, in_namespace=in_namespace) else 403
        assert answer.status == expected, (caller, answer.data)
        if expected == 403 and method != "HEAD":
            assert error_of(answer) == (403, "access_denied")


def test_the_page_says_what_every_route_needs() -> None:
    words = {NONE: "nothing", EVERYWHERE: "admin, for `*`"}
    expected = {
        f"{method} {path}": words.get(need, need if in_namespace else f"{need}, in any namespace")
        for method, path, need, *_, in_namespace in table()
        if "{namespace}" not in path
    }
    rows = re.findall(r"^\| `([A-Z]+ /\S*)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(expected)
    assert dict(rows) == expected


# Headers that differ from answer to answer.
OWN = {"date", "x-request-id"}


def test_one_answer_whatever_is_wrong_with_a_token(callers: Callers) -> None:
    answers = [callers.ask(caller, "GET", "/v1/info") for caller in INVALID]
    assert {answer.status for answer in answers} == {401}
    assert len({answer.data for answer in answers}) == 1
    assert len({str(sorted((k, v) for k, v in answer.headers.items() if k not in OWN)) for answer in answers}) == 1
    assert error_of(answers[0]) == (401, "unauthenticated")


@pytest.mark.parametrize("path", ["/", "/v1/nothing", "/v1/openapi.json", "/healthz/", "//healthz", "/v1/healthz"])
def test_what_is_no_route_needs_a_token_too(callers: Callers, path: str) -> None:
    assert callers.ask("nobody", "GET", path).status == 401


def test_two_authorization_headers_are_none(callers: Callers) -> None:
    headers = urllib3.HTTPHeaderDict()
    for _ in range(2):
        headers.add("Authorization", str(callers.headers[READ]))
    answer = urllib3.request("GET", f"{callers.service.url}/v1/info", headers=headers)
    assert error_of(answer) == (401, "unauthenticated")


def test_tokens_are_asked_for_whatever_host_and_origin_say(callers: Callers) -> None:
    headers = {"Authorization": str(callers.headers[READ]), "Host": "kv.example", "Origin": "https://kv.example"}
    assert urllib3.request("GET", f"{callers.service.url}/v1/info", headers=headers).status == 200


@pytest.mark.parametrize("caller", INVALID)
def test_a_refused_body_is_not_read(callers: Callers, caller: str) -> None:
    answer = callers.ask(caller, "POST", f"{IN_A}/match", b"no JSON")
    assert answer.status == 401


def test_a_route_without_a_declaration_can_not_be_made() -> None:
    router = APIRouter(route_class=GuardedRoute)

    def forgotten() -> None: ...

    with pytest.raises(TypeError, match="forgotten"):
        router.get("/forgotten")(forgotten)


def test_a_route_without_a_guard_fails_the_application(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    stray = APIRouter()

    @stray.get("/stray")
    @needs(Scope.READ)
    def unguarded() -> None: ...

    with pytest.raises(TypeError, match="/stray"):
        list(guarded_routes(stray.routes))
    monkeypatch.setattr("repo_service.api.token_routes.router", stray)
    with open_local(root.as_uri()) as repository, pytest.raises(TypeError, match="/stray"):
        create_app(repository, Settings())


# Tokens


def test_a_token_is_shown_once_and_kept_as_a_digest(root: Place) -> None:
    with open_local(root.as_uri()) as repository:
        made = repository.create_access_token(Scope.WRITE, ["team-b", "team-a"], note="for CI")
        (listed,) = repository.access_tokens()
    parsed = parse_token(made.token)
    assert parsed is not None
    token_id, secret = parsed
    assert listed == made.info
    assert (listed.id, listed.scope, listed.namespaces, listed.note) == (
        token_id,
        "write",
        ["team-a", "team-b"],
        "for CI",
    )
    assert listed.expires_at == listed.created_at + timedelta(days=90)
    assert secret not in repr(made)
    for path in root.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes()
    with writing_to_index(root) as connection:
        (row,) = connection.execute(select(TokenRow.__table__)).all()
        assert secret not in str(row)
        assert secret.encode() not in row


def test_a_reindex_leaves_tokens_alone(root: Place) -> None:
    with open_local(root.as_uri()) as repository:
        push(repository, MADE)
        made = repository.create_access_token(Scope.READ, ["*"], lifetime_s=None)
        repository.reindex()
        assert repository.access_tokens() == [made.info]
        assert repository.recognition.recognise(made.token).token_id == made.info.id


def test_a_token_is_revoked_once_for_good(root: Place) -> None:
    with open_local(root.as_uri()) as repository:
        made = repository.create_access_token(Scope.READ, ["*"])
        revoked = repository.revoke_access_token(made.info.id)
        assert revoked.revoked_at is not None
        assert repository.revoke_access_token(made.info.id) == revoked
        with pytest.raises(Unauthenticated):
            repository.recognition.recognise(made.token)
        with pytest.raises(TokenNotFound):
            repository.revoke_access_token("0" * 12)


@pytest.mark.parametrize(
    ("namespaces", "lifetime_s", "note"),
    [
        ([], 1, ""),
        (["*", "a"], 1, ""),
        (["A"], 1, ""),
        (["a"], 0, ""),
        (["a"], 10**12, ""),
        (["a"], 1, "\n"),
        (["a"] * 257, 1, ""),
    ],
)
def test_what_no_token_can_be_made_for_is_refused(
    root: Place, namespaces: list[str], lifetime_s: int, note: str
) -> None:
    with open_local(root.as_uri()) as repository:
        with pytest.raises(InvalidInput):
            repository.create_access_token(Scope.READ, namespaces, lifetime_s=lifetime_s, note=note)
        assert repository.access_tokens() == []


def test_a_revocation_holds_when_what_is_remembered_is_old(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(repo_service.services.access.time, "monotonic", lambda: now)
    with open_local(root.as_uri()) as repository:
        made = repository.create_access_token(Scope.READ, ["*"])
        recognition = repository.recognition
        assert recognition.remembered(made.token) is None
        recognition.recognise(made.token)
        repository.revoke_access_token(made.info.id)
        now += REMEMBERED_S - 0.001
        assert recognition.remembered(made.token) is not None
        now += 0.001
        assert recognition.remembered(made.token) is None
        with pytest.raises(Unauthenticated):
            recognition.recognise(made.token)
        with pytest.raises(Unauthenticated):
            recognition.remembered(made.token)


def test_a_remembered_token_expires_in_time(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(root.as_uri()) as repository:
        made = repository.create_access_token(Scope.READ, ["*"], lifetime_s=60)
        repository.recognition.recognise(made.token)

        class Later(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime.now(tz) + timedelta(seconds=61)

        monkeypatch.setattr(repo_service.services.access, "datetime", Later)
        with pytest.raises(Unauthenticated):
            repository.recognition.remembered(made.token)


def test_what_is_remembered_is_bounded(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repo_service.services.access, "_REMEMBERED", 3)
    with open_local(root.as_uri()) as repository:
        made = [repository.create_access_token(Scope.READ, ["*"]).token for _ in range(5)]
        for token in made:
            repository.recognition.recognise(token)
        known = [repository.recognition.remembered(token) is not None for token in made]
    assert known == [False, False, True, True, True]


# Through a client


def test_tokens_are_made_listed_and_revoked_through_a_service(callers: Callers) -> None:
    with open_repository(callers.service.url, callers.token(EVERYWHERE)) as repository:
        made = repository.create_access_token(Scope.READ, ["team-a"], lifetime_s=3600, note="a note")
        assert made.info in repository.access_tokens()
        with open_repository(callers.service.url, made.token) as other:
            assert other.stats("team-a").artifacts == 0
            with pytest.raises(AccessDenied):
                other.create_access_token(Scope.ADMIN, ["*"])
        assert repository.revoke_access_token(made.info.id).revoked_at is not None
        with pytest.raises(TokenNotFound):
            repository.revoke_access_token("0" * 12)
    with open_repository(callers.service.url) as anonymous, pytest.raises(Unauthenticated):
        anonymous.info()


def test_a_service_that_asks_for_no_tokens_makes_none(root: Place) -> None:
    with serving(root) as service, open_repository(service.url) as repository:
        for ask in (
            repository.access_tokens,
            lambda: repository.create_access_token(Scope.ADMIN, ["*"]),
            lambda: repository.revoke_access_token("0" * 12),
        ):
            with pytest.raises(AccessDenied, match="kvgraft token"):
                ask()


def test_i7_only_the_namespaces_of_a_token_are_listed(callers: Callers) -> None:
    for namespace in "team-a", "team-b":
        push(callers.service.repository, artifact([5, 6], seed=3), namespace)
    with open_repository(callers.service.url, callers.token(READ)) as repository:
        assert repository.namespaces() == ["team-a"]
    with open_repository(callers.service.url, callers.token(EVERYWHERE)) as repository:
        assert set(repository.namespaces()) >= {"team-a", "team-b"}


def test_i7_what_another_namespace_holds_has_to_be_sent_all_the_same(root: Place) -> None:
    made = artifact(range(40))
    with serving(root, auth="tokens") as service:

        def of(namespace: str) -> Any:
            token = service.repository.create_access_token(Scope.ADMIN, [namespace]).token
            return open_repository(service.url, token)

        with of("team-a") as theirs, of("team-b") as ours:
            info, sent = push(theirs, made, "team-a")
            assert sorted(sent) == sorted(made[2])
            # Knowing every hash is no use: nothing is found, and a commit without the bytes is refused.
            with pytest.raises(ArtifactNotFound):
                ours.manifest(info.id, "team-b")
            assert ours.match("team-b", [record.key for record in made[1]]) is None
            _, sent = push(ours, made, "team-b")
            assert sorted(sent) == sorted(made[2])
            # What a deletion says it freed does not tell whether others hold the same.
            report = ours.delete(info.id, "team-b")
            assert (report.chunks, report.bytes) == (len(made[2]), sum(map(len, made[2].values())))
            assert theirs.check(info.id, "team-a").ok


def test_i7_a_push_of_another_namespace_is_not_found(callers: Callers) -> None:
    repository: LocalRepository = callers.service.repository
    manifest, records, chunks = artifact(range(20), seed=9)
    running = repository.begin_push(manifest.fingerprint, "team-b")
    running.offer(records)
    digest = next(iter(records[0].chunks.values()))[0]
    body = json.dumps({"records": [json.loads(records[0].data)]}).encode()
    for method, path, data in (
        ("POST", "blocks", body),
        ("PUT", f"chunks/{digest}", chunks[digest]),
        ("POST", "commit", manifest.data),
        ("DELETE", "", None),
    ):
        theirs, absent = (
            callers.ask(WRITE, method, f"{IN_A}/pushes/{name}/{path}".rstrip("/"), data) for name in (running.id, PUSH)
        )
        assert theirs.status == absent.status == (204 if method == "DELETE" else 404)
        assert theirs.data == absent.data.replace(PUSH.encode(), running.id.encode())
        with pytest.raises((PushNotFound, ChunkNotFound)):
            repository.resume_push(running.id, "team-a").put(digest, chunks[digest])
    # It goes on as if nothing had happened.
    running.put(digest, chunks[digest])


def test_a_token_is_in_no_message_and_no_log(callers: Callers, caplog: pytest.LogCaptureFixture) -> None:
    secret = callers.token(READ)
    messages = []
    with caplog.at_level("DEBUG"), open_repository(callers.service.url, secret) as repository:
        messages.append(repr(repository))
        for ask in (
            lambda: repository.manifest("absent", "team-a"),
            lambda: repository.delete(NO_DIGEST["sha256"], "team-a"),
            lambda: repository.stats("team-b"),
            lambda: open_repository(f"http://{secret}@127.0.0.1:1"),
            lambda: open_repository("http://127.0.0.1:1", f"{secret} "),
            lambda: repository.revoke_access_token(secret),
            lambda: open_repository(callers.service.url, secret[:-1]).info(),
        ):
            with pytest.raises(KvgraftError) as failed:
                ask()
            messages.append(f"{failed.value} {failed.value.to_json()}")
    assert secret[20:-1] not in caplog.text
    assert not [message for message in messages if secret[20:-1] in message]


# The service as a process is started


def test_tokens_are_made_by_the_command_while_the_service_runs(
    root: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVGRAFT_AUTH", "tokens")

    def run(*args: str, code: int = 0) -> Any:
        assert main(["token", *args, "--json"]) == code
        return json.loads(capsys.readouterr().out or "null")

    with served(root.as_uri()) as url:
        made = run("create", "--scope", "admin", "--namespace", "*", "--expires", "never", "--repo", root.as_uri())
        assert made["info"]["expires_at"] is None
        through = ("--repo", url, "--token", made["token"])
        other = run("create", "--scope", "read", "--namespace", "a", "--namespace", "b", "--expires", "2w", *through)
        assert other["info"]["namespaces"] == ["a", "b"]
        assert [item["id"] for item in run("ls", *through)["items"]] == [other["info"]["id"], made["info"]["id"]]
        assert run("revoke", other["info"]["id"], *through)["revoked_at"] is not None
        run("ls", "--repo", url, "--token", other["token"], code=5)
        run("create", "--scope", "all", "--namespace", "a", *through, code=2)
        run("revoke", "0" * 12, *through, code=3)
        assert main(["token", "ls", *through]) == 0
        listed = capsys.readouterr().out
        assert "revoked" in listed
        assert made["token"] not in listed


def test_a_service_that_asks_for_tokens_may_listen_anywhere_and_can_have_some(root: Place) -> None:
    with pytest.raises(InvalidInput, match="memory"):
        serve(Settings(repo="memory:", auth="tokens", port=0))
    with serving(root, auth="tokens", host="0.0.0.0") as service:
        url = service.url.replace("0.0.0.0", "127.0.0.1")
        assert urllib3.request("GET", f"{url}/healthz").status == 200
        assert urllib3.request("GET", f"{url}/v1/info").status == 401


def test_revoking_the_last_token_opens_nothing(root: Place) -> None:
    with serving(root, auth="tokens") as service:
        made = service.repository.create_access_token(Scope.ADMIN, ["*"])
        service.repository.revoke_access_token(made.info.id)
        assert service.request("GET", "/v1/info").status == 401
        assert service.request("GET", "/v1/info", Authorization=f"Bearer {made.token}").status == 401
