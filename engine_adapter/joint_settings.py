"""What configures the joint way, checked before any work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from repo_service.domain.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class JointSettings:
    """What a chunk of queries sees of everything before it. Sizes are in tokens.

    Parameters
    ----------
    window
        Positions that are used, at most the model's native window, which 0 stands for.
    sinks
        The first tokens, which are always seen.
    local
        The newest tokens before a chunk, which are always seen.
    blocks
        How many blocks in between are seen: the newest ones, or those that a question selects.
    block_tokens
        Tokens per block; ``sinks`` and ``local`` are multiples of it.
    chunk
        Tokens per forward call of a prompt.
    representatives
        Keys that stand for a block, for each layer and key-value head, when blocks are selected.

    Raises
    ------
    InvalidInput
        If they contradict each other.
    """

    window: int = 0
    sinks: int = 128
    local: int = 512
    blocks: int = 16
    block_tokens: int = 64
    chunk: int = 256
    representatives: int = 16

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "window" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidInput(f"{name} is {value!r}; it must be an integer, at least {least}", setting=name)
        for name in ("sinks", "local"):
            if getattr(self, name) % self.block_tokens:
                raise InvalidInput(
                    f"{name} is {getattr(self, name)}; it must be a multiple of block_tokens, {self.block_tokens}",
                    setting=name,
                )
        if self.representatives > self.block_tokens:
            raise InvalidInput(
                f"representatives is {self.representatives}, more than the {self.block_tokens} tokens of a block",
                setting="representatives",
            )

    @property
    def needed(self) -> int:
        """Positions that a chunk needs."""
        return self.sinks + self.blocks * self.block_tokens + self.local + self.chunk

    def inside(self, native: int) -> JointSettings:
        """These settings with the window filled in.

        Raises
        ------
        InvalidInput
            If the window is larger than ``native``, or too small for what a chunk needs.
        """
        window = self.window or native
        if window > native:
            raise InvalidInput(
                f"window is {window}, more than the model's native window of {native}: it can only be narrowed",
                window=window,
                native=native,
            )
        if self.needed > window:
            raise InvalidInput(
                f"{self.sinks} sinks, {self.blocks} blocks of {self.block_tokens}, {self.local} local tokens and a chunk "
                f"of {self.chunk} need {self.needed} positions, and the window has {window}: make one of them smaller",
                needed=self.needed,
                window=window,
            )
        return JointSettings(**{**asdict(self), "window": window})

    def near(self, tokens: int) -> int:
        """The first token that a chunk after ``tokens`` tokens sees as local: where a block begins."""
        return max(self.sinks, -(-(tokens - self.local) // self.block_tokens) * self.block_tokens)

    def to_json(self) -> Mapping[str, Any]:
        return asdict(self)
