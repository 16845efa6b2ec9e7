"""autobatch doctor: what this machine offers."""

from __future__ import annotations

import json

import click

from autobatch.cli.options import debug_option


@click.command("doctor", short_help="What this machine offers, and what autobatch would use.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@debug_option
def command(as_json: bool) -> None:  # noqa: FBT001 -- click's signature
    """Print what this machine offers, what is in the way, and what autobatch would use."""
    from autobatch.doctor import examine, render

    facts = examine()
    click.echo(json.dumps(facts, indent=1) if as_json else render(facts))
