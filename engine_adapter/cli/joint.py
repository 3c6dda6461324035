"""The command ``joint``: questions about documents that are read as one context, beyond the window and lossy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine_adapter.cli.library import MaxFileMib, MaxNewTokens, Window, note_skipped, read_json, read_paths
from engine_adapter.cli.models import Device, Dtype, DtypeOption, Model, load_model
from repo_service.cli import output, progress
from repo_service.cli.options import Json

if TYPE_CHECKING:
    from engine_adapter.joint_ask import JointAnswer


def register(app: typer.Typer) -> None:
    """Add the command to ``kvgraft``."""
    app.command(
        "joint",
        epilog="\b\nExample: kvgraft joint handbook/ --ask 'What is the pressure of the valve?' --model smollm2",
    )(joint)


def joint(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, and folders with all below them.")],
    model: Model,
    questions: Annotated[list[str], typer.Option("--ask", metavar="QUESTION", help="A question; may be repeated.")],
    max_new_tokens: MaxNewTokens = 64,
    window: Window = None,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="How many blocks of 64 tokens a question sees.")] = 16,
    local: Annotated[int, typer.Option("--local", min=64, help="Newest tokens that are always seen.")] = 512,
    device_pages: Annotated[
        int | None, typer.Option("--device-pages", min=1, help="Keep only so many pages of the state on the device.")
    ] = None,
    pages_dir: Annotated[
        Path | None,
        typer.Option(
            "--pages-dir",
            exists=True,
            file_okay=False,
            help="Keep pages in a temporary file there, not in memory.",
        ),
    ] = None,
    max_file_mib: MaxFileMib = 16,
    dtype: DtypeOption = Dtype.AUTO,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Read all documents as one context, far beyond the window, and ask about it. Lossy: nothing of it is stored.

    The model sees the first tokens, the newest ones, and the blocks that a question selects.
    """
    read = read_paths(paths, max_file_mib)
    with progress.shown(f"loading {model}"):
        loaded, tokenizer = load_model(model, dtype, "sdpa", device)
        from engine_adapter.joint import JointSession
        from engine_adapter.joint_ask import JointReader
        from engine_adapter.joint_settings import JointSettings

        settings = JointSettings(window=window or 0, blocks=blocks, local=local)
        session = JointSession(loaded, tokenizer, settings, device_pages=device_pages, directory=pages_dir)
    with session:
        with progress.shown("reading") as report:
            reader = JointReader(session, read.documents, progress=report)
        answers: list[JointAnswer] = []
        with progress.shown("answering") as report:
            for number, question in enumerate(questions):
                report("questions", number, len(questions))
                answers.append(reader.ask(question, max_new_tokens))
        tokens, device_bytes = len(reader.run.tokens), session.device_bytes(reader.run)
    if as_json:
        output.print_json(
            {
                "exact": False,
                "way": "joint",
                "settings": dict(session.settings.to_json()),
                **read_json(read),
                "context_tokens": tokens,
                "device_bytes": device_bytes,
                "answers": [
                    {
                        "question": answer.question,
                        "answer": answer.text,
                        "sources": answer.sources,
                        "tokens": answer.generation.tokens,
                        "answer_s": answer.answer_s,
                    }
                    for answer in answers
                ],
            }
        )
        return
    note_skipped(read)
    for answer in answers:
        if len(answers) > 1:
            print(output.printable(answer.question))
        output.print_text(answer.text)
        print()
    facts = [
        ("exact", "no: a question sees a part of the context"),
        ("context", f"{output.count(tokens, 'token')} of {output.count(len(read.documents), 'document')}"),
        ("on the device", output.size(device_bytes)),
    ]
    if len(answers) == 1 and answers[0].sources is not None:
        facts.insert(1, ("seen of", ", ".join(answers[0].sources[:5])))
    output.print_facts(facts)
