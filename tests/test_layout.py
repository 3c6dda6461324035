"""Layouts: sizes within their limits, and refusals of those that are not."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import fingerprint

from repo_service.domain.errors import KvgraftError, MalformedDocument
from repo_service.domain.layout import (
    DTYPE_BYTES,
    GROUP_KINDS,
    MAX_BLOCK_CHUNKS,
    MAX_CHUNK_BYTES,
    MAX_DIMENSION,
    ArrayLayout,
    ChunkSpec,
    LayerGroup,
    Layout,
    chunk_split,
)
from repo_service.domain.record import MAX_RECORD_BYTES

ARRAY = {"name": "k", "dtype": "bfloat16", "heads": 2, "dim": 4, "chunk_layers": 1, "chunk_heads": 2}
GROUP = {"name": "full", "kind": "full", "layers": [0, 1], "window": None, "arrays": [ARRAY]}

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=32)


def layout_of(groups: Any, block_tokens: Any = 16) -> Layout:
    return Layout.of(fingerprint(state={"groups": groups}, schedule={"block_tokens": block_tokens}))


def layout_with(array: dict[str, Any] | None = None, *, block_tokens: Any = 16, **group: Any) -> Layout:
    return layout_of([{**GROUP, "arrays": [{**ARRAY, **(array or {})}], **group}], block_tokens)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    block_tokens = draw(st.integers(1, 64))
    first = 0
    groups = []
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        layers = draw(st.integers(1, 12))
        arrays = []
        for array_name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
            heads, dim, dtype = draw(
                st.tuples(st.integers(1, 12), st.integers(1, 64), st.sampled_from(list(DTYPE_BYTES)))
            )
            split = chunk_split(layers, heads, block_tokens, dim, dtype)
            arrays.append(ArrayLayout(array_name, dtype, layers, heads, dim, block_tokens, *split))
        kind = draw(st.sampled_from(GROUP_KINDS))
        window = draw(st.integers(1, 4096)) if kind == "sliding" else None
        groups.append(LayerGroup(name, kind, tuple(range(first, first + layers)), window, tuple(arrays)))
        first += layers
    return Layout(block_tokens, tuple(groups))


@settings(deadline=None)
@given(layouts())
def test_a_layout_survives_its_fingerprint(layout: Layout) -> None:
    assert layout_of([group.to_json() for group in layout.groups], layout.block_tokens) == layout


@settings(deadline=None)
@given(layouts())
def test_chunks_cover_a_block_exactly_in_the_order_of_arrays_layers_and_heads(layout: Layout) -> None:
    chunks = list(layout.chunks())
    order = list(layout.arrays)
    assert chunks == sorted(set(chunks), key=lambda ref: (order.index(ref.array), ref.index))
    assert sum(layout.arrays[ref.array].chunk.size for ref in chunks) == layout.block_bytes
    for name, array in layout.arrays.items():
        cells = [
            (i * array.chunk_layers + layer, j * array.chunk_heads + head)
            for ref in chunks
            if ref.array == name
            for i, j in [ref.index]
            for layer in range(array.chunk_layers)
            for head in range(array.chunk_heads)
        ]
        assert sorted(cells) == [(layer, head) for layer in range(array.layers) for head in range(array.heads)]


@pytest.mark.parametrize(("dtype", "width"), DTYPE_BYTES.items())
def test_sizes_follow_dtype_and_shape(dtype: str, width: int) -> None:
    array = layout_with({"dtype": dtype}).arrays["full/k"]
    assert array.shape(7) == (7, 2, 2, 16, 4)
    assert array.chunk == ChunkSpec(dtype, (1, 1, 2, 16, 4))
    assert array.chunk.size == 128 * width
    assert layout_with({"dtype": dtype}).block_bytes == 256 * width


@settings(deadline=None)
@given(
    st.integers(1, 256),
    st.integers(1, 256),
    st.integers(1, 4096),
    st.integers(1, 512),
    st.sampled_from(list(DTYPE_BYTES)),
)
def test_chunks_are_as_large_as_divides_evenly_into_8_mib(
    layers: int, heads: int, block_tokens: int, dim: int, dtype: str
) -> None:
    head_bytes = block_tokens * dim * DTYPE_BYTES[dtype]
    chunk_layers, chunk_heads = chunk_split(layers, heads, block_tokens, dim, dtype)
    assert layers % chunk_layers == heads % chunk_heads == 0
    assert chunk_layers * chunk_heads * head_bytes <= MAX_CHUNK_BYTES
    larger_layers = [d for d in range(chunk_layers + 1, layers + 1) if layers % d == 0]
    larger_heads = [d for d in range(chunk_heads + 1, heads + 1) if heads % d == 0]
    if chunk_heads == heads:
        assert all(d * heads * head_bytes > MAX_CHUNK_BYTES for d in larger_layers)
    else:
        assert chunk_layers == 1
        assert all(d * head_bytes > MAX_CHUNK_BYTES for d in larger_heads)


def test_one_head_beyond_a_chunk_asks_for_smaller_blocks() -> None:
    assert chunk_split(3, 5, 2**16, 64, "bfloat16") == (1, 1)
    with pytest.raises(MalformedDocument, match="use smaller blocks"):
        chunk_split(3, 5, 2**16 + 1, 64, "bfloat16")


def test_a_chunk_has_at_most_8_mib() -> None:
    largest = layout_with({"heads": 1, "dim": 2**18, "chunk_heads": 1})
    assert largest.arrays["full/k"].chunk.size == MAX_CHUNK_BYTES
    for array in (
        {"heads": 1, "dim": 2**18 + 1, "chunk_heads": 1},
        {"heads": 2, "dim": 2**18, "chunk_heads": 2},
        {"heads": 1, "dim": 2**18, "chunk_heads": 1, "chunk_layers": 2},
        {"heads": 1, "dim": 2**18, "chunk_heads": 1, "dtype": "float32"},
    ):
        with pytest.raises(MalformedDocument, match="8388608"):
            layout_with(array)


@pytest.mark.parametrize(
    "array",
    [
        {"heads": MAX_DIMENSION, "dim": MAX_DIMENSION, "chunk_heads": MAX_DIMENSION},
        {"heads": MAX_DIMENSION + 1, "chunk_heads": 1},
        {"dim": MAX_DIMENSION + 1},
        {"dim": 2**63 - 1},
        {"heads": 2**63 - 1, "chunk_heads": 2**63 - 1},
        {"heads": 2**32, "dim": 2**32, "chunk_heads": 1},
    ],
    ids=repr,
)
def test_a_shape_that_overflows_is_refused(array: dict[str, Any]) -> None:
    with pytest.raises(MalformedDocument):
        layout_with(array)


def test_more_chunks_than_a_record_can_list_are_refused() -> None:
    shortest = len('"blake3:",') + 64
    assert MAX_BLOCK_CHUNKS * shortest > MAX_RECORD_BYTES
    layout_with({"heads": MAX_BLOCK_CHUNKS // 2, "chunk_heads": 1})
    with pytest.raises(MalformedDocument, match="chunks"):
        layout_with({"heads": MAX_BLOCK_CHUNKS // 2 + 1, "chunk_heads": 1})
    with pytest.raises(MalformedDocument, match="chunks"):
        layout_with({"heads": MAX_DIMENSION, "chunk_heads": 1}, layers=list(range(4096)))
    with pytest.raises(MalformedDocument, match="chunks"):
        layout_of(
            [{**GROUP, "name": f"g{i}", "arrays": [{**ARRAY, "heads": 2**12, "chunk_heads": 1}]} for i in range(64)]
        )


@pytest.mark.parametrize("field", ["heads", "dim", "chunk_layers", "chunk_heads"])
@pytest.mark.parametrize("value", [0, -1, None, True, "1", [1], {}], ids=repr)
def test_a_dimension_is_a_positive_integer(field: str, value: Any) -> None:
    with pytest.raises(MalformedDocument, match=f"{field} is "):
        layout_with({field: value})
    without = {name: item for name, item in ARRAY.items() if name != field}
    with pytest.raises(MalformedDocument, match=f"{field} is None"):
        layout_of([{**GROUP, "arrays": [without]}])


@pytest.mark.parametrize(
    ("heads", "layers", "chunk_heads", "chunk_layers"),
    [(6, 6, 4, 1), (6, 6, 1, 4), (6, 6, 5, 5), (2, 6, 4, 1), (6, 2, 1, 4)],
)
def test_chunks_divide_layers_and_heads(heads: int, layers: int, chunk_heads: int, chunk_layers: int) -> None:
    array = {"heads": heads, "chunk_heads": chunk_heads, "chunk_layers": chunk_layers}
    with pytest.raises(MalformedDocument, match=r"evenly|chunk_(layers|heads) is"):
        layout_with(array, layers=list(range(layers)))


@pytest.mark.parametrize("value", [0, -1, 2**20 + 1, None, True, "256", [256]], ids=repr)
def test_block_tokens_lies_in_its_range(value: Any) -> None:
    with pytest.raises(MalformedDocument, match="block_tokens"):
        layout_with(block_tokens=value)


@pytest.mark.parametrize(
    "name",
    ["", "x" * 33, "K", "k/v", "..", ".", "k_v", "k v", "k\n", "\u0660", "\uff4b", "/k", None, 1, ["k"]],
    ids=ascii,
)
def test_a_name_that_is_no_zarr_node_is_refused(name: Any) -> None:
    with pytest.raises(MalformedDocument):
        layout_with({"name": name})
    with pytest.raises(MalformedDocument):
        layout_with(name=name)


@pytest.mark.parametrize(
    "group",
    [
        {"kind": "ful"},
        {"kind": None},
        {"layers": []},
        {"layers": [1, 0]},
        {"layers": [0, 0]},
        {"layers": [-1]},
        {"layers": [False, True]},
        {"layers": ["0"]},
        {"layers": [[0]]},
        {"layers": {"0": 0}},
        {"layers": list(range(4097))},
        {"layers": None},
        {"window": 0},
        {"window": -1},
        {"window": True},
        {"window": "1024"},
        {"window": MAX_DIMENSION + 1},
        {"arrays": []},
        {"arrays": [ARRAY, ARRAY]},
        {"arrays": [{**ARRAY, "name": f"k{i}"} for i in range(9)]},
        {"arrays": [None]},
        {"arrays": [[]]},
        {"arrays": ARRAY},
        {"arrays": None},
    ],
    ids=lambda group: repr(group)[:40],
)
def test_a_malformed_group_is_refused(group: dict[str, Any]) -> None:
    with pytest.raises(MalformedDocument):
        layout_of([{**GROUP, **group}])


@pytest.mark.parametrize("field", GROUP)
def test_a_group_has_all_its_fields(field: str) -> None:
    with pytest.raises(MalformedDocument):
        layout_of([{name: value for name, value in GROUP.items() if name != field}])


@pytest.mark.parametrize(
    "groups",
    [None, [], {}, "full", [None], [[]], [GROUP, GROUP], [{**GROUP, "name": f"g{i}"} for i in range(65)]],
    ids=lambda g: repr(g)[:30],
)
def test_malformed_lists_of_groups_are_refused(groups: Any) -> None:
    with pytest.raises(MalformedDocument):
        layout_of(groups)


@pytest.mark.parametrize("dtype", ["float64", "bf16", "torch.bfloat16", "int8", "auto", "", None, 2], ids=repr)
def test_vllm_49438_the_dtype_is_one_of_those_known_never_auto(dtype: Any) -> None:
    with pytest.raises(MalformedDocument):
        layout_with({"dtype": dtype})


def test_any_state_section_gives_a_layout_within_limits_or_our_error() -> None:
    choice = random.Random(7)
    strange: list[Any] = [
        None,
        True,
        0,
        -1,
        1,
        2,
        3,
        8,
        2**12,
        2**20,
        MAX_DIMENSION,
        2**63 - 1,
        "",
        "full",
        "k",
        [],
        {},
    ]
    accepted = 0
    for _ in range(5000):
        arrays = [dict(ARRAY, name=f"a{i}") for i in range(choice.randrange(1, 4))]
        groups = [dict(GROUP, name=f"g{i}", arrays=[dict(array) for array in arrays]) for i in range(2)]
        for _ in range(choice.randrange(1, 4)):
            group = choice.choice(groups)
            target = choice.choice([group, *group["arrays"]]) if isinstance(group["arrays"], list) else group
            target[choice.choice(list(target))] = choice.choice(strange)
        try:
            layout = layout_of(groups, choice.choice([1, 16, 256, 2**20]))
        except KvgraftError:
            continue
        accepted += 1
        assert all(0 < array.chunk.size <= MAX_CHUNK_BYTES for array in layout.arrays.values())
        assert sum(math.prod(array.grid) for array in layout.arrays.values()) <= MAX_BLOCK_CHUNKS
        assert layout_of([group.to_json() for group in layout.groups], layout.block_tokens) == layout
    assert accepted > 100
