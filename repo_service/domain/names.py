"""The grammar of names that reach keys, paths and URLs."""

from __future__ import annotations

import re

from repo_service.domain.errors import MalformedName

DEFAULT_NAMESPACE = "default"

_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_SHORT_ID = re.compile(r"sha256:[0-9a-f]{8,64}", re.ASCII)


def check_namespace(name: str) -> str:
    """Return a valid namespace unchanged.

    Raises
    ------
    MalformedName
    """
    if not _NAMESPACE.fullmatch(name):
        raise MalformedName(
            f"{name[:100]!r} is not a namespace: 1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit",
            namespace=name[:100],
        )
    return name


def check_tag(name: str) -> str:
    """Return a valid tag unchanged.

    Raises
    ------
    MalformedName
    """
    if not _TAG.fullmatch(name):
        raise MalformedName(
            f"{name[:100]!r} is not a tag: 1 to 128 of A-Z a-z 0-9 . _ -, beginning with a letter or digit",
            tag=name[:100],
        )
    return name


def is_artifact_reference(ref: str) -> bool:
    """True for an artifact id or a shortened one (``sha256:`` and at least 8 hex digits), False for a tag.

    Raises
    ------
    MalformedName
        If the reference is neither.
    """
    if ":" in ref:
        if not _SHORT_ID.fullmatch(ref):
            raise MalformedName(
                f"{ref[:100]!r} is not an artifact id: sha256: and 64 hexadecimal digits, or the first 8 or more of them",
                ref=ref[:100],
            )
        return True
    check_tag(ref)
    return False
