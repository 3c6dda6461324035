"""Fingerprints: tagged fields whose equality is meant to imply equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from repo_service.domain.canonical import check_canonical, frame
from repo_service.domain.digest import SHA256, format_digest
from repo_service.domain.errors import FingerprintMismatch, MalformedDocument

MODEL_SECTIONS = ("model", "positions", "state")
SECTIONS = (*MODEL_SECTIONS, "schedule", "numerics", "canary")


class _Absent:
    """Stands for a field that one of two fingerprints lacks; no value equals it."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


@dataclass(frozen=True)
class Fingerprint:
    """The identity of everything that decides the bits of a model's state.

    Parameters
    ----------
    sections
        ``{section: {field: value}}`` with the six names in `SECTIONS` and canonical values
        (no floats). ``model``: architecture, config, digest of the weight contents, adapters,
        tokenizer, chat template. ``positions``: RoPE parameters and table. ``state``: layer
        groups. ``schedule``: block tokens and rules. ``numerics``: engine, backend, builds,
        device. ``canary``: SHA-256 of what fixed probes gave on the machine at hand.

    Raises
    ------
    MalformedDocument
        If a section is missing, unknown, or not an object, or a value is not canonical.
    """

    sections: dict[str, dict[str, Any]] = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.sections, dict) or set(self.sections) != set(SECTIONS):
            raise MalformedDocument(f"a fingerprint has exactly the sections {', '.join(SECTIONS)}")
        for name, fields in self.sections.items():
            if not isinstance(fields, dict):
                raise MalformedDocument(f"the fingerprint's section {name} is not an object")
        # Hashing and the manifest nest the sections once more.
        check_canonical([self.sections])

    @cached_property
    def id(self) -> str:
        """SHA-256 over all sections, as ``sha256:<hex>``."""
        return self._digest("kvgraft.fingerprint.v1", SECTIONS)

    @cached_property
    def model_id(self) -> str:
        """SHA-256 over model, positions and state: the same model whatever computes it."""
        return self._digest("kvgraft.model.v1", MODEL_SECTIONS)

    def _digest(self, domain: str, names: tuple[str, ...]) -> str:
        framed = frame([domain, {name: self.sections[name] for name in names}])
        return format_digest(SHA256, hashlib.sha256(framed).digest())

    def differences(self, other: Fingerprint) -> dict[str, tuple[Any, Any]]:
        """Fields in which two fingerprints differ, by dotted path, with both values; causes before the canary."""
        return {
            path: values
            for name in SECTIONS
            for path, values in _differences(self.sections[name], other.sections[name], name)
        }

    def require_equal(self, other: Fingerprint, what: str) -> None:
        """Refuse an artifact (``other``) that was made under another fingerprint.

        Raises
        ------
        FingerprintMismatch
            Names each differing field.
        """
        if self.id == other.id:
            return
        differences = self.differences(other)
        listed = "; ".join(
            f"{path}: here {_short(a)}, there {_short(b)}" for path, (a, b) in list(differences.items())[:8]
        )
        more = f" and {len(differences) - 8} more fields" if len(differences) > 8 else ""
        raise FingerprintMismatch(
            f"{what} was made under another fingerprint: {listed}{more}",
            fields=sorted(differences),
            fingerprint_id=self.id,
            other_fingerprint_id=other.id,
        )


def _differences(a: Any, b: Any, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from _differences(a.get(key, ABSENT), b.get(key, ABSENT), f"{path}.{key}")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{path}[{i}]")
    elif type(a) is not type(b) or a != b:  # True is not 1
        yield path, (a, b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
