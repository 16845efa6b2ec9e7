"""Defaults from [tool.autobatch] of the nearest pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from autobatch.errors import UsageError


def pyproject_defaults() -> dict[str, dict[str, Any]]:
    """click's default_map: the table's keys, as the options of every command that has them.

    Raises UsageError for a table with a key that is no option, and for a pyproject.toml that is not TOML.
    """
    path = next((p for folder in _upwards() if (p := folder / "pyproject.toml").is_file()), None)
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text()).get("tool", {}).get("autobatch", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} was read for [tool.autobatch]; it is not TOML ({error}); mend it") from error
    return _for_commands(path, {key.replace("-", "_"): value for key, value in table.items()})


def _upwards() -> list[Path]:
    here = Path.cwd()
    return [here, *here.parents]


def _for_commands(path: Path, table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    from autobatch.cli.probe import command as probe
    from autobatch.cli.tune import command as tune

    options = {command.name or "": {option.name for option in command.params} for command in (tune, probe)}
    unknown = sorted(set(table) - options["tune"])
    if unknown:
        known = ", ".join(sorted(str(name).replace("_", "-") for name in options["tune"]))
        raise UsageError(f"{path} sets {unknown[0]!r} in [tool.autobatch]; it is no option; the options are {known}")
    return {
        name: {key: _as_typed(value) for key, value in table.items() if key in names} for name, names in options.items()
    }


def _as_typed(value: Any) -> Any:
    """A list of words where the command line takes them separated by commas."""
    return ",".join(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value
