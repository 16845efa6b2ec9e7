"""The ceiling: the largest micro-batch whose run stays inside the budget, in a handful of attempts.

Top-down from a prediction (MEASUREMENT 2): a small attempt; a second one no larger than what must fit if memory is
affine; then the line through both predicts the ceiling, which is run, and so is its neighbour. Only a size that
really ran is ever returned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from autobatch.memory import fit_memory, is_affine, longest_stride, predicted_ceiling
from autobatch.records import Attempt, Checkpointing, Probe, Reading, Visit

if TYPE_CHECKING:
    from autobatch.devices import Session

FIRST = 2  # a micro-batch of 1 breaks BatchNorm and lies off the affine line
NEARLY = 1.02  # a refuted prediction this near the size that failed was right but for rounding
GALLOP = 4  # strides beyond a ceiling that was predicted too low grow by this factor
MAX_MISSED = 3  # predictions that did not fit, before bisection alone
MAX_ATTEMPTS = 24
MICRO_STEPS_TIMED = 2
ATTEMPT_MICRO_STEPS = 8  # what an attempt costs at most: 2 x 2 against the budget, slowed by it, 1 discarded, 2 timed


def find_ceiling(
    session: Session,
    checkpointing: Checkpointing,
    *,
    bound: int,
    bounded_by: str,
    budget_bytes: int,
    samples_per_replica: int | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    allowance_seconds: float = inf,
) -> Probe:
    """Find the largest micro-batch up to `bound` that runs inside the budget the session was opened with.

    `bounded_by` names what `bound` is, for the record. With `samples_per_replica`, a size that needs no accumulation
    to reach it is run without. `max_attempts` and `allowance_seconds` cap the work; the probe then says so in
    `bounded_by` and returns the largest size that ran.
    """
    if refused := session.facts.refused.get(checkpointing):
        return Probe(
            checkpointing=checkpointing,
            ceiling=0,
            bounded_by="refused",
            budget_bytes=budget_bytes,
            refused=refused,
        )
    known = _Known(bound=bound, budget_bytes=budget_bytes)
    while (size := known.next_size()) is not None:
        affordable = known.affordable(size, allowance_seconds)
        if len(known.attempts) >= max_attempts or affordable is None:
            bounded_by = "attempts" if affordable is not None else "time"
            break
        known.add(attempt(session, checkpointing, affordable, samples_per_replica=samples_per_replica))
    else:
        bounded_by = bounded_by if known.ceiling == bound else known.wall
    return Probe(
        checkpointing=checkpointing,
        ceiling=known.ceiling,
        bounded_by=bounded_by,
        budget_bytes=budget_bytes,
        attempts=tuple(known.attempts),
        memory=fit_memory(known.peaks),
    )


def attempt(
    session: Session, checkpointing: Checkpointing, micro_batch: int, *, samples_per_replica: int | None
) -> Attempt:
    """Run one micro-batch as training would, against the budget, and time it."""
    accumulation = 1 if samples_per_replica is not None and micro_batch >= samples_per_replica else 2
    outcome = session.visit(
        Visit(
            checkpointing=checkpointing,
            micro_batches=(micro_batch,) * MICRO_STEPS_TIMED,
            memory_accumulation=accumulation,
        )
    )
    if isinstance(outcome, Reading):
        return Attempt(
            micro_batch=micro_batch,
            peak_allocated_bytes=outcome.peak_allocated_bytes,
            peak_reserved_bytes=outcome.peak_reserved_bytes,
            micro_step_seconds=outcome.micro_step_seconds,
            optimizer_step_seconds=outcome.optimizer_step_seconds,
            seconds=outcome.seconds,
        )
    return Attempt(micro_batch=micro_batch, why_not=f"{outcome.kind}: {outcome.message}", seconds=outcome.seconds)


@dataclass(slots=True)
class _Known:
    """What the attempts so far tell of the ceiling: it lies in [largest that ran, smallest that did not)."""

    bound: int
    budget_bytes: int
    attempts: list[Attempt] = field(default_factory=list)
    num_missed: int = 0  # predictions that did not fit
    num_exceeded: int = 0  # neighbours that did fit

    @property
    def peaks(self) -> dict[int, int]:
        return {a.micro_batch: a.peak_allocated_bytes for a in self.attempts if a.peak_allocated_bytes}

    @property
    def ceiling(self) -> int:
        return max((a.micro_batch for a in self.attempts if a.fits), default=0)

    @property
    def first_failed(self) -> int:
        return min((a.micro_batch for a in self.attempts if not a.fits), default=self.bound + 1)

    @property
    def wall(self) -> str:
        """What stopped the search: the kind of the failure next above the ceiling."""
        above = [a for a in self.attempts if not a.fits and a.micro_batch == self.first_failed]
        return "size limit" if above and (above[0].why_not or "").startswith("size limit") else "memory"

    def add(self, attempt: Attempt) -> None:
        neighbour = attempt.micro_batch == self.ceiling + 1
        if attempt.fits and neighbour and len(self.peaks) > 1 and self._predicted() <= self.ceiling:
            self.num_exceeded += 1
        if not attempt.fits and not neighbour:
            self.num_missed += 1
        self.attempts.append(attempt)

    def next_size(self) -> int | None:
        """The size to try next; None when the ceiling is known."""
        low, high = self.ceiling, self.first_failed
        if high <= low + 1:
            return None
        if low == 0:
            return min(FIRST, high - 1)
        if high <= self.bound and self.num_missed:
            return self._within(low, high)
        guess = self._predicted()
        if guess <= low:
            guess = low + GALLOP**self.num_exceeded
        return min(max(guess, low + 1), high - 1)

    def _within(self, low: int, high: int) -> int:
        """After a prediction that did not fit: just below it, or what is sure to fit, or a better prediction."""
        halfway = (low + high) // 2
        predicted = self._predicted(capped=False)
        if self.num_missed > MAX_MISSED:
            return halfway
        if self.attempts[-1].fits:
            if predicted == low and not self.num_exceeded:
                return low + 1
            return predicted if low < predicted < high else halfway
        if not is_affine(self.peaks) and self._safe() > low:
            return min(self._safe(), high - 1)
        nearly_right = self.num_missed == 1 and predicted <= NEARLY * high
        return high - 1 if nearly_right else halfway

    def _safe(self) -> int:
        """The largest size that must fit if memory is affine with a fixed part >= 0."""
        low, peaks = self.ceiling, self.peaks
        return int(low * self.budget_bytes // peaks[low]) if low in peaks else 2 * low

    def _predicted(self, *, capped: bool = True) -> int:
        """The ceiling by the line through the largest sizes that ran, within a stride that the evidence allows."""
        model = fit_memory(self.peaks)
        if model is None:  # one attempt, or flat so far
            return self._safe() if len(self.peaks) < 2 else max(self._safe(), 2 * self.ceiling)
        predicted = predicted_ceiling(model, self.budget_bytes)
        return int(min(predicted, longest_stride(self.peaks) * self.ceiling)) if capped else predicted

    def affordable(self, size: int, allowance_seconds: float) -> int | None:
        """`size`, or the largest below it that the seconds left allow; None when that is nothing new.

        The first attempt is always affordable.
        """
        last = next((a for a in reversed(self.attempts) if a.fits), None)
        if last is None:
            return size
        left = allowance_seconds - sum(a.seconds for a in self.attempts)
        per_sample = ATTEMPT_MICRO_STEPS * min(last.micro_step_seconds) / last.micro_batch
        affordable = int(min(size, max(left, 0) / per_sample))
        return affordable if affordable > self.ceiling else None
