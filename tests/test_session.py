"""Sessions: what users do with a model and a repository."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import families
import pytest
import torch
from places import WAYS, Place
from pushing import expire_pushes
from serving import reached
from test_api import serving
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typing_extensions import Buffer

from engine_adapter import GraftSession, open_repository
from engine_adapter.canary import GROUPED_ATTENTION
from engine_adapter.canary import measure as measure_canary
from engine_adapter.run import logits_sha256
from repo_service.client.http import HttpPush
from repo_service.domain.errors import (
    ChunkCorrupt,
    ContextTooLong,
    Divergence,
    FingerprintMismatch,
    InvalidInput,
    InvalidTokens,
    MalformedDocument,
)
from repo_service.domain.repository import Push, Repository
from repo_service.services.push import LocalPush
from repo_service.services.repository import LocalRepository

pytestmark = pytest.mark.everywhere

TEXT = "The keeper opens the lower sluice before the upper one, and writes the level of the river in the book. " * 8
TOKENS = random.Random(1).choices(range(3, 500), k=90)
SIZE = 16


@pytest.fixture(params=WAYS)
def repository(request: pytest.FixtureRequest, root: Place) -> Iterator[Repository]:
    with reached(request.param, root.as_uri()) as opened:
        yield opened


@pytest.fixture
def session(repository: Repository) -> Iterator[GraftSession]:
    with session_of(repository) as opened:
        yield opened


def session_of(
    repository: Repository, family: str = "gemma3", seed: int = 0, tokenizer: PreTrainedTokenizerFast | None = None
) -> GraftSession:
    model = families.build(family, torch.float32, "sdpa", seed)
    return GraftSession(model, tokenizer, repository, block_tokens=SIZE)


def subword_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that merges, so that a text's last token changes when more follows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.everywhere(always=True)
def test_generation_after_a_graft_is_the_fresh_one_token_by_token_and_logit_by_logit(session: GraftSession) -> None:
    session.deposit(TOKENS)
    grafted = session.generate(TOKENS, max_new_tokens=24)
    fresh = session.generate(TOKENS, max_new_tokens=24, graft=False)
    assert grafted.run.grafted_tokens == 80
    assert fresh.run.grafted_tokens == 0
    assert (grafted.tokens, grafted.logits_sha256) == (fresh.tokens, fresh.logits_sha256)


def test_llama_recipes_78_ids_are_matched_never_text(repository: Repository) -> None:
    tokenizer = subword_tokenizer()
    with session_of(repository, tokenizer=tokenizer) as session:
        stem = TEXT[: TEXT.index("sluice", 300) + 3]
        stored, prompt = tokenizer.encode(stem), tokenizer.encode(TEXT[: len(stem) + 60])
        assert stored != prompt[: len(stored)], "the last token must change for this test to say anything"
        shared = next(i for i, (a, b) in enumerate(zip(stored, prompt, strict=False)) if a != b)
        session.deposit(stem)
        run = session.prefill(TEXT[: len(stem) + 60])
        fresh = session.prefill(TEXT[: len(stem) + 60], graft=False)
        assert run.grafted_tokens == shared // SIZE * SIZE
        assert torch.equal(run.logits, fresh.logits)


@pytest.mark.parametrize("damage", ["altered", "truncated", "lost"])
def test_llama_cpp_27439_and_dynamo_15079_a_damaged_artifact_is_an_error_that_names_the_chunk(
    session: GraftSession, root: Place, damage: str
) -> None:
    info = session.deposit(TOKENS)
    record = session.repository.records(session.repository.manifest(info.id, "default"), "default")[1]
    digest = record.chunks["full/k"][0]
    path = root / "chunks" / digest[7:9] / digest[9:]
    data = path.read_bytes()
    if damage == "altered":
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "truncated":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    for use in (lambda: session.graft(info.id), lambda: session.prefill(TOKENS)):
        with pytest.raises(ChunkCorrupt, match=digest):
            use()
    assert session.prefill(TOKENS, graft=False).computed_tokens == len(TOKENS)


def test_llama_cpp_26676_what_was_grafted_and_computed_is_counted(session: GraftSession) -> None:
    session.deposit(TOKENS[:64])
    run = session.prefill(TOKENS)
    assert (run.grafted_tokens, run.computed_tokens) == (64, 26)
    run = session.graft(session.deposit(TOKENS).id)
    assert (run.grafted_tokens, run.computed_tokens) == (90, 0)


def test_a_second_deposit_computes_and_sends_only_what_is_new(session: GraftSession) -> None:
    first = session.deposit(TOKENS[:64])
    before = session.repository.stats("default")
    assert session.deposit(TOKENS[:64]).id == first.id
    second = session.deposit(TOKENS[:64] + TOKENS[:16])
    after = session.repository.stats("default")
    assert after.blocks == before.blocks + 1
    assert second.token_count == 80


@pytest.mark.parametrize("recorded", [False, True])
def test_a_push_that_expires_in_a_deposit_begins_again_and_sends_nothing_twice(
    session: GraftSession, root: Place, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    sent: list[str] = []
    kind: type[Push] = LocalPush if isinstance(session.repository, LocalRepository) else HttpPush
    put = kind.put

    def put_and_expire(push: Push, digest: str, data: Buffer) -> None:
        put(push, digest, data)
        sent.append(digest)
        if len(sent) == 7:
            expire_pushes(root)

    monkeypatch.setattr(kind, "put", put_and_expire)
    info = session.deposit(session.prefill(TOKENS, record=True) if recorded else TOKENS)
    assert len(sent) == len(set(sent)) > 7
    assert session.verify(info.id, samples=3).exact


def test_a_graft_takes_its_chunks_from_the_nodes_cache(root: Place, tmp_path: Path) -> None:
    with serving(root) as service, open_repository(service.url, cache=tmp_path / "node") as repository:
        with session_of(repository) as session:
            info = session.deposit(TOKENS)
            fresh = session.prefill(TOKENS, graft=False).logits
        for path in (root / "chunks").rglob("*"):
            if path.is_file():
                path.unlink()
        with open_repository(service.url, cache=tmp_path / "node") as again, session_of(again) as session:
            assert torch.equal(session.graft(info.id).logits, fresh)


def test_private_tokens_stay_private_and_are_needed_to_graft(session: GraftSession) -> None:
    info = session.deposit(TOKENS, private_tokens=True, tag="private")
    assert info.private_tokens
    with pytest.raises(InvalidTokens, match="private"):
        session.graft("private")
    with pytest.raises(MalformedDocument, match="key"):
        session.graft("private", tokens=TOKENS[::-1])
    run = session.graft("private", tokens=TOKENS)
    assert torch.equal(run.logits, session.prefill(TOKENS, graft=False).logits)
    assert session.prefill(TOKENS).grafted_tokens == 80


def test_a_run_that_was_not_recorded_cannot_be_deposited(session: GraftSession) -> None:
    with pytest.raises(InvalidInput, match="record=True"):
        session.deposit(session.prefill(TOKENS))


def test_verify_reports_every_block_and_sample_and_what_inexact_use_costs_transformers_25420(
    session: GraftSession,
) -> None:
    info = session.deposit(TOKENS)
    report = session.verify(info.id, samples=8, inexact=True)
    assert report.exact
    assert [(check.start, check.stop) for check in report.blocks] == [
        (i, min(i + SIZE, len(TOKENS))) for i in range(0, len(TOKENS), SIZE)
    ]
    assert (report.grafted.equal, report.grafted.argmax_agree, report.grafted.kl_max) == (8, 8, 0.0)
    ways = {comparison.name: comparison for comparison in report.inexact}
    assert set(ways) == {"full prefill", "moved by 8", "moved by 128", "moved by 1024"}
    assert not any(comparison.exact for comparison in ways.values())
    assert ways["moved by 1024"].kl_max > ways["full prefill"].kl_max > 0


def test_an_artifact_that_lies_is_found_by_verify_and_by_the_next_honest_deposit(repository: Repository) -> None:
    with session_of(repository) as honest, session_of(repository, seed=1) as liar:
        liar.fingerprint = honest.fingerprint
        liar.require_unchanged = lambda: None  # type: ignore[method-assign]
        info = liar.deposit(TOKENS)
        report = honest.verify(info.id, samples=4)
        assert not report.exact
        assert not any(check.equal for check in report.blocks)
        assert report.grafted.equal == 0
        with pytest.raises(Divergence):
            honest.deposit(TOKENS, graft=False)
        assert repository.stats("default").divergences == 1


def test_an_artifact_that_fills_the_window_is_verified_and_its_end_has_logits(repository: Repository) -> None:
    tokens = random.Random(2).choices(range(3, 500), k=2048)
    with GraftSession(families.build("llama", torch.float32, "sdpa"), None, repository, block_tokens=256) as session:
        info = session.deposit(tokens, tag="whole")
        assert session.verify(info.id, samples=5).exact
        run = session.graft("whole")
        assert logits_sha256(run.logits) == logits_sha256(session.prefill(tokens).logits)
        with pytest.raises(ContextTooLong):
            session.extend(run, [5])
        assert len(session.generate(run, max_new_tokens=10).tokens) == 1


def test_a_text_behind_others_gets_no_beginning_of_its_own(repository: Repository) -> None:
    """The tokenizer's first token in the middle of a context is another context."""
    with session_of(repository, tokenizer=families.tiny_tokenizer(begins=True)) as session:
        run = session.prefill(TEXT[:50])
        session.extend(run, TEXT[50:60])
        assert run.tokens[0] == 1
        assert run.tokens.count(1) == 1
        assert session.tokenizer.decode(run.tokens, skip_special_tokens=True) == TEXT[:60]
        assert (
            session.extend(session.new_run(), TEXT[:50]).tokens == run.tokens[: -len(session.encode(TEXT[50:60])) + 1]
        )


def test_a_text_is_found_by_its_words_only_where_it_was_given(repository: Repository) -> None:
    from repo_service.domain.views import ArtifactQuery

    with session_of(repository, tokenizer=families.tiny_tokenizer()) as session:
        session.deposit(TEXT[:100], text=TEXT[:100], annotations={"source": "handbook"})
        session.deposit(TEXT[:90])
    page = repository.query(ArtifactQuery(text="sluice"))
    assert page.count == 1
    assert page.items[0].annotations == {"source": "handbook"}


@pytest.mark.parametrize(
    "annotations", [{"a": 1}, {"a": "x" * 5000}, {"": "x"}, {str(i): "x" for i in range(200)}, {1: "x"}]
)
def test_annotations_that_could_not_be_read_again_are_refused_before_any_work(
    session: GraftSession, annotations: dict[str, str]
) -> None:
    with pytest.raises(MalformedDocument, match="annotation"):
        session.deposit(TOKENS, annotations=annotations)
    assert session.repository.stats("default").artifacts == 0


@pytest.mark.parametrize("tokens", [None, b"\1\2", 7])
def test_what_is_no_prompt_is_refused(session: GraftSession, tokens: object) -> None:
    with pytest.raises(InvalidTokens):
        session.prefill(tokens)  # type: ignore[arg-type]


def test_a_thread_count_changed_under_a_session_is_measured_again(session: GraftSession) -> None:
    info = session.deposit(TOKENS)
    before = torch.get_num_threads()
    sections = session.fingerprint.sections
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        # Some processors compute other bits with other threads, and some do not.
        if measure_canary(session.model, SIZE) == sections["canary"]:
            assert session.graft(info.id).grafted_tokens == len(TOKENS)
        else:
            with pytest.raises(FingerprintMismatch, match="canary"):
                session.graft(info.id)
        sections["canary"] = {**sections["canary"], "step 0+16 logits": "sha256:" + "0" * 64}
        session.fingerprint = type(session.fingerprint)(sections)
        with pytest.raises(FingerprintMismatch, match="canary"):
            session.graft(info.id)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_attention_is_shared_where_bits_are_equal(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.delenv(GROUPED_ATTENTION, raising=False)
    model = families.build("llama", dtype, "sdpa", 0)
    with GraftSession(model, None, repository, block_tokens=SIZE) as plain:
        info = plain.deposit(TOKENS)
        fresh = plain.prefill([*TOKENS, 5, 6], graft=False)
        monkeypatch.setenv(GROUPED_ATTENTION, "1")
        with GraftSession(model, None, repository, block_tokens=SIZE) as grouped:
            assert grouped.fingerprint.id == plain.fingerprint.id
            run = grouped.prefill([*TOKENS, 5, 6])
            assert run.artifact_id == info.id
            assert torch.equal(run.logits, fresh.logits)
        assert plain.graft(info.id).grafted_tokens == len(TOKENS), "measured again, and found equal"


def test_ids_beyond_the_vocabulary_are_refused_when_a_run_goes_on(session: GraftSession) -> None:
    run = session.prefill(TOKENS)
    for ids in ([session.vocabulary], [-1]):
        with pytest.raises(InvalidTokens, match="not a token id of this model"):
            session.extend(run, ids)
    assert len(run.tokens) == len(TOKENS)
