"""A model that runs tokens under the canonical schedule, batch 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from engine_adapter.cache import StateCache
from engine_adapter.run import Run
from engine_adapter.support import require_supported
from repo_service.domain.errors import ContextTooLong, InvalidTokens
from repo_service.domain.schedule import PREFILL, Step, append_step, canonical_steps

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from engine_adapter.paged import Paging

Tokens = Sequence[int] | torch.Tensor

Progress = Callable[[str, int, int], None]
"""Called with what is counted ("tokens", "bytes"), how many are done, and how many there are."""


class Engine:
    """A causal language model of transformers, driven call by call.

    Parameters
    ----------
    model
        In eval mode.
    tokenizer
        Its tokenizer, or None to work with token ids only.
    block_tokens
        Tokens per prefill call.

    Raises
    ------
    UnsupportedModel
        Names what can't be grafted exactly, before any work.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, block_tokens: int) -> None:
        require_supported(model)
        self.model = model
        self.tokenizer = tokenizer
        self.block_tokens = block_tokens
        self.paging: Paging | None = None
        config = model.config.get_text_config(decoder=True)
        self.window: int | None = getattr(config, "max_position_embeddings", None)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]

    def encode(self, tokens_or_text: Tokens | str, *, begins: bool = True) -> list[int]:
        """Token ids, checked against the vocabulary and the native window.

        Parameters
        ----------
        begins
            Whether a text begins a context, so that the tokenizer's special tokens go around it.

        Raises
        ------
        InvalidTokens, ContextTooLong
        """
        tokens = self._ids(tokens_or_text, begins)
        if not tokens:
            raise InvalidTokens("the prompt is empty: at least one token is needed")
        self._require_room(len(tokens))
        return tokens

    def _ids(self, tokens_or_text: Tokens | str, begins: bool) -> list[int]:
        """Token ids, checked against the vocabulary."""
        if isinstance(tokens_or_text, str):
            if self.tokenizer is None:
                raise InvalidTokens("a text was given to a session without a tokenizer: give token ids")
            tokens = list(self.tokenizer.encode(tokens_or_text, add_special_tokens=begins))
        else:
            tokens = token_list(tokens_or_text)
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise InvalidTokens(f"{token} is not a token id of this model: 0 to {self.vocabulary - 1}", token=token)
        return tokens

    def _require_room(self, length: int) -> None:
        if self.window is not None and length > self.window:
            raise ContextTooLong(
                f"{length} tokens are more than the model's native window of {self.window}",
                tokens=length,
                window=self.window,
            )

    def new_run(self, tokens: int = 0) -> Run:
        """A run without tokens, its cache about to take ``tokens``."""
        run = Run(StateCache(self.model.config) if self.paging is None else self.paging.cache())
        run.cache.reserve(tokens)
        return run

    def extend(self, run: Run, tokens: Tokens | str, *, progress: Progress | None = None) -> Run:
        """Compute more prompt tokens after a run's last, in canonical steps. Returns the run.

        A text gets the tokenizer's special tokens only where the run has no tokens yet.
        """
        ids = self._ids(tokens, not run.tokens)
        start, stop = len(run.tokens), len(run.tokens) + len(ids)
        self._require_room(stop)
        run.cache.reserve(stop)
        for step in canonical_steps(start, stop, self.block_tokens):
            self.call(run, ids[step.start - start : step.stop - start], PREFILL)
            if progress is not None:
                progress("tokens", step.stop, stop)
        return run

    def call(self, run: Run, tokens: Sequence[int], kind: str, position: int | None = None) -> Tensor:
        """One forward call over the next tokens; returns the last one's logits, ``[1, vocab]``.

        ``position`` moves the tokens to other absolute positions, which is inexact by purpose.
        """
        step = Step(kind, len(run.tokens), len(run.tokens) + len(tokens))
        device = self.model.device
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=device)
        extra = {}
        if position is not None:
            extra["position_ids"] = torch.arange(position, position + len(tokens), device=device)[None]
        run.cache.recorder = run.recorder
        if run.recorder is not None:
            run.recorder.begin(step.start)
        with torch.no_grad():
            out = self.model(ids, cache=run.cache, use_cache=True, logits_to_keep=1, **extra)
        if run.recorder is not None:
            run.recorder.end(step)
        run.tokens.extend(tokens)
        append_step(run.steps, step)
        run.computed_tokens += len(tokens)
        run.logits = out.logits[:, -1]
        return run.logits


def token_list(tokens: Tokens) -> list[int]:
    """Token ids of one prompt as a list.

    Raises
    ------
    InvalidTokens
        If they are not integers, or of more than one prompt.
    """
    if isinstance(tokens, torch.Tensor):
        if tokens.is_floating_point() or tokens.is_complex():
            raise InvalidTokens(f"token ids are integers; a tensor of {tokens.dtype} was given")
        if tokens.dim() == 2 and tokens.shape[0] != 1:
            raise InvalidTokens(f"a batch of {tokens.shape[0]} prompts was given; the schedule runs at batch 1")
        if tokens.dim() not in {1, 2}:
            raise InvalidTokens(f"token ids have one dimension; a tensor of shape {tuple(tokens.shape)} was given")
        return [int(token) for token in tokens.reshape(-1).tolist()]
    if isinstance(tokens, (bytes, bytearray)) or not isinstance(tokens, Iterable):
        raise InvalidTokens(f"token ids are integers in a sequence or a tensor; {type(tokens).__name__} was given")
    ids = list(tokens)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidTokens(f"{str(token)[:40]!r} is not a token id: an integer (one prompt at a time, batch 1)")
    return ids
