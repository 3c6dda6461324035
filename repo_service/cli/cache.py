"""The command ``cache``: the chunks that this node keeps of repositories elsewhere."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repo_service.cli import output
from repo_service.cli.options import Json

if TYPE_CHECKING:
    from repo_service.domain.repository import Repository


class Action(StrEnum):
    INFO = "info"
    CLEAR = "clear"


def register(app: typer.Typer) -> None:
    app.command("cache", epilog="\b\nExample: kvgraft cache info --json")(cache)


def cache(
    action: Annotated[Action, typer.Argument(metavar="ACTION", help="info or clear.")],
    as_json: Json = False,
) -> None:
    """Show or clear the cache of chunks on this node.

    Processes that use it go on. KVGRAFT_CACHE_DIR names its directory, or turns it off; KVGRAFT_CACHE_MIB bounds it.
    """
    from repo_service.client.settings import node_cache

    kept = node_cache()
    if kept is None:
        output.print_either(None, "the cache is off", as_json)
        return
    found = kept.info() if action is Action.INFO else kept.clear()
    chunks = f"{output.count(found.chunks, 'chunk')}, {output.size(found.bytes)}"
    if action is Action.INFO:
        text = f"{found.directory}: {chunks} of at most {output.size(found.limit_bytes)}"
    else:
        text = f"removed {chunks} from {found.directory}"
    output.print_either(found.model_dump(mode="json"), output.printable(text), as_json)


def use(repository: Repository) -> dict[str, Any] | None:
    """What the cache did for a repository, for a command's JSON; None without one."""
    from repo_service.client.cached import CachedRepository

    return repository.cache.counts.model_dump() if isinstance(repository, CachedRepository) else None
