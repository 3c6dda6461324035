"""Documents on a disk, and a library of a small model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import families
import torch

from engine_adapter import GraftSession
from engine_adapter.documents import Documents, read_documents
from engine_adapter.library import Library
from repo_service.domain.repository import Repository

BLOCK = 32

_SUBJECTS = ("mill", "ferry", "valve", "orchard", "archive", "lighthouse", "compressor", "chapel")


def write_documents(folder: Path, count: int = 4, sentences: int = 12) -> Path:
    """``count`` text files, each about a subject of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, subject in enumerate(_SUBJECTS[:count]):
        lines = [f"The {subject} of ward {number} has the number {n * 7 + number}.\n" for n in range(sentences)]
        (folder / f"{number}-{subject}.txt").write_text("".join(lines))
    return folder


def read(*paths: Path) -> Documents:
    return read_documents(paths)


@contextmanager
def library_in(
    repository: Repository,
    *,
    family: str = "llama",
    seed: int = 0,
    window: int = 512,
    reserve: int = 128,
    namespace: str = "default",
) -> Iterator[Library]:
    """The library of a model of random weights."""
    model = families.build(family, torch.float32, "eager", seed)
    with GraftSession(model, families.tiny_tokenizer(), repository, block_tokens=BLOCK, namespace=namespace) as session:
        yield Library(session, window=window, reserve=reserve)
