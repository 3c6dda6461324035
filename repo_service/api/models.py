"""Bodies that only the HTTP API has; all others are `repo_service.domain.views`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema

from repo_service.domain.tokens import MAX_TOKENS

MAX_MATCH_KEYS = 2**18
MAX_RECORDS = 4096
MAX_UPLOADS = 64

_DIGEST = {"type": "string", "pattern": "^(sha256|blake3):[0-9a-f]{64}$"}

_BLOCK_RECORD = {
    "type": "object",
    "title": "BlockRecord",
    "description": "One block: its key, span, schedule, and the chunks that hold its state, by array.",
    "required": ["key", "parent", "start", "stop", "steps", "chunks"],
    "additionalProperties": False,
    "properties": {
        "key": _DIGEST,
        "parent": {"anyOf": [_DIGEST, {"type": "null"}]},
        "start": {"type": "integer", "minimum": 0},
        "stop": {"type": "integer", "minimum": 1},
        "steps": {
            "type": "array",
            "description": 'Forward calls, each ["prefill" or "decode", start, stop].',
            "items": {"type": "array", "minItems": 3, "maxItems": 3},
        },
        "chunks": {"type": "object", "additionalProperties": {"type": "array", "items": _DIGEST}},
    },
}

RecordDocument = Annotated[dict[str, Any], WithJsonSchema(_BLOCK_RECORD)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PushRequest(Body):
    """Begin a push."""

    fingerprint: dict[str, dict[str, Any]] = Field(
        description="The fingerprint's sections: model, positions, state, schedule, numerics, canary."
    )


class PushStarted(Body):
    """A running push."""

    id: str = Field(description="Names the push in the routes below /v1/pushes.")


class TokensOffer(Body):
    """The chunks of the tokens array."""

    count: int = Field(ge=1, description="Number of tokens.")
    chunks: Annotated[list[str], FailFast()] = Field(
        max_length=MAX_RECORDS, description="Digests of the chunks, in order."
    )


class OfferRequest(Body):
    """Blocks, and perhaps tokens, that the pusher has."""

    records: Annotated[list[RecordDocument], FailFast()] = Field(max_length=MAX_RECORDS, description="Block records.")
    tokens: TokensOffer | None = Field(None, description="Left out where the token ids stay private.")
    resume_from: int = Field(
        0,
        ge=0,
        le=MAX_TOKENS,
        strict=True,
        description="What the manifest is to say; chunks of sliding layers that the artifact will not store are not asked for.",
    )


class UploadRequest(Body):
    """Chunks that the pusher wants to put at S3 itself."""

    digests: Annotated[list[str], FailFast()] = Field(
        min_length=1, max_length=MAX_UPLOADS, description="Digests that offers answered as missing."
    )


class MatchRequest(Body):
    """The chained block keys of one token sequence."""

    keys: Annotated[list[str], FailFast()] = Field(
        max_length=MAX_MATCH_KEYS, description="Block keys, from the first block on."
    )


class TagRequest(Body):
    """Where a tag is to point."""

    artifact_id: str = Field(description="Id of an artifact of the same namespace.")
