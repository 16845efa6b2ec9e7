"""autobatch probe: only the ceilings."""

from __future__ import annotations

import json
from typing import Any

import click

from autobatch.cli.options import given, note_default_workload, progress_shown, shared_options


@click.command("probe", short_help="Only the ceiling of each checkpointing mode.")
@click.option("--target", type=int, metavar="N", help="Look no further than N samples.  [default: 65536]")
@shared_options
def command(
    workload: str,
    as_json: bool,  # noqa: FBT001 -- click's signature
    quiet: bool,  # noqa: FBT001
    **options: Any,
) -> None:
    """Find the largest micro-batch that fits, for each checkpointing mode."""
    from autobatch.pipeline import probe
    from autobatch.plan import nothing_fits
    from autobatch.profiles import probe_document
    from autobatch.report import probe_table

    note_default_workload(workload, quiet=quiet)
    with progress_shown(quiet=quiet) as progress:
        profile = probe(workload, progress=progress, **given(options))
    if as_json:
        click.echo(json.dumps(probe_document(profile), indent=1))
    else:
        click.echo(f"{profile.workload.name} ({profile.workload.num_parameters:,} parameters) on {profile.device.name}")
        click.echo(probe_table(profile.probe, predicted=profile.predicted))
    if not any(found.ceiling for found in profile.probe):
        raise nothing_fits(profile)
