"""The options that tune and probe share. Defaults are the library's."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autobatch.errors import UsageError
from autobatch.records import CHECKPOINTING_MODES
from autobatch.sizes import parse_size
from autobatch.workloads import EMBEDDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


DEFAULT_WORKLOAD = "gpt"


class SizeType(click.ParamType):  # type: ignore[type-arg] # generic only in new clicks
    """A memory size: 2GiB, 500MB, 1073741824."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


class ModesType(click.ParamType):  # type: ignore[type-arg] # generic only in new clicks
    """Checkpointing modes separated by commas."""

    name = "modes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        modes = tuple(part.strip() for part in str(value).split(","))
        if unknown := [mode for mode in modes if mode not in CHECKPOINTING_MODES]:
            self.fail(f"{unknown[0]!r} asked; the modes are {', '.join(CHECKPOINTING_MODES)}", param, ctx)
        return modes


def _mark_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:  # noqa: FBT001 -- click's signature
    if value:
        ctx.meta["autobatch.debug"] = True


def debug_asked(ctx: click.Context) -> bool:
    """Whether --debug was given, before the command or after it."""
    return bool(ctx.meta.get("autobatch.debug"))


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_mark_debug,
    help="Show autobatch's own traceback when it stops with an error.",
)


def _without_folders_above(_ctx: click.Context, _param: click.Parameter, reference: str) -> str:
    """A file below the current directory by its relative path: plans and profiles name no user's folders."""
    place, separator, name = reference.rpartition(":")
    path, here = Path(place), Path.cwd()
    return f"{path.relative_to(here)}{separator}{name}" if separator and path.is_relative_to(here) else reference


def shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that both tune and probe have."""
    for option in reversed(_SHARED):
        command = option(command)
    return command


_SHARED = [
    click.option(
        "--workload",
        default=DEFAULT_WORKLOAD,
        callback=_without_folders_above,
        metavar="FILE.py:NAME|module:NAME|NAME",
        help=f"What is trained. Embedded: {', '.join(EMBEDDED)}.  [default: {DEFAULT_WORKLOAD}]",
    ),
    click.option(
        "--device", default="auto", metavar="NAME", help="auto, cpu, or replay:PROFILE.json.  [default: auto]"
    ),
    click.option("--replicas", type=int, help="Data-parallel ranks.  [default: WORLD_SIZE, or 1]"),
    click.option("--memory-limit", type=SizeType(), help="Bytes that tensors may hold: 2GiB, 500MB."),
    click.option("--headroom", type=float, metavar="PERCENT", help="Of the memory, kept free.  [default: 5]"),
    click.option(
        "--checkpointing",
        type=ModesType(),
        help=f"Activation checkpointing modes to try.  [default: {','.join(CHECKPOINTING_MODES)}]",
    ),
    click.option("--max-micro-batch", type=int, metavar="M", help="Never try a larger micro-batch."),
    click.option(
        "--time-budget", type=float, metavar="SECONDS", help="For the whole job.  [default: 180 on a CPU, else 600]"
    ),
    click.option("--seed", type=int, help="Of weights, data and the order of visits.  [default: 0]"),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else there."),
    click.option("--quiet", is_flag=True, help="No progress on stderr."),
    debug_option,
]


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were set, by flag or file: the library has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def progress_shown(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done on stderr: a live line on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


def note_default_workload(workload: str, *, quiet: bool) -> None:
    """Say on stderr that an embedded workload stands in when none was named."""
    source = click.get_current_context().get_parameter_source("workload")
    if source is click.core.ParameterSource.DEFAULT and not quiet:
        click.echo(
            f"no workload was named: the embedded {workload!r} is used; name yours with --workload FILE.py:NAME",
            err=True,
        )
