"""The shortlist and the race (MEASUREMENT 3). Optuna is the ledger, the pruner and the storage, and lives only here.

`bracket` times ever smaller sizes while that makes a sample quicker, `shortlist` keeps the candidates that could be
the best, `race` visits them in blocks and prunes those that are surely slower, and `confirm` runs whole optimizer
steps of the winner against a rival.
"""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import optuna

from autobatch.ceiling import MICRO_STEPS_TIMED
from autobatch.records import CHECKPOINTING_MODES, Candidate, Confirmation, Measurement, Reading, Timing, Visit
from autobatch.timing import (
    INDIFFERENCE,
    STARTUP_BLOCKS,
    between_visits,
    location,
    log_ratios,
    num_blocks,
    standard_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from autobatch.devices import Session
    from autobatch.records import Attempt, Checkpointing, Outcome, Probe, Split
    from autobatch.timing import StepTimeModel, TimeBudget

HOPELESS = 1.6  # a mode whose time per sample is this much above the best's is not bracketed further
LARGEST_SHORTLIST = 9
QUIET_VISIT, NOISY_VISIT = 4, 4  # micro-steps timed in a visit, below and above 1 % noise
CONFIRM_SHARE = 0.25  # of the seconds left before the race
CONFIRM_ORDER = (True, False, False, True)  # ABBA: a linear drift cancels


def bracket(
    session: Session,
    probe: Probe,
    sizes: Sequence[int],
    *,
    fastest: float,
    noise: float,
    budget: TimeBudget,
    allowance_seconds: float,
) -> list[Timing]:
    """Time the largest of `sizes`, half of it, a quarter, ..., while that makes a sample quicker.

    Halving stops when the seconds per sample rise by more than the noise; it goes on for caches and for allocator
    pressure, which put the best size well below the ceiling. Sizes that the probe timed are not timed again. A mode
    that is hopelessly slower than `fastest` (seconds per sample) is left alone, and so is what would take more than
    `allowance_seconds`.
    """
    known = {a.micro_batch: _per_sample(a) for a in probe.attempts if a.micro_step_seconds}
    if not sizes or min(known.values(), default=math.inf) > HOPELESS * fastest:
        return []
    timings: list[Timing] = []
    stop_at = budget.remaining_seconds - allowance_seconds
    previous = math.inf
    size = max(sizes)
    while True:
        if size not in known:
            timing = _time(session, probe.checkpointing, size)
            if timing is None:
                break
            timings.append(timing)
            known[size] = _per_sample(timing)
        if known[size] > previous * (1 + noise) or budget.remaining_seconds <= stop_at:
            break
        previous = min(previous, known[size])
        smaller = [s for s in sizes if s <= size / 2]
        if not smaller:
            break
        size = max(smaller)
    return timings


def _time(session: Session, checkpointing: Checkpointing, size: int) -> Timing | None:
    outcome = session.visit(Visit(checkpointing=checkpointing, micro_batches=(size,) * MICRO_STEPS_TIMED))
    if not isinstance(outcome, Reading):
        return None
    return Timing(
        checkpointing=checkpointing,
        micro_batch=size,
        micro_step_seconds=outcome.micro_step_seconds,
        optimizer_step_seconds=outcome.optimizer_step_seconds,
    )


def _per_sample(timed: Attempt | Timing) -> float:
    return min(timed.micro_step_seconds) / timed.micro_batch


def shortlist(
    splits: Mapping[Checkpointing, Sequence[Split]],
    models: Mapping[Checkpointing, StepTimeModel],
    *,
    noise: float,
) -> list[Candidate]:
    """The candidates that could be the best, the predicted best first (the control of the race).

    Kept are those whose optimistic prediction is within max(5 %, 4 x noise) of the best prediction.
    """
    predicted = {
        Candidate(split=split, checkpointing=mode): model.step_seconds(split)
        for mode, model in models.items()
        for split in splits[mode]
    }
    if not predicted:
        return []
    control = min(predicted, key=predicted.__getitem__)
    limit = predicted[control] * (1 + max(0.05, 4 * noise))

    def optimistic(candidate: Candidate) -> float:
        return models[candidate.checkpointing].step_seconds(candidate.split, optimistic=True)

    rivals = sorted((c for c in predicted if c != control and optimistic(c) <= limit), key=optimistic)
    return [control, *rivals[: LARGEST_SHORTLIST - 1]]


def race(
    session: Session,
    candidates: Sequence[Candidate],
    probes: Sequence[Probe],
    *,
    models: Mapping[Checkpointing, StepTimeModel],
    noise: float,
    budget: TimeBudget,
    seed: int,
    storage: str | None = None,
    study_name: str = "autobatch",
    on_block: Callable[[tuple[Measurement, ...]], None] = lambda _: None,
) -> tuple[Measurement, ...]:
    """Visit the living candidates in blocks, in random order, until none can beat the leader by 1 %.

    The first candidate is the control. Every candidate's first visit runs against the memory budget and reads its
    peak, unless the probe did so already. Visits shrink where micro-steps are long, candidates are dropped from the
    end where even one short block is too long, and blocks stop when three quarters of the seconds left are spent; the
    control is visited once whatever the budget. `on_block` gets the measurements so far after each block. Returns one
    measurement a candidate.
    """
    reserve = budget.remaining_seconds * CONFIRM_SHARE
    num_timed, candidates = _affordable(candidates, models, noise, budget.remaining_seconds - reserve)
    order = random.Random(seed)  # noqa: S311 -- an order of visits, not a secret
    lanes = [_Lane(candidate=c, peak=_known_peak(c, probes)) for c in candidates]
    ledger: _Ledger | None = None
    for block in range(num_blocks(inf)):
        living = [lane for lane in lanes if lane.living]
        noise = max(noise, between_visits(m.step_seconds for m in lanes))
        if block and not _worth_another(living, block, noise, budget.remaining_seconds - reserve):
            break
        for lane in order.sample(living, len(living)):
            lane.visit(session, num_timed)
        ledger = ledger or _Ledger(storage, study_name, lanes, num_blocks(inf))
        ledger.report(block)
        on_block(tuple(lane.measurement for lane in lanes))
    if ledger:
        ledger.close()
    return tuple(lane.measurement for lane in lanes)


@dataclass(slots=True)
class _Lane:
    """One candidate in the race."""

    candidate: Candidate
    peak: Attempt | Reading | None
    step_seconds: list[float] = field(default_factory=list)
    visit_seconds: float = 0.0
    living: bool = True
    why_not: str | None = None

    def visit(self, session: Session, num_timed: int) -> None:
        split = self.candidate.split
        visit = Visit(
            checkpointing=self.candidate.checkpointing,
            micro_batches=sampled(split, num_timed),
            memory_accumulation=0 if self.peak else min(2, split.accumulation),
        )
        outcome = session.visit(visit)
        self.visit_seconds = outcome.seconds
        if isinstance(outcome, Reading):
            self.peak = self.peak or outcome
            self.step_seconds.append(projected_step_seconds(split, visit, outcome))
        else:
            self.living, self.why_not = False, f"{outcome.kind}: {outcome.message}"

    @property
    def measurement(self) -> Measurement:
        return _measurement(self.candidate, self.step_seconds, self.peak, why_not=self.why_not)


def _measurement(
    candidate: Candidate, step_seconds: Sequence[float], peak: Attempt | Reading | None, *, why_not: str | None = None
) -> Measurement:
    return Measurement(
        candidate=candidate,
        step_seconds=tuple(step_seconds),
        peak_allocated_bytes=peak.peak_allocated_bytes if peak else None,
        peak_reserved_bytes=peak.peak_reserved_bytes if peak else None,
        why_not=why_not,
    )


def sampled(split: Split, largest: int) -> tuple[int, ...]:
    """The micro-batch sizes that stand for a split in a visit: at most `largest`, spread over it evenly."""
    count = split.accumulation
    if count <= largest:
        return split.micro_batches
    return tuple(split.micro_batches[index * count // largest] for index in range(largest))


def projected_step_seconds(split: Split, visit: Visit, reading: Reading) -> float:
    """Seconds of the whole optimizer step that a visit's micro-steps stand for."""
    per_sample = sum(reading.micro_step_seconds) / sum(visit.micro_batches)
    return per_sample * split.samples_per_replica + reading.optimizer_step_seconds


def _known_peak(candidate: Candidate, probes: Sequence[Probe]) -> Attempt | None:
    """The probe's attempt at the same size and mode, if it ran with the same accumulation."""
    attempts = {(probe.checkpointing, a.micro_batch): a for probe in probes for a in probe.attempts if a.fits}
    return attempts.get((candidate.checkpointing, candidate.split.micro_batch))


def _affordable(
    candidates: Sequence[Candidate],
    models: Mapping[Checkpointing, StepTimeModel],
    noise: float,
    seconds: float,
) -> tuple[int, Sequence[Candidate]]:
    """How many micro-steps a visit may time, and the candidates that there are seconds to race."""

    def block_seconds(num_timed: int, racing: Sequence[Candidate]) -> float:
        return sum(
            (1 + min(num_timed, c.split.accumulation)) * models[c.checkpointing].micro_step_seconds(c.split.micro_batch)
            for c in racing
        )

    num_timed = NOISY_VISIT if noise > 0.01 else QUIET_VISIT
    while num_timed > 1 and block_seconds(num_timed, candidates) * num_blocks(noise) > seconds:
        num_timed //= 2
    count = len(candidates)
    while count > 1 and block_seconds(num_timed, candidates[:count]) > seconds:
        count -= 1
    return num_timed, candidates[:count]


def _worth_another(living: Sequence[_Lane], block: int, noise: float, seconds: float) -> bool:
    affordable = sum(lane.visit_seconds for lane in living) <= seconds
    enough = block >= num_blocks(noise) or (block >= STARTUP_BLOCKS and _decided(living, noise))
    return affordable and len(living) > 1 and not enough


def _decided(living: Sequence[_Lane], noise: float) -> bool:
    """Nobody living can beat the leader by 1 %."""
    leader = min(living, key=lambda lane: location([math.log(s) for s in lane.step_seconds]))
    return all(
        location(ratios) - 2 * standard_error(ratios, noise * math.sqrt(2)) > -INDIFFERENCE
        for lane in living
        if lane is not leader
        for ratios in [log_ratios(lane.step_seconds, leader.step_seconds)]
    )


class _Ledger:
    """The race in an Optuna study: a trial a candidate, a reported step a block, pruned by WilcoxonPruner.

    Ask and tell. Opened after the first block: the control is the first candidate that ran, told first, 0.0 at every
    block, since the pruner only compares with a COMPLETE best trial; those that could not run are told FAIL.
    """

    def __init__(self, storage: str | None, study_name: str, lanes: Sequence[_Lane], blocks: int) -> None:
        with warnings.catch_warnings():  # marked experimental by Optuna; what we rely on is under test here
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            pruner = optuna.pruners.WilcoxonPruner(p_threshold=0.05, n_startup_steps=STARTUP_BLOCKS)
        self.study = optuna.create_study(
            storage=optuna_storage(storage) if storage else None,
            study_name=study_name,
            pruner=pruner,
            load_if_exists=True,
        )
        self._fail_stale_trials()
        self.control: _Lane | None = None
        self.racing: list[tuple[_Lane, optuna.Trial]] = []
        for lane in lanes:
            trial = self._ask(lane.candidate)
            if lane.why_not:
                trial.set_user_attr("why_not", lane.why_not)
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            elif self.control:
                self.racing.append((lane, trial))
            else:
                self.control = lane
                self._tell_control(trial, blocks)

    def report(self, block: int) -> None:
        """Report the block to every racing trial, and stop the lanes that the pruner is sure are slower."""
        still_racing = []
        for lane, trial in self.racing:
            if lane.why_not:
                trial.set_user_attr("why_not", lane.why_not)
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            trial.report(self._ratios(lane)[-1], block)
            if trial.should_prune():
                lane.living = False
                self.study.tell(trial, location(self._ratios(lane)))
            else:
                still_racing.append((lane, trial))
        self.racing = still_racing

    def close(self) -> None:
        """Tell the trials that raced to the end."""
        for lane, trial in self.racing:
            self.study.tell(trial, location(self._ratios(lane)))
        self.racing = []

    def _ratios(self, lane: _Lane) -> list[float]:
        assert self.control is not None
        return log_ratios(lane.step_seconds, self.control.step_seconds)

    def _tell_control(self, trial: optuna.Trial, blocks: int) -> None:
        for block in range(blocks):
            trial.report(0.0, block)
        self.study.tell(trial, 0.0)

    def _ask(self, candidate: Candidate) -> optuna.Trial:
        split = candidate.split
        self.study.enqueue_trial({"checkpointing": candidate.checkpointing, "accumulation": split.accumulation})
        trial = self.study.ask()
        trial.suggest_categorical("checkpointing", list(CHECKPOINTING_MODES))
        trial.suggest_int("accumulation", 1, split.samples_per_replica)
        trial.set_user_attr("micro_batches", list(split.micro_batches))
        return trial

    def _fail_stale_trials(self) -> None:
        unfinished = (optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.WAITING)
        for trial in self.study.get_trials(deepcopy=False, states=unfinished):
            self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)


def optuna_storage(url: str) -> optuna.storages.BaseStorage | str:
    """An Optuna storage: a database URL as it is, anything else the path of a journal file."""
    if "://" in url:
        return url
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(url))


def confirm(
    session: Session,
    chosen: Candidate,
    rival: Candidate,
    probes: Sequence[Probe],
    *,
    expected_seconds: float,
    noise: float,
    budget: TimeBudget,
) -> Confirmation | None:
    """Whole optimizer steps of the winner (A) and a rival (B) in ABBA order, once, or twice above 1 % noise.

    `expected_seconds` is one step of each. The rival's peak is read too, unless the probe did so. None when there is
    no time for a round, or one could not be run.
    """
    peak: Attempt | Reading | None = _known_peak(rival, probes)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(2 if noise > 0.01 else 1):
        if 2 * expected_seconds > budget.remaining_seconds:
            break
        for is_chosen in CONFIRM_ORDER:
            outcome = _whole_step(session, chosen if is_chosen else rival, read_memory=not (is_chosen or peak))
            if not isinstance(outcome, Reading):
                return None
            peak = peak or (None if is_chosen else outcome)
            seconds[is_chosen].append(sum(outcome.micro_step_seconds) + outcome.optimizer_step_seconds)
    if not seconds[True]:
        return None
    return Confirmation(
        chosen=chosen, chosen_seconds=tuple(seconds[True]), rival=_measurement(rival, seconds[False], peak)
    )


def _whole_step(session: Session, candidate: Candidate, *, read_memory: bool) -> Outcome:
    split = candidate.split
    return session.visit(
        Visit(
            checkpointing=candidate.checkpointing,
            micro_batches=split.micro_batches,
            memory_accumulation=min(2, split.accumulation) if read_memory else 0,
        )
    )
