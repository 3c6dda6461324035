"""Schedules: what was called is what is recorded, in one normal form."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repo_service.domain.errors import MalformedDocument
from repo_service.domain.schedule import DECODE, PREFILL, Step, append_step, canonical_steps, split_by_block

Call = tuple[str, int, int]

block_sizes = st.integers(1, 40)


def calls(steps: list[Step]) -> list[Call]:
    return [(step.kind, start, stop) for step in steps for start, stop in step.calls()]


@st.composite
def schedules(draw: st.DrawFn, block_tokens: int) -> list[Step]:
    """Steps from 0 on, of both kinds and any length that the block size allows."""
    steps: list[Step] = []
    position = 0
    for kind in draw(st.lists(st.sampled_from([PREFILL, DECODE]), max_size=12)):
        room = 3 * block_tokens if kind == DECODE else block_tokens - position % block_tokens
        stop = position + draw(st.integers(1, room))
        steps.append(Step(kind, position, stop))
        position = stop
    return steps


sized_schedules = block_sizes.flatmap(lambda size: st.tuples(st.just(size), schedules(size)))


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(0, 500), block_sizes)
def test_canonical_steps_cover_the_tokens_and_end_at_block_boundaries(start: int, length: int, size: int) -> None:
    steps = canonical_steps(start, start + length, size)
    assert [i for step in steps for i in range(step.start, step.stop)] == list(range(start, start + length))
    assert all(step.kind == PREFILL for step in steps)
    assert all(step.stop % size == 0 for step in steps[:-1])
    assert all(step.start // size == (step.stop - 1) // size for step in steps)


@settings(deadline=None)
@given(st.integers(1, 500), st.data(), block_sizes)
def test_what_follows_a_graft_is_called_as_in_a_fresh_run(stop: int, data: st.DataObject, size: int) -> None:
    boundary = data.draw(st.integers(0, stop // size)) * size
    assert canonical_steps(0, boundary, size) + canonical_steps(boundary, stop, size) == canonical_steps(0, stop, size)


@settings(deadline=None)
@given(sized_schedules)
def test_splitting_keeps_every_call(made: tuple[int, list[Step]]) -> None:
    size, steps = made
    split = split_by_block(steps, size)
    assert calls([step for block in split for step in block]) == calls(steps)


@settings(deadline=None)
@given(sized_schedules)
def test_each_block_holds_the_steps_of_its_own_span(made: tuple[int, list[Step]]) -> None:
    size, steps = made
    split = split_by_block(steps, size)
    total = steps[-1].stop if steps else 0
    spans = [(block[0].start, block[-1].stop) for block in split]
    assert spans == [(start, min(start + size, total)) for start in range(0, total, size)]


@settings(deadline=None)
@given(sized_schedules)
def test_split_steps_are_in_normal_form(made: tuple[int, list[Step]]) -> None:
    size, steps = made
    split = split_by_block(steps, size)
    for block in split:
        kinds = [step.kind for step in block]
        assert not any(a == b == DECODE for a, b in itertools.pairwise(kinds))
    assert split_by_block([step for block in split for step in block], size) == split


@settings(deadline=None)
@given(sized_schedules, st.data())
def test_how_a_run_of_decode_is_written_changes_nothing(made: tuple[int, list[Step]], data: st.DataObject) -> None:
    size, steps = made
    rewritten: list[Step] = []
    for step in steps:
        inner = range(step.start + 1, step.stop) if step.kind == DECODE else ()
        cuts = sorted(data.draw(st.sets(st.sampled_from(inner)))) if inner else []
        bounds = [step.start, *cuts, step.stop]
        rewritten += [Step(step.kind, a, b) for a, b in itertools.pairwise(bounds)]
    assert split_by_block(rewritten, size) == split_by_block(steps, size)


@settings(deadline=None)
@given(block_sizes.flatmap(lambda size: st.tuples(st.just(size), schedules(size), schedules(size))))
def test_schedules_split_alike_only_if_their_calls_are_equal(made: tuple[int, list[Step], list[Step]]) -> None:
    size, one, two = made
    assert (split_by_block(one, size) == split_by_block(two, size)) == (calls(one) == calls(two))


def test_prefill_steps_are_never_merged() -> None:
    halves = [Step(PREFILL, 0, 2), Step(PREFILL, 2, 4)]
    assert split_by_block(halves, 4) == [halves]
    assert split_by_block(halves, 4) != split_by_block([Step(PREFILL, 0, 4)], 4)
    decoded = [Step(DECODE, 0, 4)]
    assert split_by_block(decoded, 4) != split_by_block([Step(PREFILL, i, i + 1) for i in range(4)], 4)


def test_decode_is_cut_at_block_boundaries() -> None:
    steps = [Step(PREFILL, 0, 3), Step(DECODE, 3, 9)]
    assert split_by_block(steps, 4) == [
        [Step(PREFILL, 0, 3), Step(DECODE, 3, 4)],
        [Step(DECODE, 4, 8)],
        [Step(DECODE, 8, 9)],
    ]


@pytest.mark.parametrize(
    "steps",
    [
        [Step(PREFILL, 1, 2)],
        [Step(PREFILL, 0, 2), Step(PREFILL, 3, 4)],
        [Step(PREFILL, 0, 2), Step(PREFILL, 1, 4)],
        [Step(PREFILL, 0, 2), Step(PREFILL, 0, 2)],
        [Step(DECODE, 0, 6), Step(DECODE, 5, 8)],
        [Step(DECODE, 0, 6), Step(PREFILL, 7, 8)],
    ],
)
def test_gaps_and_overlaps_are_refused(steps: list[Step]) -> None:
    with pytest.raises(MalformedDocument, match="begins at token"):
        split_by_block(steps, 4)


@pytest.mark.parametrize("steps", [[Step(PREFILL, 0, 5)], [Step(DECODE, 0, 3), Step(PREFILL, 3, 5)]])
def test_a_prefill_step_across_a_block_boundary_is_refused(steps: list[Step]) -> None:
    with pytest.raises(MalformedDocument, match="boundary at 4"):
        split_by_block(steps, 4)


def test_no_steps_make_no_blocks() -> None:
    assert split_by_block([], 4) == []
    assert canonical_steps(7, 7, 4) == []


def test_prefill_is_one_call_and_decode_one_for_each_token() -> None:
    assert list(Step(PREFILL, 3, 6).calls()) == [(3, 6)]
    assert list(Step(DECODE, 3, 6).calls()) == [(3, 4), (4, 5), (5, 6)]


def test_appending_merges_decode_only() -> None:
    steps: list[Step] = []
    for step in (Step(PREFILL, 0, 2), Step(PREFILL, 2, 3), Step(DECODE, 3, 4), Step(DECODE, 4, 5), Step(PREFILL, 5, 6)):
        append_step(steps, step)
    assert steps == [Step(PREFILL, 0, 2), Step(PREFILL, 2, 3), Step(DECODE, 3, 5), Step(PREFILL, 5, 6)]


@given(st.sampled_from([PREFILL, DECODE]), st.integers(0, 2**26), st.integers(1, 2**20))
def test_a_step_survives_json(kind: str, start: int, length: int) -> None:
    step = Step(kind, start, start + length)
    assert Step.from_json(step.to_json()) == step


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        "prefill",
        [],
        ["prefill", 0],
        ["prefill", 0, 1, 2],
        ["Prefill", 0, 1],
        ["prefill ", 0, 1],
        ["", 0, 1],
        [1, 0, 1],
        ["prefill", 0, 0],
        ["prefill", 2, 1],
        ["prefill", -1, 1],
        ["prefill", "0", 1],
        ["prefill", 0, "1"],
        ["prefill", 0, None],
        ["prefill", False, 1],
        ["prefill", 0, True],
        ["decode", False, True],
        {"kind": "prefill", "start": 0, "stop": 1},
    ],
    ids=repr,
)
def test_what_is_no_step_is_refused(value: Any) -> None:
    with pytest.raises(MalformedDocument, match="not a step"):
        Step.from_json(value)
