"""A plan -> a configuration that some trainer reads. Each format is a function `SavedPlan -> str`.

Formats are found by the entry-point group `autobatch.emitters`; the built-in ones come through the same door.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from autobatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from autobatch.records import SavedPlan

GROUP = "autobatch.emitters"
DEFAULT_FILES = {"script": "autobatch_train.py", "env": "autobatch.env"}


def emitters() -> dict[str, EntryPoint]:
    """Every installed format by its name."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def require_format(name: str) -> EntryPoint:
    """The format of that name. Raises UsageError, naming those that there are, when there is none."""
    found = emitters()
    if name not in found:
        raise UsageError(f"format {name!r} asked; there is no such emitter; use one of {', '.join(found)}")
    return found[name]


def emit(plan: SavedPlan, name: str) -> str:
    """The plan in that format.

    Raises UsageError for an unknown format, and what the emitter raises for a plan it cannot express.
    """
    emitter: Callable[[SavedPlan], str] = require_format(name).load()
    return emitter(plan)


def default_file(name: str) -> str:
    """The file that a format goes to when none is named."""
    return DEFAULT_FILES.get(name, f"autobatch.{name}.txt")
