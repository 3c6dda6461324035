"""Limits on what a namespace may ask for and transfer in a second."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from places import Place
from pushing import push
from synthetic import artifact
from test_api import error_of, serving

from repo_service.api.rates import Rates
from repo_service.client import open_repository
from repo_service.domain.errors import RateLimited, TagNotFound
from repo_service.settings import Settings

MIB = 2**20


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def nothing() -> Any:
    return {"type": "http.request", "body": b""}


async def nowhere(_: Any) -> None: ...


def limited(clock: Clock, **settings: float) -> Rates:
    return Rates(Settings(**settings), clock)  # type: ignore[arg-type]


def test_requests_beyond_the_rate_are_told_when_to_come_again() -> None:
    clock = Clock()
    rates = limited(clock, namespace_requests_per_second=4)
    for _ in range(4):
        rates.admit("a", nothing, nowhere)
    with pytest.raises(RateLimited, match="4 requests") as refused:
        rates.admit("a", nothing, nowhere)
    assert refused.value.details == {"retry_after_s": 1}
    rates.admit("b", nothing, nowhere)
    clock.now += 0.25
    rates.admit("a", nothing, nowhere)
    with pytest.raises(RateLimited):
        rates.admit("a", nothing, nowhere)
    clock.now += 3600
    for _ in range(4):
        rates.admit("a", nothing, nowhere)
    with pytest.raises(RateLimited):
        rates.admit("a", nothing, nowhere)


def test_less_than_one_request_a_second_is_a_limit_too() -> None:
    clock = Clock()
    rates = limited(clock, namespace_requests_per_second=0.1)
    rates.admit("a", nothing, nowhere)
    with pytest.raises(RateLimited) as refused:
        rates.admit("a", nothing, nowhere)
    assert refused.value.details == {"retry_after_s": 10}


def test_bytes_of_both_directions_are_counted_and_later_requests_wait_for_them() -> None:
    clock = Clock()
    rates = limited(clock, namespace_mib_per_second=2)

    async def transfer() -> None:
        async def upload() -> Any:
            return {"type": "http.request", "body": bytes(5 * MIB)}

        receive, send = rates.admit("a", upload, nowhere)
        await receive()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": memoryview(bytes(3 * MIB))})

    asyncio.run(transfer())
    with pytest.raises(RateLimited, match="2 MiB") as refused:
        rates.admit("a", nothing, nowhere)
    assert refused.value.details["retry_after_s"] in (3, 4)
    clock.now += 3.1
    rates.admit("a", nothing, nowhere)


def test_i8_what_is_remembered_of_namespaces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repo_service.api.rates._NAMESPACES", 10)
    rates = limited(Clock(), namespace_requests_per_second=1)
    for number in range(100):
        rates.admit(f"n{number}", nothing, nowhere)
    assert len(rates._buckets) == 10


@pytest.mark.everywhere
def test_a_service_answers_429_and_its_client_waits(root: Place) -> None:
    with serving(root, namespace_requests_per_second=5) as service:
        answers = [service.request("GET", "/v1/stats") for _ in range(12)]
        refused = [answer for answer in answers if answer.status != 200]
        assert refused
        assert error_of(refused[0]) == (429, "rate_limited")
        assert refused[0].headers["retry-after"] == "1"
        # What is of no namespace is not counted.
        assert all(service.request("GET", "/healthz").status == 200 for _ in range(12))
        with open_repository(service.url) as repository:
            for _ in range(7):
                with pytest.raises(TagNotFound):
                    repository.delete_tag("default", "none")


@pytest.mark.everywhere
def test_a_push_goes_through_under_a_limit_of_bytes(root: Place) -> None:
    made = artifact(range(40))
    with (
        serving(root, namespace_mib_per_second=0.008) as service,
        open_repository(service.url) as repository,
    ):
        push(repository, made)
        assert repository.check(made[0].id, "default").ok
