"""Grafts of artifacts that store of sliding layers only what a resume needs: the bits of a fresh run (I1)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import families
import pytest
import torch
from exactness import fresh_logits, sha256
from places import WAYS, Place
from serving import reached
from shelves import BLOCK, library_in, read, write_documents
from test_api import serving

from engine_adapter import GraftSession
from engine_adapter.deposit import deposit_in_stages
from engine_adapter.library import STAGE, _of_kind
from engine_adapter.run import Run
from repo_service.cli.main import main
from repo_service.client import open_repository
from repo_service.domain.errors import InvalidInput, NotStored
from repo_service.domain.repository import Repository
from repo_service.domain.schedule import DECODE, Step, canonical_steps

pytestmark = pytest.mark.everywhere

SIZE = 16
WINDOW = 64
TOKENS = random.Random(2).choices(range(3, 500), k=200)
LAST = 192


@pytest.fixture
def session(repository: Repository) -> Iterator[GraftSession]:
    with session_of(repository) as opened:
        yield opened


@pytest.fixture(params=WAYS)
def repository(request: pytest.FixtureRequest, root: Place) -> Iterator[Repository]:
    with reached(request.param, root.as_uri()) as opened:
        yield opened


def session_of(repository: Repository, dtype: str = "float32", family: str = "gemma3") -> GraftSession:
    model = families.build(family, getattr(torch, dtype), "sdpa")
    return GraftSession(model, None, repository, block_tokens=SIZE)


def assert_fresh(session: GraftSession, run: Run, tokens: list[int], steps: list[Step] | None = None) -> None:
    assert run.tokens == tokens
    fresh = fresh_logits(session.model, tokens, steps or canonical_steps(0, len(tokens), SIZE))
    assert sha256(run.logits) == sha256(fresh)


@pytest.mark.parametrize(("way", "dtype"), [("embedded", "bfloat16"), ("service", "float32")])
def test_i1_a_graft_of_an_artifact_in_part_is_the_fresh_run(root: Place, way: str, dtype: str) -> None:
    with ExitStack() as stack:
        url = root.as_uri() if way == "embedded" else stack.enter_context(serving(root)).url
        repository = stack.enter_context(open_repository(url))
        session = stack.enter_context(session_of(repository, dtype))
        for count in (WINDOW + SIZE, 176, 177):
            tokens = random.Random(count).choices(range(3, 500), k=count)
            info = session.deposit(tokens, sliding="resume")
            last = (count - 1) // SIZE * SIZE
            assert repository.manifest(info.id, "default").resume_from == (last if last - WINDOW + 1 >= SIZE else 0)
            assert repository.check(info.id, "default").bytes == info.total_bytes
            run = session.graft(info.id)
            assert_fresh(session, run, tokens)
            more = [7, 8, 9] * 8
            session.extend(run, more)
            steps = [*canonical_steps(0, count, SIZE), *canonical_steps(count, count + len(more), SIZE)]
            assert_fresh(session, run, tokens + more, steps)
            for prompt in (tokens, tokens[:last] + more):
                matched = session.prefill(prompt)
                assert matched.grafted_tokens == last
                assert_fresh(session, matched, prompt)
            assert session.verify(info.id, samples=3).exact


def test_a_prompt_that_leaves_the_artifact_early_is_computed(session: GraftSession) -> None:
    info = session.deposit(TOKENS, sliding="resume")
    run = session.prefill(TOKENS[:100])
    assert run.grafted_tokens == 0
    assert_fresh(session, run, TOKENS[:100])
    manifest, records, ids = session.load(info.id)
    for position in (SIZE, 100 // SIZE * SIZE, LAST - SIZE):
        with pytest.raises(NotStored, match=f"at token {position}: .* from token {LAST} on"):
            session.restore(manifest, records, ids, position)
    assert session.restore(manifest, records, ids, LAST).grafted_tokens == LAST
    assert session.restore(manifest, records, ids, 0).grafted_tokens == 0


def test_a_whole_deposit_after_one_in_part_is_whole(session: GraftSession) -> None:
    part = session.deposit(TOKENS, sliding="resume")
    whole = session.deposit(TOKENS)
    assert whole.total_bytes > part.total_bytes
    assert session.repository.check(whole.id, "default").ok
    assert session.prefill(TOKENS[:100]).grafted_tokens == 96
    again = session.deposit([*TOKENS, 5], sliding="resume")
    assert session.repository.stats("default").divergences == 0
    session.repository.delete(whole.id, "default")
    for info in (part, again):
        assert session.repository.check(info.id, "default").ok
        assert_fresh(session, session.graft(info.id), session.load(info.id)[2])


def test_a_run_from_an_artifact_in_part_is_deposited_in_part(session: GraftSession) -> None:
    session.deposit(TOKENS, tag="part", sliding="resume")
    run = session.graft("part", record=True)
    session.call(run, [7], DECODE)
    session.extend(run, [11] * 40)
    with pytest.raises(NotStored, match="sliding='resume'"):
        session.deposit(run)
    longer = session.deposit(run, tag="longer", sliding="resume")
    assert session.repository.manifest(longer.id, "default").resume_from == len(run.tokens) // SIZE * SIZE
    session.repository.delete(session.repository.artifact("part", "default").id, "default")
    again = session.graft("longer")
    assert sha256(again.logits) == sha256(run.logits)
    steps = [*canonical_steps(0, 200, SIZE), Step(DECODE, 200, 201), *canonical_steps(201, len(run.tokens), SIZE)]
    assert_fresh(session, again, run.tokens, steps)
    assert session.verify("longer", samples=3).exact


def test_stages_of_a_whole_artifact_begin_anew_after_one_in_part(session: GraftSession) -> None:
    session.deposit(TOKENS[:128], sliding="resume")
    info = deposit_in_stages(
        session, TOKENS, every=64, text="", annotations={}, stage_annotations={}, sliding="all", progress=None
    )
    assert session.repository.manifest(info.id, "default").resume_from == 0
    assert session.repository.check(info.id, "default").ok
    assert session.repository.stats("default").running_pushes == 0
    assert session.prefill(TOKENS[:100]).grafted_tokens == 96


def test_verify_samples_what_fits_where_the_window_is_full(
    session: GraftSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.deposit(TOKENS, tag="part", sliding="resume")
    for window, samples in ((len(TOKENS), 1), (len(TOKENS) + 5, 5), (len(TOKENS) + 500, 9)):
        monkeypatch.setattr(session, "window", window)
        report = session.verify("part", samples=9)
        assert (report.exact, report.grafted.samples, report.grafted.equal) == (True, samples, samples)
        assert report.samples[0].position == len(TOKENS) - 1


def test_a_model_without_sliding_layers_stores_everything(repository: Repository) -> None:
    with session_of(repository, family="llama") as session:
        assert session.deposit(TOKENS).id == session.deposit(TOKENS, sliding="resume").id
        with pytest.raises(InvalidInput, match="'none'; it must be 'all' or 'resume'"):
            session.deposit(TOKENS, sliding="none")


def test_a_library_stores_what_its_grafts_need_and_goes_on_after_an_interruption(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = write_documents(tmp_path / "documents")
    with library_in(repository, family="gemma3") as library:
        session = library.session
        plan = library.plan(read(documents))
        calls = session.call

        def interrupted(run: Run, *arguments: object, **options: object) -> torch.Tensor:
            if len(run.tokens) == 5 * BLOCK:
                raise KeyboardInterrupt
            return calls(run, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(session, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            library.add(plan, stage_tokens=2 * BLOCK)
        (stage,) = _of_kind(repository, "default", session.fingerprint.id, STAGE)
        assert repository.manifest(stage.id, "default").resume_from == 3 * BLOCK
        monkeypatch.undo()
        done: list[int] = []
        made = library.add(plan, stage_tokens=2 * BLOCK, progress=lambda _, at, __: done.append(at)).made
        assert min(at for at in done if at > 0) >= 4 * BLOCK, "the stage was matched"
        assert [*_of_kind(repository, "default", session.fingerprint.id, STAGE)] == []
        stats = repository.stats("default")
        for info in made:
            manifest, _, ids = session.load(info.id)
            assert manifest.resume_from == (len(ids) - 1) // BLOCK * BLOCK
            whole = manifest.layout.block_bytes * len(manifest.blocks)
            assert manifest.state_bytes < 0.6 * whole
            fresh = fresh_logits(session.model, ids, canonical_steps(0, len(ids), BLOCK))
            assert sha256(session.graft(info.id).logits) == sha256(fresh)
        assert library.add(library.plan(read(documents))).made == []
        assert repository.stats("default") == stats
        kept = library.plan(read(documents)).kept
        whole_library = library.add(library.plan(read(documents)), sliding="all")
        assert (whole_library.made, whole_library.kept) == ([], len(kept))


def test_the_command_stores_in_part_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    families.build("gemma3", torch.float32, "sdpa").save_pretrained(model)
    families.tiny_tokenizer().save_pretrained(model)
    monkeypatch.setenv("KVGRAFT_REPO", (tmp_path / "repository").as_uri())
    (tmp_path / "tokens").write_text(" ".join(map(str, TOKENS)))

    def ask(*arguments: object) -> str:
        assert main(list(map(str, arguments))) == 0
        return capsys.readouterr().out

    source = ("--tokens-file", tmp_path / "tokens", "--model", model, "--block-tokens", SIZE)
    ask("deposit", *source, "--tag", "part", "--sliding", "resume")
    assert json.loads(ask("show", "part", "--json"))["resume_from"] == LAST
    assert f"from token {LAST} on" in ask("show", "part")
