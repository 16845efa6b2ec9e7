"""Defaults from [tool.autobatch] of the nearest pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autobatch.errors import UsageError

if TYPE_CHECKING:
    import click


def pyproject_defaults() -> dict[str, dict[str, Any]]:
    """click's default_map: the table's keys, as the options of every command that has them.

    Keys are the options without their dashes: `target`, `memory-limit`, `emit`; underscores will do.
    Raises UsageError for a table with a key that is no option, and for a pyproject.toml that is not TOML.
    """
    path = next((p for folder in _upwards() if (p := folder / "pyproject.toml").is_file()), None)
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("autobatch", {})
    except ValueError as error:  # not TOML, or not UTF-8
        raise UsageError(f"{path} was read for [tool.autobatch]; it is not TOML ({error}); mend it") from error
    if not isinstance(table, dict):
        raise UsageError(f"{path} sets tool.autobatch to {table!r}; it is a table: write [tool.autobatch]")
    return _for_commands(path, {key.replace("_", "-"): value for key, value in table.items()})


def _upwards() -> list[Path]:
    here = Path.cwd()
    return [here, *here.parents]


def _for_commands(path: Path, table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if not table:
        return {}
    from autobatch.cli.probe import command as probe
    from autobatch.cli.tune import command as tune

    options = {str(command.name): _options(command) for command in (tune, probe)}
    unknown = sorted(set(table) - set(options["tune"]))
    if unknown:
        known = ", ".join(sorted(options["tune"]))
        raise UsageError(f"{path} sets {unknown[0]!r} in [tool.autobatch]; it is no option; the options are {known}")
    return {
        name: {str(known[key].name): _as_typed(known[key], value) for key, value in table.items() if key in known}
        for name, known in options.items()
    }


def _options(command: click.Command) -> dict[str, click.Parameter]:
    """A command's options by the word that is typed for them."""
    return {option.opts[0].removeprefix("--"): option for option in command.params}


def _as_typed(option: click.Parameter, value: Any) -> Any:
    """A list as the command line takes it: one value a time where it is repeatable, else separated by commas."""
    if option.multiple:
        return value if isinstance(value, list) else [value]
    return ",".join(str(item) for item in value) if isinstance(value, list) else value
