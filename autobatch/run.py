"""A run: what was asked, the session it happens on, and the profile as it grows, saved at every step.

A stopped run is resumed by answering its visits from its record; the same code then goes on where it stopped.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections import deque
from dataclasses import replace
from importlib.metadata import version
from time import perf_counter
from typing import TYPE_CHECKING, Any

from autobatch.devices.registry import find_device
from autobatch.errors import DeviceError, Stopped, UsageError
from autobatch.plan import choose
from autobatch.profiles import profile_path, read_profile, write_profile
from autobatch.records import CHECKPOINTING_MODES, Profile, RecordedVisit, Settings
from autobatch.sizes import format_size
from autobatch.splits import samples_per_replica
from autobatch.timing import TimeBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from autobatch.devices import Device, Session
    from autobatch.records import Checkpointing, DeviceInfo, Outcome, Visit, WorkloadFacts
    from autobatch.workload import Workload

DEFAULT_HEADROOM_PERCENT = 5.0
CPU_TIME_BUDGET_SECONDS = 180.0
ACCELERATOR_TIME_BUDGET_SECONDS = 600.0
SHORTEST_VISIT_LIMIT_SECONDS = 120.0  # a worker silent for longer, and for longer than the time budget, hangs


def settings_for(
    device: str | Device,
    *,
    target: int,
    replicas: int | None,
    memory_limit: int | None,
    headroom: float,
    checkpointing: Sequence[Checkpointing],
    uneven: bool,
    max_micro_batch: int | None,
    time_budget: float | None,
    seed: int,
) -> tuple[Settings, Device]:
    """Check what was asked, find the device, and work out the memory budget and the defaults that depend on it."""
    replicas = int(os.environ.get("WORLD_SIZE", "1")) if replicas is None else replicas
    samples_per_replica(target, replicas)
    _require(0 <= headroom < 100, f"headroom {headroom} % asked; it is from 0 up to 100; try 5")
    _require(time_budget is None or time_budget > 0, f"time budget {time_budget} s asked; give seconds above 0")
    _require(max_micro_batch is None or max_micro_batch > 0, f"max micro-batch {max_micro_batch} asked; give 1 or more")
    unknown = [mode for mode in checkpointing if mode not in CHECKPOINTING_MODES]
    _require(not unknown, f"checkpointing {unknown} asked; the modes are {', '.join(CHECKPOINTING_MODES)}")
    _require(bool(checkpointing), f"no checkpointing mode asked; name one of {', '.join(CHECKPOINTING_MODES)}")
    if isinstance(device, str):
        device = find_device(device, visit_limit_seconds=max(time_budget or 0, SHORTEST_VISIT_LIMIT_SECONDS))
    default = CPU_TIME_BUDGET_SECONDS if device.info.kind == "cpu" else ACCELERATOR_TIME_BUDGET_SECONDS
    settings = Settings(
        target=target,
        replicas=replicas,
        uneven=uneven,
        checkpointing=tuple(dict.fromkeys(checkpointing)),
        budget_bytes=budget_bytes(device.info, memory_limit, headroom),
        memory_limit_bytes=memory_limit,
        headroom_percent=headroom,
        max_micro_batch=max_micro_batch,
        time_budget_seconds=time_budget or default,
        seed=seed,
    )
    return settings, device


def _require(condition: bool, message: str) -> None:  # noqa: FBT001 -- reads as an assertion
    if not condition:
        raise UsageError(message)


def budget_bytes(info: DeviceInfo, memory_limit: int | None, headroom: float) -> int:
    """Bytes the run may use: what the device has left, or the limit where that is less, minus the headroom.

    Raises UsageError for a limit below one byte or above what is free.
    """
    if memory_limit is None:
        return int(info.available_bytes * (1 - headroom / 100))
    _require(memory_limit > 0, f"memory limit {memory_limit} B asked; give a size such as 2GiB")
    if memory_limit > info.available_bytes:
        raise UsageError(
            f"memory limit {format_size(memory_limit)} asked; {info.name} has "
            f"{format_size(info.available_bytes)} free; ask for less, or leave the limit out"
        )
    return int(memory_limit * (1 - headroom / 100))


class Run:
    """A session whose visits are timed against the budget, recorded, and saved as they come.

    Visits that a stopped run recorded are answered from its record for as long as the same ones are asked for.
    """

    def __init__(
        self,
        session: Session,
        *,
        device: DeviceInfo,
        settings: Settings,
        progress: Callable[[str], None] = lambda _: None,
        save: Callable[[Profile], None] = lambda _: None,
        stopped: Profile | None = None,
    ) -> None:
        self.session = session
        self.progress = progress
        self.budget = TimeBudget(settings.time_budget_seconds)
        self._save = save
        self._recorded = deque(stopped.visits if stopped else ())
        self.profile = Profile(
            device=device,
            workload=session.facts,
            settings=settings,
            created=stopped.created if stopped else dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            versions={"python": platform.python_version(), "autobatch": version("torch-autobatch")}
            | {"optuna": version("optuna")}
            | device.versions,
            predicted=device.predicted,
        )

    @property
    def facts(self) -> WorkloadFacts:
        return self.session.facts

    def visit(self, visit: Visit, /) -> Outcome:
        outcome = self._recalled(visit) or self.session.visit(visit)
        self.budget.spend(outcome.seconds)
        self.update(visits=(*self.profile.visits, RecordedVisit(visit=visit, outcome=outcome)))
        return outcome

    def _recalled(self, visit: Visit) -> Outcome | None:
        if self._recorded and self._recorded[0].visit == visit:
            return self._recorded.popleft().outcome
        self._recorded.clear()
        return None

    def update(self, **changes: Any) -> None:
        """Replace fields of the profile and save it."""
        self.profile = replace(self.profile, **changes)
        self._save(self.profile)


def execute(
    stages: Callable[[Run], None],
    workload: Workload | str,
    device: Device,
    settings: Settings,
    *,
    profile_dir: Path | None = None,
    resume: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Open the workload on the device, run the stages, and return the profile they found.

    Ctrl-C becomes Stopped, with a plan where enough was found for one.
    """
    reference = workload if isinstance(workload, str) else workload.name
    info = device.info
    path = profile_path(profile_dir, info, reference, settings) if profile_dir else None
    stopped = _stopped_run(path, settings) if resume and path else None
    if stopped:
        settings = replace(settings, budget_bytes=stopped.settings.budget_bytes)
    run: Run | None = None
    progress(f"opening {reference} on {info.name}, budget {format_size(settings.budget_bytes)}")
    start = perf_counter()
    try:
        with device.open(workload, budget_bytes=settings.budget_bytes, seed=settings.seed) as session:
            if stopped and stopped.workload != session.facts:
                progress("the workload has changed since the stopped run: measuring anew")
                stopped = None
            run = Run(
                session,
                device=info,
                settings=settings,
                progress=progress,
                save=(lambda profile: write_profile(profile, path)) if path else lambda _: None,
                stopped=stopped,
            )
            if not device.info.predicted:
                run.budget.spend(perf_counter() - start)
            stages(run)
            return run.profile
    except KeyboardInterrupt:
        raise _stopped(run, path) from None


def _stopped_run(path: Path, settings: Settings) -> Profile | None:
    """The record of a run of the same job that was stopped; None when there is none, or it ended well."""
    if not path.exists():
        return None
    recorded = read_profile(path)
    if recorded.complete:
        return None
    needed = recorded.settings.budget_bytes
    if needed > settings.budget_bytes / (1 - settings.headroom_percent / 100):
        raise DeviceError(
            f"resume asked; the stopped run had a budget of {format_size(needed)} and only "
            f"{format_size(settings.budget_bytes)} is left now; free memory, or run without --resume"
        )
    return recorded


def _stopped(run: Run | None, path: Path | None) -> Stopped:
    found = f"{len(run.profile.visits)} readings" if run else "nothing"
    saved = f"saved in {path}; go on with --resume" if path and run else "not saved: no profile directory was given"
    plan = choose(run.profile) if run and any(m.step_seconds for m in run.profile.measurements) else None
    return Stopped(f"interrupted with {found} found so far, {saved}", plan)
