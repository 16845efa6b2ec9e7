"""autobatch emit: another format from a saved plan."""

from __future__ import annotations

from pathlib import Path

import click

from autobatch.cli.options import debug_option
from autobatch.errors import UsageError


@click.command("emit", short_help="Another format from a saved plan.")
@click.argument("plan", type=click.Path(path_type=Path), required=False)
@click.argument("format", required=False)
@click.option("--list", "listing", is_flag=True, help="The formats there are.")
@click.option("--output", type=click.Path(path_type=Path), help="A file.  [default: stdout]")
@debug_option
def command(plan: Path | None, format: str | None, output: Path | None, listing: bool) -> None:  # noqa: A002, FBT001
    """Write PLAN (a file that `autobatch tune` wrote) in FORMAT."""
    from autobatch.emit import emit, emitters
    from autobatch.profiles import read_plan, write_text

    if listing:
        for name, entry in emitters().items():
            click.echo(f"{name:<12} {entry.value}")
        return
    if plan is None or format is None:
        raise UsageError("a plan and a format are needed; try: autobatch emit autobatch.plan.json script")
    text = emit(read_plan(plan), format)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
        click.echo(f"{format:<8} {output}")
