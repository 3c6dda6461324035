"""The exactness matrix (I1): grafted logits against a fresh run's, by SHA-256, after a round trip through disk."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import families
import pytest
import torch
from exactness import fresh_logits, sha256
from places import WAYS, Place
from serving import reached
from transformers import PreTrainedModel

from engine_adapter import GraftSession
from repo_service.domain.repository import Repository
from repo_service.domain.schedule import DECODE, Step, canonical_steps

pytestmark = pytest.mark.everywhere

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("eager", "sdpa")
STORED_BLOCKS = 6
LONGEST = 256
SUFFIXES = (1, 2, 7, 31)


@dataclass(frozen=True)
class Case:
    family: str
    dtype: str
    attention: str
    block_tokens: int

    def __str__(self) -> str:
        return f"{self.family}-{self.dtype}-{self.attention}-{self.block_tokens}"


def window_of(family: str) -> int | None:
    config = families.FAMILIES[family]()
    return config.sliding_window if family in {"gemma3", "mistral"} else None


def cases() -> Iterator[Case]:
    for family, dtype, attention in itertools.product(families.FAMILIES, DTYPES, ATTENTION):
        yield Case(family, dtype, attention, 32)
        if window_of(family):
            yield Case(family, dtype, attention, 128)


def prompt_lengths(case: Case) -> list[int]:
    """Every boundary with several suffixes; around the window for sliding layers."""
    size = case.block_tokens
    lengths = {b * size + s for b in (1, 2, STORED_BLOCKS) for s in (*SUFFIXES, size) if b * size + s <= LONGEST + size}
    if window := window_of(case.family):
        ends = {window - 1, window, window + 1, 2 * window}
        lengths |= ends | {end + 1 for end in ends}
    return sorted(lengths)


@pytest.fixture(scope="module", params=WAYS)
def repository(request: pytest.FixtureRequest, module_root: Place) -> Iterator[Repository]:
    with reached(request.param, module_root.as_uri()) as opened:
        yield opened


Sessions = Callable[[PreTrainedModel, Case], GraftSession]


@pytest.fixture
def session_on(repository: Repository) -> Sessions:
    """Opens sessions on a part of the repository that only this test uses."""
    namespace = f"n{uuid.uuid4().hex[:12]}"
    return lambda model, case: GraftSession(
        model, None, repository, block_tokens=case.block_tokens, namespace=namespace
    )


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_a_graft_gives_the_logits_of_a_fresh_run(case: Case, session_on: Sessions, matrix: list[str]) -> None:
    model = families.build(case.family, getattr(torch, case.dtype), case.attention)
    generator = random.Random(str(case))
    stored = [generator.randrange(3, families.VOCAB_SIZE) for _ in range(LONGEST + case.block_tokens)]
    with session_on(model, case) as session:
        session.deposit(stored)
        for length in prompt_lengths(case):
            boundary = (length - 1) // case.block_tokens * case.block_tokens
            suffix = [generator.randrange(3, families.VOCAB_SIZE) for _ in range(length - boundary)]
            prompt = stored[:boundary] + suffix
            run = session.prefill(prompt)
            fresh = fresh_logits(model, prompt, canonical_steps(0, length, case.block_tokens))
            assert (run.grafted_tokens, run.computed_tokens) == (boundary, length - boundary), "llama.cpp #26676"
            assert sha256(run.logits) == sha256(fresh), f"{case}: boundary {boundary}, suffix {length - boundary}"
            matrix.append(f"{case} {boundary}+{length - boundary}")


@pytest.mark.parametrize("case", [case for case in cases() if case.dtype != "float16"], ids=str)
def test_a_decoded_state_is_deposited_and_resumed_exactly(case: Case, session_on: Sessions, matrix: list[str]) -> None:
    model = families.build(case.family, getattr(torch, case.dtype), case.attention)
    generator = random.Random(str(case))
    prompt = [generator.randrange(3, families.VOCAB_SIZE) for _ in range(case.block_tokens + 9)]
    with session_on(model, case) as session:
        run = session.prefill(prompt, record=True)
        for _ in range(case.block_tokens):
            session.call(run, [generator.randrange(3, families.VOCAB_SIZE)], DECODE)
        session.deposit(run, tag="decoded")
        stopped = list(run.tokens)
    with session_on(model, case) as session:
        resumed = session.graft("decoded", record=True)
        steps = [*canonical_steps(0, len(prompt), case.block_tokens), Step(DECODE, len(prompt), len(stopped))]
        assert resumed.tokens == stopped
        assert sha256(resumed.logits) == sha256(fresh_logits(model, stopped, steps))
        session.call(resumed, [7], DECODE)
        more = [generator.randrange(3, families.VOCAB_SIZE) for _ in range(case.block_tokens + 3)]
        session.extend(resumed, more)
        tokens = [*stopped, 7, *more]
        steps += [Step(DECODE, len(stopped), len(stopped) + 1)]
        steps += canonical_steps(len(stopped) + 1, len(tokens), case.block_tokens)
        assert sha256(resumed.logits) == sha256(fresh_logits(model, tokens, steps))
        matrix.append(f"{case} decoded")
        session.deposit(resumed, tag="longer")
        report = session.verify("longer", samples=4)
        assert report.exact
        again = session.graft("longer")
        assert sha256(again.logits) == sha256(resumed.logits)
        matrix.append(f"{case} continued")


def test_the_matrix_has_at_least_1000_points(matrix: list[str], request: pytest.FixtureRequest) -> None:
    ran = [item for item in request.session.items if "test_a_graft_gives_the_logits" in item.name]
    if len(ran) < len(list(cases())):
        pytest.skip("only a part of the matrix was selected")
    assert len(set(matrix)) >= 1000, len(set(matrix))
