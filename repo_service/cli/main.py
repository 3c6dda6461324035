"""Entry point: the commands put together, and every failure turned into a message and an exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated

import typer
from typer.main import get_command

from repo_service.cli import access, browse, cache, care, copying, errors, output, retain, upkeep
from repo_service.version import __version__

PLUGIN_GROUP = "kvgraft.commands"

# \b keeps the parser from filling the paragraph.
_EXIT_CODES = "\b\nExit codes:\n" + "\n".join(f"{code:>3}  {meaning}" for code, meaning in errors.EXIT_CODES.items())


def main(args: Sequence[str] | None = None) -> int:
    """Run ``kvgraft`` with ``args``, by default the process's; returns the exit code."""
    arguments = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        command = get_command(application())
        with command.make_context("kvgraft", arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except BrokenPipeError:
        # Whoever read the output has gone; the interpreter's last flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        return errors.INTERRUPTED
    except Exception as error:
        return errors.report(error, as_json="--json" in arguments)
    return 0


def application() -> typer.Typer:
    """The commands of this package and of those that register more."""
    app = typer.Typer(
        name="kvgraft",
        help="A repository of byte-exact KV artifacts: deposit a model's state once, graft it anywhere.",
        epilog=_EXIT_CODES,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_root)
    for module in (browse, copying, upkeep, care, retain, access, cache):
        module.register(app)
    for point in sorted(entry_points(group=PLUGIN_GROUP), key=lambda p: p.name):
        try:
            point.load()(app)
        except Exception as error:  # Whatever is wrong with an adapter, the repository's own commands work.
            output.note(f"kvgraft: the commands of {point.value} can't be loaded: {error}")
    return app


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(errors.USAGE)
