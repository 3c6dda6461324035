"""Fingerprints: every field counts, no two can be confused, and a refusal names what differs (I1)."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_canonical import canonical_values, typed

from repo_service.domain.errors import FingerprintMismatch, MalformedDocument
from repo_service.domain.fingerprint import ABSENT, MODEL_SECTIONS, SECTIONS, Fingerprint

Path = tuple[str | int, ...]


def digest(text: str) -> str:
    return "sha256:" + text.encode().hex().ljust(64, "0")


def realistic() -> dict[str, dict[str, Any]]:
    """What a session measures on a model with two kinds of layers, two adapters and a chat template."""
    arrays = [
        {"name": name, "dtype": "bfloat16", "heads": 8, "dim": 128, "chunk_layers": 4, "chunk_heads": 8}
        for name in ("k", "v")
    ]
    sliding = {"rope_type": "default", "rope_theta": {"float": "0x1.3880000000000p+13"}}
    return {
        "model": {
            "architecture": "ExampleForCausalLM",
            "config": {
                "attention_bias": False,
                "attention_dropout": {"float": "0x0.0p+0"},
                "bos_token_id": 2,
                "eos_token_id": [1, 106],
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 2560,
                "initializer_range": {"float": "0x1.47ae147ae147bp-6"},
                "intermediate_size": 10240,
                "layer_types": ["sliding_attention", "full_attention"] * 4,
                "max_position_embeddings": 131072,
                "num_attention_heads": 16,
                "num_hidden_layers": 8,
                "num_key_value_heads": 8,
                "pad_token_id": 0,
                "query_pre_attn_scalar": 256,
                "rms_norm_eps": {"float": "0x1.0c6f7a0b5ed8dp-20"},
                "rope_parameters": {
                    "sliding_attention": sliding,
                    "full_attention": {"rope_type": "linear", "factor": {"float": "0x1.0000000000000p+3"}},
                },
                "sliding_window": 1024,
                "tie_word_embeddings": True,
                "vocab_size": 262208,
            },
            "dtype": "torch.bfloat16",
            "weights": digest("weights"),
            "modules": digest("modules"),
            "quantization": None,
            "adapters": {
                "active": ["support", "tone"],
                "configs": {
                    "support": {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "salt": "a1"},
                    "tone": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "salt": "b2"},
                },
            },
            "tokenizer": digest("tokenizer"),
            "chat_template": digest("template"),
        },
        "positions": {
            "rope": {"sliding_attention": sliding, "full_attention": {"rope_type": "linear", "factor": 8}},
            "max_position_embeddings": 131072,
            "tables": {"model.rotary_emb": digest("table"), "model.rotary_emb_local": digest("local table")},
        },
        "state": {
            "groups": [
                {"name": "sliding", "kind": "sliding", "layers": [0, 2, 4, 6], "window": 1024, "arrays": arrays},
                {"name": "full", "kind": "full", "layers": [1, 3, 5, 7], "window": None, "arrays": arrays},
            ]
        },
        "schedule": {
            "version": 1,
            "block_tokens": 256,
            "batch": 1,
            "prefill": "one call up to each multiple of block_tokens",
            "decode": "one token a call",
            "logits_to_keep": 1,
        },
        "numerics": {
            "engine": "transformers",
            "engine_version": "5.24.0",
            "attention": "sdpa",
            "torch": "2.13.0+cpu",
            "matmul_precision": "highest",
            "deterministic": False,
            "device": "cpu",
            "cpu_capability": "AVX512",
            "builds": digest("builds"),
            "mkldnn": True,
            "sdp": {"flash": True, "memory_efficient": True, "math": True},
        },
        "canary": {
            "version": 1,
            "probes": {name: digest(name) for name in ("block", "partial", "decode", "head", "deep block")},
        },
    }


BASE = Fingerprint(realistic())


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of the values that are no lists or objects, or are empty ones."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [leaf for key, child in children for leaf in leaves(child, (*path, key))]
    yield from inner or [path]


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """A copy along the path that has ``new`` at its end, or lacks its end where ``new`` is `ABSENT`."""
    copy = value.copy()
    if len(path) > 1:
        copy[path[0]] = replaced(value[path[0]], path[1:], new)
    elif new is ABSENT:
        del copy[path[0]]
    else:
        copy[path[0]] = new
    return copy


def dotted(path: Path) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def changed(value: Any, choice: random.Random) -> Any:
    """Another value, near the one given."""
    others: list[Any] = [None, True, False, 0, 1, "", "0", [], {}, [value], {"value": value}, str(value)]
    if isinstance(value, str):
        position = choice.randrange(len(value))
        others += [value + " ", value.upper(), value[::-1], value[:-1], value[:position] + "~" + value[position + 1 :]]
    elif isinstance(value, int):
        others += [value + 1, value - 1, -value, value * 2, not value]
    return choice.choice([other for other in others if typed(other) != typed(value)])


def other(*changes: tuple[Path, Any], base: Fingerprint = BASE) -> Fingerprint:
    sections = base.sections
    for path, value in changes:
        sections = replaced(sections, path, value)
    return Fingerprint(sections)


def refused_fields(here: Fingerprint, there: Fingerprint) -> list[str]:
    with pytest.raises(FingerprintMismatch) as caught:
        here.require_equal(there, "the artifact")
    error = caught.value
    assert error.details["fingerprint_id"] == here.id
    assert error.details["other_fingerprint_id"] == there.id
    fields: list[str] = error.details["fields"]
    assert all(field in error.message for field in fields[:8])
    return fields


PATHS = list(leaves(BASE.sections))
TEXTS = [path for path in PATHS if isinstance(at(BASE.sections, path), str)]
REMOVABLE = [path for path in PATHS if isinstance(path[-1], str)]


def mutation(choice: random.Random) -> tuple[str, list[tuple[Path, Any]]]:
    """A kind of change to one field, or a swap of two texts, and what it puts where."""
    kind = choice.choices(["change", "swap", "removal", "addition"], [50, 35, 10, 5])[0]
    if kind == "swap":
        while True:
            a, b = choice.sample(TEXTS, 2)
            one, two = at(BASE.sections, a), at(BASE.sections, b)
            if one != two:
                return kind, [(a, two), (b, one)]
    if kind == "addition":
        return kind, [((choice.choice(SECTIONS), f"new-{choice.random()}"), choice.choice([None, "", 0]))]
    path = choice.choice(REMOVABLE if kind == "removal" else PATHS)
    return kind, [(path, ABSENT if kind == "removal" else changed(at(BASE.sections, path), choice))]


def test_i1_ten_thousand_wrong_artifacts_are_refused_by_field() -> None:
    choice = random.Random(20240607)
    covered: dict[str, set[Path]] = defaultdict(set)
    for _ in range(10_000):
        kind, changes = mutation(choice)
        there = other(*changes)
        assert there.id != BASE.id
        assert refused_fields(BASE, there) == sorted(dotted(path) for path, _ in changes)
        covered[kind].update(path for path, _ in changes)
    assert covered["change"] == set(PATHS)
    assert covered["swap"] == set(TEXTS)
    assert covered["removal"] == set(REMOVABLE)


def test_vllm_44701_fields_that_collide_by_concatenation_stay_apart() -> None:
    splits = [
        {"name": "support", "salt": "a1", "cache": "x"},
        {"name": "supporta1", "salt": "", "cache": "x"},
        {"name": "", "salt": "supporta1", "cache": "x"},
        {"name": "supporta", "salt": "1x", "cache": ""},
        {"name": "support", "salt": "a", "cache": "1x"},
        {"name": "support", "salta1": "", "cache": "x"},
        {"name": "support", "salt": "a1cachex"},
        {"namesupport": "salt", "a1": "cachex"},
        {"name": "a1", "salt": "support", "cache": "x"},
        {"name": "support,salt=a1", "salt": "", "cache": "x"},
        {"name": ["support", "a1"], "cache": "x"},
        {"name": ["support", ["a1"]], "cache": "x"},
        {"name": 'support","salt":"a1', "cache": "x"},
    ]
    made = [other((("model", "adapters"), fields)) for fields in splits]
    assert len({fingerprint.id for fingerprint in made}) == len(splits)
    assert len({fingerprint.model_id for fingerprint in made}) == len(splits)
    for here, there in itertools.permutations(made, 2):
        assert all(field.startswith("model.adapters") for field in refused_fields(here, there))


@settings(deadline=None)
@given(st.text(min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_vllm_44701_no_cut_of_one_text_into_fields_equals_another(text: str, i: int, j: int) -> None:
    one, two = (other((("model", "adapters"), {"name": text[:cut], "salt": text[cut:]})) for cut in (i, j))
    assert (one.id == two.id) == (text[:i] == text[:j])


def test_sglang_24758_another_models_weights_under_the_same_name_are_refused() -> None:
    there = other((("model", "weights"), digest("weights'")))
    assert refused_fields(BASE, there) == ["model.weights"]
    assert there.model_id != BASE.model_id


def test_vllm_56311_another_rope_scaling_is_refused() -> None:
    scaled = other((("positions", "rope", "full_attention", "factor"), 16))
    assert refused_fields(BASE, scaled) == ["positions.rope.full_attention.factor"]
    table = other((("positions", "tables", "model.rotary_emb"), digest("other table")))
    assert refused_fields(BASE, table) == ["positions.tables.model.rotary_emb"]
    assert len({BASE.model_id, scaled.model_id, table.model_id}) == 3


def test_vllm_49438_float16_and_bfloat16_state_is_never_shared() -> None:
    half = other((("model", "dtype"), "torch.float16"), (("state", "groups", 1, "arrays", 0, "dtype"), "float16"))
    assert refused_fields(BASE, half) == ["model.dtype", "state.groups[1].arrays[0].dtype"]
    assert half.model_id != BASE.model_id


@pytest.mark.parametrize("section", SECTIONS)
def test_model_id_covers_model_positions_and_state_only(section: str) -> None:
    there = other(((section, "x"), 1))
    assert there.id != BASE.id
    assert (there.model_id != BASE.model_id) == (section in MODEL_SECTIONS)


def test_moving_a_field_to_another_section_is_refused() -> None:
    there = other((("numerics", "attention"), ABSENT), (("schedule", "attention"), "sdpa"))
    assert refused_fields(BASE, there) == ["numerics.attention", "schedule.attention"]


@pytest.mark.parametrize("value", [None, "", "absent", "None", 0, False, [], {}], ids=repr)
def test_a_field_that_is_absent_differs_from_every_value(value: Any) -> None:
    there = other((("model", "adapters"), value))
    without = other((("model", "adapters"), ABSENT))
    assert refused_fields(there, without) == ["model.adapters"]
    assert there.differences(without) == {"model.adapters": (value, ABSENT)}
    assert without.differences(there) == {"model.adapters": (ABSENT, value)}


def test_a_list_of_another_length_is_named_whole() -> None:
    there = other((("state", "groups"), BASE.sections["state"]["groups"][:1]))
    assert refused_fields(BASE, there) == ["state.groups"]


def test_a_refusal_lists_eight_fields_and_counts_the_rest() -> None:
    there = other(*((("numerics", f"flag-{i:02}"), True) for i in range(20)))
    with pytest.raises(FingerprintMismatch, match="and 12 more fields") as caught:
        BASE.require_equal(there, "the artifact")
    assert caught.value.details["fields"] == [f"numerics.flag-{i:02}" for i in range(20)]


def test_a_refusal_stays_short_whatever_the_values_are() -> None:
    there = other((("model", "config"), {"text": "x" * 10**6}))
    with pytest.raises(FingerprintMismatch) as caught:
        BASE.require_equal(there, "the artifact")
    assert len(caught.value.message) < 2000


def test_equal_fingerprints_are_accepted_whatever_the_order_of_their_fields() -> None:
    def reversed_order(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reversed_order(value[key]) for key in reversed(value)}
        return [reversed_order(item) for item in value] if isinstance(value, list) else value

    there = Fingerprint(reversed_order(realistic()))
    assert (there.id, there.model_id) == (BASE.id, BASE.model_id)
    assert not BASE.differences(there)
    BASE.require_equal(there, "the artifact")


@settings(deadline=None)
@given(st.dictionaries(st.text("ab.", max_size=3), canonical_values), st.dictionaries(st.text(), canonical_values))
def test_ids_are_equal_exactly_if_no_field_differs(one: dict[str, Any], two: dict[str, Any]) -> None:
    here, there = (other((("numerics",), fields)) for fields in (one, two))
    equal = typed(one) == typed(two)
    assert (here.id == there.id) == equal
    assert (not here.differences(there)) == equal


@pytest.mark.parametrize(
    "sections",
    [
        {},
        [],
        None,
        {name: {} for name in SECTIONS[1:]},
        {**realistic(), "extra": {}},
        {**realistic(), "canary": None},
        {**realistic(), "canary": []},
        {**realistic(), "canary": {"probe": 0.5}},
        {**realistic(), "canary": {1: "probe"}},
        {**realistic(), "canary": {"probe": "\ud800"}},
        {**realistic(), "canary": {"probe": 2**64}},
        {**realistic(), "canary": {"probe": b"x"}},
    ],
    ids=lambda sections: ascii(sections)[-40:],
)
def test_what_is_no_fingerprint_is_refused_at_once(sections: Any) -> None:
    with pytest.raises(MalformedDocument):
        Fingerprint(sections)


def test_a_fingerprint_as_deep_as_allowed_has_ids_and_one_deeper_is_refused() -> None:
    value: Any = 1
    for _ in range(61):
        value = [value]
    assert other((("model", "deep"), value)).id != BASE.id
    with pytest.raises(MalformedDocument, match="nested"):
        other((("model", "deep"), [value]))
