"""The mission on one screen: probe, then search, then decide."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from autobatch.ceiling import find_ceiling
from autobatch.plan import choose, decide, nothing_fits, rival_of
from autobatch.records import CHECKPOINTING_MODES, Probe
from autobatch.run import DEFAULT_HEADROOM_PERCENT, Run, execute, settings_for
from autobatch.search import bracket, confirm, race, shortlist
from autobatch.splits import samples_per_replica, splits_of
from autobatch.timing import noise_of, step_time_models

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from autobatch.devices import Device, Session
    from autobatch.records import Checkpointing, DeviceInfo, Plan, Profile, Settings, Split, WorkloadFacts
    from autobatch.workload import Workload

DEFAULT_PROBE_BOUND = 65536  # samples; a probe without a target must stop somewhere
PROBE_SHARE = 0.5  # of the seconds left, for finding the ceilings, and again for bracketing


def tune(
    workload: Workload | str,
    target: int,
    *,
    device: str | Device = "auto",
    replicas: int | None = None,
    memory_limit: int | None = None,
    headroom: float = DEFAULT_HEADROOM_PERCENT,
    checkpointing: Sequence[Checkpointing] = CHECKPOINTING_MODES,
    uneven: bool = False,
    max_micro_batch: int | None = None,
    time_budget: float | None = None,
    seed: int = 0,
    storage: str | None = None,
    resume: bool = False,
    profile_dir: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Find the split that reaches `target` samples per optimizer step at the most tokens per second.

    `workload` is a Workload, tuned in this process, or a reference ("train.py:workload", "package.module:name", an
    embedded name), tuned in a worker process. `memory_limit` is in bytes, `headroom` in percent, `time_budget` in
    seconds (default: 180 on a CPU, 600 on an accelerator). `replicas` defaults to WORLD_SIZE, or 1. With
    `profile_dir` every reading is saved there as it comes, and `resume` goes on from a run that was stopped;
    `storage` keeps the race in an Optuna storage (a URL, or the path of a journal file).

    Raises UsageError for arguments that cannot be, WorkloadError and UserCodeError for the workload's faults (a live
    workload's own exceptions come through as they are), DeviceError when the device is absent or lost, NothingFits
    when not even the smallest micro-batch fits, and Stopped on Ctrl-C, with the best plan so far if there is one.
    """
    settings, opened = settings_for(
        device,
        target=target,
        replicas=replicas,
        memory_limit=memory_limit,
        headroom=headroom,
        checkpointing=checkpointing,
        uneven=uneven,
        max_micro_batch=max_micro_batch,
        time_budget=time_budget,
        seed=seed,
    )
    stages = partial(_search, storage=storage)
    return choose(
        execute(stages, workload, opened, settings, profile_dir=profile_dir, resume=resume, progress=progress)
    )


def probe(
    workload: Workload | str,
    *,
    target: int | None = None,
    device: str | Device = "auto",
    replicas: int | None = None,
    memory_limit: int | None = None,
    headroom: float = DEFAULT_HEADROOM_PERCENT,
    checkpointing: Sequence[Checkpointing] = CHECKPOINTING_MODES,
    max_micro_batch: int | None = None,
    time_budget: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Find only the ceiling of each checkpointing mode, up to `target` or `max_micro_batch` samples.

    Arguments and errors are those of `tune`.
    """
    settings, opened = settings_for(
        device,
        target=target or (max_micro_batch or DEFAULT_PROBE_BOUND) * (replicas or 1),
        replicas=replicas,
        memory_limit=memory_limit,
        headroom=headroom,
        checkpointing=checkpointing,
        uneven=True,
        max_micro_batch=max_micro_batch,
        time_budget=time_budget,
        seed=seed,
    )
    return execute(_probe, workload, opened, settings, progress=progress)


def measure(
    session: Session,
    *,
    device: DeviceInfo,
    settings: Settings,
    storage: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Probe and search on an open session: the facts that `plan.choose` decides on."""
    run = Run(session, device=device, settings=settings, progress=progress)
    _search(run, storage=storage)
    return run.profile


# ------------------------------------------------------------------ the stages, each one call


def _search(run: Run, *, storage: str | None) -> None:
    """Probe, bracket, shortlist, race, confirm."""
    _probe(run)
    if not any(probe.ceiling for probe in run.profile.probe):
        raise nothing_fits(run.profile)
    _bracket(run)
    _race(run, storage)
    _confirm(run)
    run.update(complete=True)


def _probe(run: Run) -> None:
    settings = run.profile.settings
    share = samples_per_replica(settings.target, settings.replicas)
    bound, bounded_by = _bound(run.facts, settings, share)
    for number, mode in enumerate(settings.checkpointing):
        run.progress(f"probing the ceiling with checkpointing {mode}")
        left = run.budget.remaining_seconds
        if number and left <= 0:
            found = Probe(
                checkpointing=mode,
                ceiling=0,
                bounded_by="time",
                budget_bytes=settings.budget_bytes,
                refused="not tried: the time budget was spent",
            )
        else:
            found = find_ceiling(
                run,
                mode,
                bound=bound,
                bounded_by=bounded_by,
                budget_bytes=settings.budget_bytes,
                samples_per_replica=share,
                allowance_seconds=PROBE_SHARE * left / (len(settings.checkpointing) - number),
            )
        run.update(probe=(*run.profile.probe, found))


def _bound(facts: WorkloadFacts, settings: Settings, share: int) -> tuple[int, str]:
    bounds = [(share, "target")]
    if facts.dataset_size:
        bounds.append((facts.dataset_size, "dataset"))
    if settings.max_micro_batch:
        bounds.append((settings.max_micro_batch, "max-micro-batch"))
    return min(bounds)


def _bracket(run: Run) -> None:
    probes = [probe for probe in run.profile.probe if probe.ceiling]
    for number, found in enumerate(probes):
        run.progress(f"timing smaller micro-batches with checkpointing {found.checkpointing}")
        models = step_time_models(run.profile.probe, run.profile.timings)
        timings = bracket(
            run,
            found,
            [split.micro_batch for split in _splits(run.profile, found)],
            fastest=min(seconds / size for model in models.values() for size, seconds in model.points),
            noise=noise_of(run.profile.probe, run.profile.timings),
            budget=run.budget,
            allowance_seconds=PROBE_SHARE * run.budget.remaining_seconds / (len(probes) - number),
        )
        run.update(timings=(*run.profile.timings, *timings))


def _splits(profile: Profile, found: Probe) -> list[Split]:
    settings = profile.settings
    return splits_of(settings.target, settings.replicas, ceiling=found.ceiling, uneven=settings.uneven)


def _race(run: Run, storage: str | None) -> None:
    profile = run.profile
    noise = noise_of(profile.probe, profile.timings)
    models = step_time_models(profile.probe, profile.timings)
    splits = {p.checkpointing: _splits(profile, p) for p in profile.probe if p.ceiling}
    candidates = shortlist(splits, models, noise=noise)
    run.update(noise=noise)
    run.progress(f"racing {len(candidates)} candidates")
    race(
        run,
        candidates,
        profile.probe,
        models=models,
        noise=noise,
        budget=run.budget,
        seed=profile.settings.seed,
        storage=storage,
        study_name=f"autobatch {profile.workload.name} {profile.settings.target} {profile.created}",
        on_block=lambda measurements: run.update(measurements=measurements),
    )


def _confirm(run: Run) -> None:
    profile = run.profile
    raced = [m for m in profile.measurements if m.step_seconds]
    if not raced:
        raise nothing_fits(profile)
    chosen = decide(raced, profile.noise).candidate
    rival = rival_of(profile, chosen)
    if rival is None:
        return
    run.progress("confirming the winner against the largest that fits")
    models = step_time_models(profile.probe, profile.timings)
    expected = sum(models[c.checkpointing].step_seconds(c.split) for c in (chosen, rival))
    run.update(
        confirmation=confirm(
            run, chosen, rival, profile.probe, expected_seconds=expected, noise=profile.noise, budget=run.budget
        )
    )
