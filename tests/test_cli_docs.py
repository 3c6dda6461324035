"""``docs/cli.md`` against the commands. ``python tests/test_cli_docs.py`` writes its reference anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from repo_service.cli import errors
from repo_service.cli.main import application

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
BEGIN = "<!-- The rest is written by tests/test_cli_docs.py. -->\n"


def reference() -> str:
    """Every command with its arguments and options, as they are."""
    commands = dict(flattened(get_command(application())))
    return "\n".join(line for name in sorted(commands) for line in section(name, commands[name]))


def flattened(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Commands by name, those of groups by both names."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from flattened(command, f"{prefix}{name} ")
        elif not command.hidden:
            yield prefix + name, command


def section(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    places = [f"{p.metavar}" if p.required else f"[{p.metavar}]" for p in arguments]
    yield f"### `kvgraft {' '.join([name, *places])}`\n"
    # Line breaks are the source's; a page has its own.
    yield "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n")) + "\n"
    yield "| | | default |\n|---|---|---|"
    for argument in arguments:
        yield f"| `{argument.metavar}` | {argument.help} | |"
    for option in options:
        yield f"| {names(option)} | {option.help} | {default(option)} |"
    yield f"\n```\n{command.epilog.partition('Example: ')[2]}\n```\n"


def names(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in option.opts)


def default(option: Any) -> str:
    variable = f"`{option.envvar}`" if option.envvar else ""
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        value = option.show_default
    else:
        value = (
            "" if option.default is None or option.is_flag else f"`{getattr(option.default, 'value', option.default)}`"
        )
    return ", else ".join(part for part in (variable, value) if part)


def test_the_reference_is_that_of_the_commands() -> None:
    assert PAGE.read_text().partition(BEGIN)[2] == reference()


def test_every_exit_code_is_documented() -> None:
    page = PAGE.read_text()
    documented = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)}
    assert {code: documented.get(code) for code in errors.EXIT_CODES} == dict(errors.EXIT_CODES)
    assert set(documented) == {*errors.EXIT_CODES, errors.BROKEN_PIPE}


if __name__ == "__main__":
    kept = PAGE.read_text().partition(BEGIN)[0]
    PAGE.write_text(kept + BEGIN + reference())
