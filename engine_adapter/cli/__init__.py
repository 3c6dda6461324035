"""Commands that need a model, registered with ``kvgraft`` through the entry-point group ``kvgraft.commands``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_adapter.cli import joint, library, state

if TYPE_CHECKING:
    import typer


def register(app: typer.Typer) -> None:
    """Add the commands to ``kvgraft``."""
    state.register(app)
    library.register(app)
    joint.register(app)
