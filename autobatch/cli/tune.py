"""autobatch tune: the whole job."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autobatch.cli.options import given, note_default_workload, progress_shown, shared_options
from autobatch.errors import Stopped, UsageError

if TYPE_CHECKING:
    from autobatch.records import Plan

DEFAULT_OUTPUT = Path("autobatch.plan.json")


@click.command("tune", short_help="The whole job: probe, search, decide, write the plan.")
@click.option("--target", type=int, required=True, metavar="N", help="Effective batch: samples per optimizer step.")
@shared_options
@click.option("--uneven/--uniform", default=None, help="Allow micro-batches that differ by one.  [default: uniform]")
@click.option("--storage", metavar="URL|FILE", help="Keep the race as an Optuna study there.")
@click.option("--resume", is_flag=True, default=None, help="Go on from a run of the same job that was stopped.")
@click.option("--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, show_default=True)
@click.option("--profile-dir", type=click.Path(path_type=Path), help="Where the profile goes.  [default: see README]")
@click.option("--emit", "emits", multiple=True, metavar="FORMAT[:FILE]", help="Also write that format. Repeatable.")
def command(
    target: int,
    workload: str,
    output: Path,
    profile_dir: Path | None,
    emits: tuple[str, ...],
    as_json: bool,  # noqa: FBT001 -- click's signature
    quiet: bool,  # noqa: FBT001
    **options: Any,
) -> None:
    """Find the split that reaches TARGET at the most tokens per second, and write it as a plan.

    Prints the candidates that were raced and the choice; the plan goes to --output, the profile of what was measured to
    --profile-dir.
    """
    from autobatch.pipeline import tune
    from autobatch.profiles import default_profile_dir, require_writable

    _quiet_optuna()
    wanted = _wanted(emits)
    profile_dir = profile_dir or default_profile_dir()
    _require_distinct([output, *(path for _, path in wanted)])
    for path in (output, profile_dir / "profile.json", *(path for _, path in wanted)):
        require_writable(path)
    note_default_workload(workload, quiet=quiet)
    try:
        with progress_shown(quiet=quiet) as progress:
            plan = tune(workload, target, profile_dir=profile_dir, progress=progress, **given(options))
    except Stopped as stopped:
        if stopped.plan:
            _deliver(stopped.plan, output, _recorded(stopped.plan, workload, profile_dir), wanted, as_json=as_json)
        raise
    _deliver(plan, output, _recorded(plan, workload, profile_dir), wanted, as_json=as_json)


def _recorded(plan: Plan, workload: str, profile_dir: Path) -> Path:
    """Where the run wrote its profile."""
    from autobatch.profiles import profile_path

    return profile_path(profile_dir, plan.profile.device, workload, plan.profile.settings)


def _wanted(emits: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Formats and their files, from "FORMAT" or "FORMAT:FILE". Raises UsageError for an unknown format."""
    from autobatch.emit import default_file, require_format

    wanted = [(name, Path(file or default_file(name))) for name, _, file in (text.partition(":") for text in emits)]
    for name, _ in wanted:
        require_format(name)
    return wanted


def _require_distinct(paths: list[Path]) -> None:
    for path in paths:
        if paths.count(path) > 1:
            raise UsageError(f"output {path} asked twice; one would overwrite the other; name another file")


def _deliver(plan: Plan, output: Path, profile: Path, wanted: list[tuple[str, Path]], *, as_json: bool) -> None:
    """Write the plan, print the result, write the formats asked for, and print last what was written where."""
    from autobatch.emit import emit
    from autobatch.profiles import plan_document, saved_plan, write_plan, write_text
    from autobatch.report import plan_ceilings, plan_summary, plan_table

    saved = saved_plan(plan)
    write_plan(saved, output)
    if as_json:
        click.echo(json.dumps(plan_document(saved), indent=1))
    else:
        click.echo(f"{saved.workload} ({saved.num_parameters:,} parameters, {saved.precision}) on {saved.device.name}")
        click.echo(f"{plan_ceilings(saved)}\n\n{plan_table(saved)}\n\n{plan_summary(saved)}\n")
        if "script" not in (name for name, _ in wanted):
            click.echo(f"next:   autobatch emit {output} script   prints a training script that follows this plan\n")
    for name, path in wanted:
        write_text(path, emit(saved, name))
    for name, path in [("plan", output), ("profile", profile), *wanted]:
        click.echo(f"{name:<8} {path}", err=as_json)


def _quiet_optuna() -> None:
    import optuna

    optuna.logging.set_verbosity(logging.WARNING)
