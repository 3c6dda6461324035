"""What a namespace keeps and how much it may hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints, ValidationError

from repo_service.domain.canonical import MAX_INTEGER
from repo_service.domain.errors import InvalidInput
from repo_service.domain.views import View

MAX_SECONDS = 10**10
MAX_PATTERNS = 64

Pattern = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9._*?\[\]!-]{1,128}\z")]
Seconds = Annotated[int, Field(strict=True, ge=1, le=MAX_SECONDS)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]


class Policy(View):
    """Rules of one namespace; None means that there is no such rule.

    A field that this version does not know is refused: it may be what keeps something.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_tags: list[Pattern] = Field(
        default=["*"],
        max_length=MAX_PATTERNS,
        description="Patterns of tags (* ? [a-z] [!a-z]); no rule lets go of an artifact with such a tag.",
    )
    max_age_s: Seconds | None = Field(default=None, description="Artifacts published longer ago go, in seconds.")
    max_idle_s: Seconds | None = Field(default=None, description="Artifacts not used for longer go, in seconds.")
    max_bytes: Bytes | None = Field(
        default=None, description="While distinct chunks of artifacts take more, the least recently used go."
    )
    quota_bytes: Bytes | None = Field(
        default=None, description="Pushes that would make the namespace hold more are refused."
    )

    @property
    def lets_go(self) -> bool:
        """True if there is a rule that garbage collection must look at."""
        return any(rule is not None for rule in (self.max_age_s, self.max_idle_s, self.max_bytes))

    def pins(self, tags: Iterable[str]) -> bool:
        """True if a tag keeps its artifact from every rule."""
        return any(fnmatchcase(tag, pattern) for tag in tags for pattern in self.keep_tags)


def policy_of(values: Mapping[str, Any]) -> Policy:
    """A policy with these fields.

    Raises
    ------
    InvalidInput
    """
    try:
        return Policy.model_validate(values)
    except ValidationError as error:
        problems = {".".join(map(str, e["loc"])): e["msg"] for e in error.errors()}
        listed = "; ".join(f"{name[:100]}: {message}" for name, message in list(problems.items())[:10])
        raise InvalidInput(f"the policy is not valid: {listed}") from None
