"""One context far beyond the native window, in constant device memory: lossy, and labelled so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from engine_adapter.engine import Engine, Progress, Tokens
from engine_adapter.joint_attention import JOINT_ATTENTION, Device, JointCache, JointLayer
from engine_adapter.joint_rotary import Rotary
from engine_adapter.joint_select import Vote
from engine_adapter.joint_settings import JointSettings
from engine_adapter.pager import Pager
from engine_adapter.pages import HostPages
from engine_adapter.session import end_tokens
from repo_service.domain.errors import InvalidInput, UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PROBE_TOKENS = 8
# Of the largest logit, for numbers that differ in the order of operations only.
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_COARSE_TOLERANCE = 0.1


@dataclass(frozen=True)
class Mark:
    """A point of a run to come back to."""

    tokens: int
    logits: Tensor | None = field(repr=False)
    selected: list[int] | None
    sliding: Mapping[int, tuple[Tensor, Tensor, int]] = field(repr=False)


@dataclass
class JointRun:
    """One sequence, of any length. Never exact: most of what is far is not looked at.

    Attributes
    ----------
    tokens
        Token ids from the first on.
    settings
        What made it what it is.
    exact
        False.
    """

    cache: JointCache = field(repr=False)
    settings: JointSettings
    tokens: list[int] = field(default_factory=list, repr=False)
    exact: Literal[False] = False
    _logits: Tensor | None = field(default=None, repr=False)

    @property
    def logits(self) -> Tensor:
        """Logits after the last token, ``[1, vocab]``, in the model's dtype."""
        if self._logits is None:
            raise InvalidInput("the run has no tokens yet: extend it first")
        return self._logits

    def mark(self) -> Mark:
        """This point, to `rewind` to. Cheap: sliding layers' windows are kept, nothing is copied."""
        layers: Sequence[Any] = self.cache.layers
        return Mark(
            len(self.tokens),
            self._logits,
            self.cache.view.selected,
            {
                index: (layer.keys, layer.values, layer.cumulative_length)
                for index, layer in enumerate(layers)
                if not isinstance(layer, JointLayer)
            },
        )

    def rewind(self, mark: Mark) -> None:
        """Drop the tokens after a mark of this run; what follows is bit for bit as if they had never been."""
        if mark.tokens > len(self.tokens):
            raise InvalidInput(f"the run has {len(self.tokens)} tokens, and the mark was made after {mark.tokens}")
        layers: Sequence[Any] = self.cache.layers
        for index, layer in enumerate(layers):
            if isinstance(layer, JointLayer):
                layer.rewind(mark.tokens)
            else:
                layer.keys, layer.values, layer.cumulative_length = mark.sliding[index]
        del self.tokens[mark.tokens :]
        self.cache.view.selected = mark.selected
        self._logits = mark.logits

    def close(self) -> None:
        """Give the run's pages on the host back."""
        for layer in self.cache.layers:
            if isinstance(layer, JointLayer):
                layer.rewind(0)


@dataclass(frozen=True)
class JointGeneration:
    """Greedily generated tokens, and what they were made with.

    Attributes
    ----------
    tokens, text
        The new token ids, and those decoded, or None without a tokenizer.
    exact
        False.
    settings
        What a chunk of queries saw.
    run
        The run, positioned after the last new token whose state was computed.
    """

    tokens: list[int]
    text: str | None
    settings: JointSettings
    run: JointRun = field(repr=False)
    exact: Literal[False] = False

    def to_json(self) -> dict[str, Any]:
        return {
            "exact": self.exact,
            "way": "joint",
            "settings": dict(self.settings.to_json()),
            "tokens": self.tokens,
            "text": self.text,
        }


class JointSession:
    """One loaded model for contexts beyond its window. Not for use by several threads at once.

    Parameters
    ----------
    model
        A causal language model of transformers in eval mode, with rotary positions.
    tokenizer
        Its tokenizer, or None to work with token ids only.
    settings
        What a chunk of queries sees.
    device_pages
        Pages, each one block of one layer, in the device pool. The default holds what all layers see of one
        selection. Any number gives the same bits.
    directory
        Keep pages in a temporary file there, for contexts that are larger than memory.

    Raises
    ------
    InvalidInput
        If settings contradict each other or the model's window, or the pool has no page.
    UnsupportedModel
        Names what can't be run this way, before any work.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: JointSettings | None = None,
        *,
        device_pages: int | None = None,
        directory: Path | None = None,
    ) -> None:
        self._engine = Engine(model, tokenizer, 1)
        self.model, self.tokenizer = model, tokenizer
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "kv_lora_rank", None) is not None:
            raise UnsupportedModel(
                f"{config.model_type} keeps a latent in place of keys and values, which joint attention can't select from",
                model_type=config.model_type,
            )
        native, self._engine.window = self._engine.window, None
        self.settings = (settings or JointSettings()).inside(native or 2**31)
        self._runs = itertools.count()
        heads, dim, full = _measure(model)
        shape = (2, heads, self.settings.block_tokens, dim)
        if device_pages is None:
            device_pages = max(1, full * self.settings.blocks)
        rotary = Rotary(model, self.settings.window, dim)
        pages = HostPages(shape, model.dtype, directory)
        self.device = Device(
            self.settings,
            Pager(device_pages, shape, model.dtype, model.device, pages),
            pages,
            rotary,
            torch.zeros(2, heads, self.settings.needed, dim, dtype=model.dtype, device=model.device),
        )
        try:
            self._require_faithful()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the pool and all pages back; runs end with it."""
        self.device.pager.close()
        self.device.pages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new_run(self) -> JointRun:
        """A run without tokens."""
        return JointRun(JointCache(self.model.config, self.device, next(self._runs)), self.settings)

    def prefill(self, tokens: Tokens | str, *, progress: Progress | None = None) -> JointRun:
        """Run a prompt of any length.

        Raises
        ------
        InvalidTokens
        """
        return self.extend(self.new_run(), tokens, progress=progress)

    def extend(self, run: JointRun, tokens: Tokens | str, *, progress: Progress | None = None) -> JointRun:
        """Compute more tokens after a run's last, chunk by chunk. Returns the run.

        A text gets the tokenizer's special tokens only where the run has no tokens yet.
        """
        ids = self._engine.encode(tokens, begins=not run.tokens)
        begin, size = len(run.tokens), self.settings.chunk
        run.cache.view.selected = None
        for start in range(0, len(ids), size):
            if start + size >= len(ids):
                self._select(run, ids[start:])
            self._call(run, ids[start : start + size])
            if progress is not None:
                progress("tokens", len(run.tokens), begin + len(ids))
        return run

    def _select(self, run: JointRun, tokens: Sequence[int]) -> None:
        """Run a chunk to see what its queries look for, take that into view, and go back."""
        settings, view = self.settings, run.cache.view
        candidates = (settings.near(len(run.tokens)) - settings.sinks) // settings.block_tokens
        if candidates <= settings.blocks:
            return
        mark, view.vote = run.mark(), Vote(candidates)
        try:
            self._call(run, tokens)
            selected = view.vote.best(settings.blocks)
        finally:
            view.vote = None
            run.rewind(mark)
        view.selected = selected

    def generate(self, prompt: Tokens | str | JointRun, max_new_tokens: int = 64) -> JointGeneration:
        """Generate greedily, from a prompt or from where a run stands.

        Stops at the model's end-of-sequence tokens or at ``max_new_tokens``.
        """
        if max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        run = prompt if isinstance(prompt, JointRun) else self.prefill(prompt)
        ends = end_tokens(self.model)
        tokens = [int(run.logits.argmax(-1))]
        while tokens[-1] not in ends and len(tokens) < max_new_tokens:
            self._call(run, tokens[-1:])
            tokens.append(int(run.logits.argmax(-1)))
        text = None if self.tokenizer is None else str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return JointGeneration(tokens, text, self.settings, run)

    def device_bytes(self, run: JointRun) -> int:
        """What the session and a run take on the device for state: pool, workspace, table, sinks, tails, windows."""
        layers: Sequence[Any] = run.cache.layers
        shared = self.device.pager.counters.peak_bytes + self.device.workspace.nbytes + self.device.rotary.device_bytes
        return shared + sum(int(layer.device_bytes) for layer in layers)

    def _call(self, run: JointRun, tokens: Sequence[int]) -> None:
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self.model.device)
        with torch.no_grad(), _attention(self.model, JOINT_ATTENTION):
            out = self.model(ids, cache=run.cache, position_ids=torch.zeros_like(ids), use_cache=True, logits_to_keep=1)
        run.tokens.extend(tokens)
        run._logits = out.logits[:, -1]

    def _require_faithful(self) -> None:
        """Refuse a model whose attention is more than this one makes of it, by what comes out."""
        ids = torch.arange(_PROBE_TOKENS, device=self.model.device)[None] % self._engine.vocabulary
        with torch.no_grad():
            expected = self.model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        run = self.extend(self.new_run(), ids)
        difference = float((run.logits[0].float() - expected).abs().max() / expected.abs().max())
        if not difference <= _PROBE_TOLERANCE.get(self.model.dtype, _COARSE_TOLERANCE):
            raise UnsupportedModel(
                f"{self.model.config.model_type}: a short text gives other logits under {JOINT_ATTENTION} than under the "
                f"model's own attention, by {difference:.2g} of the largest, so it is refused",
                model_type=self.model.config.model_type,
                difference=difference,
            )
        run.close()


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _measure(model: PreTrainedModel) -> tuple[int, int, int]:
    """Key-value heads, their dimension and the number of full layers, read off a cache that the model filled."""
    from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), cache=cache, use_cache=True, logits_to_keep=1)
    layers: Sequence[Any] = cache.layers
    full = [layer for layer in layers if not isinstance(layer, DynamicSlidingWindowLayer)]
    shapes = {(*layer.keys.shape, *layer.values.shape) for layer in full or layers}
    if len(shapes) != 1:
        raise UnsupportedModel(
            "the model's full layers differ in heads or dimensions, which joint attention can't page"
        )
    _, heads, _, dim, *_, value_dim = shapes.pop()
    if dim != value_dim:
        raise UnsupportedModel(
            f"keys of {dim} and values of {value_dim} dimensions can't share pages, so it is refused"
        )
    return heads, dim, len(full)
