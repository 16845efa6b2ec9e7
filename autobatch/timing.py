"""StepTimeModel: seconds = k * (alpha + beta * m) + gamma, and the statistics of noisy durations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from autobatch.memory import well_apart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from autobatch.records import Attempt, Checkpointing, Probe, Split, Timing

FLAT = 1.10  # an attempt quicker than this times the smallest one's time is on the launch-bound floor
PRESSED = 1.01  # time per sample above this times the lower neighbour's: allocator pressure or a cache
CREDIT_BEYOND = 0.97  # never credit more than 3 % beyond what was measured
INDIFFERENCE = math.log(1.01)  # identical runs differ by 0.3-0.9 % (MEASUREMENT 1)
STARTUP_BLOCKS = 4  # blocks of a race before anything is decided
PRIOR_DEGREES = 6  # degrees of freedom that the probe's noise estimate counts for in an interval


@dataclass(slots=True)
class TimeBudget:
    """Seconds that may be spent on a device, and those spent so far."""

    limit_seconds: float
    spent_seconds: float = 0.0

    def spend(self, seconds: float) -> None:
        self.spent_seconds += seconds

    @property
    def remaining_seconds(self) -> float:
        return self.limit_seconds - self.spent_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Seconds of one micro-step: the points measured, and the line through the largest clean ones."""

    points: tuple[tuple[int, float], ...]  # (micro-batch, seconds of one micro-step), by size
    alpha: float  # seconds a micro-step costs however small
    beta: float  # seconds a sample
    gamma: float  # seconds of one optimizer step

    @property
    def largest(self) -> int:
        return self.points[-1][0]

    def micro_step_seconds(self, micro_batch: int) -> float:
        """Measured where it was measured, between two points a chord, beyond them the line."""
        sizes, seconds = zip(*self.points, strict=True)
        if sizes[0] <= micro_batch <= sizes[-1]:
            return float(np.interp(micro_batch, sizes, seconds))
        edge_size, edge_seconds = self.points[0] if micro_batch < sizes[0] else self.points[-1]
        per_sample = edge_seconds / edge_size
        return max(self.alpha + self.beta * micro_batch, CREDIT_BEYOND * per_sample * micro_batch)

    def optimistic_micro_step_seconds(self, micro_batch: int) -> float:
        """What a size that was not measured could at best take: at most 3 % below its better neighbour's speed.

        A pressed or slow upper neighbour says nothing about the sizes below it, so the chord to it does not count.
        """
        chord = self.micro_step_seconds(micro_batch)
        neighbours = self._neighbours(micro_batch)
        if not neighbours:
            return chord
        best = micro_batch * min(_per_sample(point) for point in neighbours)
        return max(min(chord, self.alpha + self.beta * micro_batch), CREDIT_BEYOND * best)

    def _neighbours(self, micro_batch: int) -> list[tuple[int, float]]:
        """The points measured next below and next above; none for a size that was measured itself."""
        below = [point for point in self.points if point[0] < micro_batch]
        above = [point for point in self.points if point[0] > micro_batch]
        measured = len(below) + len(above) < len(self.points)
        return [] if measured else [*below[-1:], *above[:1]]

    def step_seconds(self, split: Split, *, optimistic: bool = False) -> float:
        """Seconds of one whole optimizer step on one replica."""
        micro_step = self.optimistic_micro_step_seconds if optimistic else self.micro_step_seconds
        return sum(micro_step(size) for size in split.micro_batches) + self.gamma

    def bound_seconds(self, split: Split) -> float:
        """N * beta + gamma: what this code would take with infinite memory (MEASUREMENT 1)."""
        return split.samples_per_replica * self.beta + self.gamma


def fit_step_times(seconds: Mapping[int, float], gamma: float) -> StepTimeModel:
    """Least squares in relative error on the three largest clean sizes that lie well apart (MEASUREMENT 3, "Model").

    `seconds` maps a micro-batch (at least one) to the seconds of its micro-step.
    """
    points = tuple(sorted(seconds.items()))
    clean = dict(_clean(points))
    sizes = np.array(well_apart(clean)[:3], dtype=float)
    times = np.array([clean[int(size)] for size in sizes])
    if len(sizes) == 1:
        alpha, beta = 0.0, times[0] / sizes[0]
    else:
        design = np.column_stack([1 / times, sizes / times])
        alpha, beta = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0]
    if beta <= 0:  # noise beyond sense: at least do not promise anything
        alpha, beta = 0.0, min(times / sizes)
    return StepTimeModel(points=points, alpha=max(float(alpha), 0.0), beta=float(beta), gamma=gamma)


def _clean(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    floor = points[0][1] * FLAT
    above = [point for point in points[1:] if point[1] >= floor]
    kept = above if len(above) >= 2 else [points[0], *above] if above else list(points)
    while len(kept) > 1 and _per_sample(kept[-1]) > PRESSED * _per_sample(kept[-2]):
        kept.pop()
    return kept


def _per_sample(point: tuple[int, float]) -> float:
    return point[1] / point[0]


def step_time_models(probes: Iterable[Probe], timings: Iterable[Timing]) -> dict[Checkpointing, StepTimeModel]:
    """The step-time model of each checkpointing mode that ran at all, from all that was timed.

    Of repeated micro-steps the quickest counts: what disturbs a step only ever makes it slower.
    """
    seconds: dict[Checkpointing, dict[int, float]] = {}
    gammas: list[float] = []
    for mode, timed in _all_timed(probes, timings):
        seconds.setdefault(mode, {})[timed.micro_batch] = min(timed.micro_step_seconds)
        gammas.append(timed.optimizer_step_seconds)
    return {mode: fit_step_times(points, float(np.median(gammas))) for mode, points in seconds.items()}


def noise_of(probes: Iterable[Probe], timings: Iterable[Timing]) -> float:
    """Relative standard deviation of one micro-step, from all that was timed more than once."""
    return relative_noise(timed.micro_step_seconds for _, timed in _all_timed(probes, timings))


def _all_timed(probes: Iterable[Probe], timings: Iterable[Timing]) -> Iterator[tuple[Checkpointing, Attempt | Timing]]:
    for probe in probes:
        for attempt in probe.attempts:
            if attempt.micro_step_seconds:
                yield probe.checkpointing, attempt
    for timing in timings:
        yield timing.checkpointing, timing


def relative_noise(repeats: Iterable[Sequence[float]]) -> float:
    """Relative standard deviation of one duration, from groups of repeated ones.

    The median of the absolute log ratios of successive repeats, scaled for a normal distribution
    (median |x - y| = 0.6745 * sqrt(2) * sigma); robust against outliers. 0.01 when nothing was repeated.
    """
    ratios = [abs(math.log(later / earlier)) for group in repeats for earlier, later in pairwise(group)]
    return float(np.median(ratios)) / (0.6745 * math.sqrt(2)) if ratios else 0.01


def between_visits(series: Iterable[Sequence[float]]) -> float:
    """Relative standard deviation of one visit, from the seconds of a race: lanes that start at the same block.

    The median absolute deviation of the log ratios to the longest lane, scaled for a normal distribution, over sqrt(2):
    drift that all share cancels, outliers do not count. It is more than what repeats inside a visit show, which share
    the visit's own disturbance. 0.0 before the third block.
    """
    lanes = sorted((lane for lane in series if len(lane) > 2), key=len, reverse=True)
    ratios = [log_ratios(lane, lanes[0]) for lane in lanes[1:]]
    deviations = [abs(value - np.median(ratio)) for ratio in ratios for value in ratio]
    return float(1.4826 * np.median(deviations)) / math.sqrt(2) if deviations else 0.0


def location(values: Sequence[float]) -> float:
    """The Hodges-Lehmann estimate: the median of all pairwise means. Robust, and nearly as sharp as the mean."""
    array = np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(array))
    return float(np.median((array[first] + array[second]) / 2))


def standard_error(values: Sequence[float], noise: float) -> float:
    """Standard error of `location`: the sample's variance pooled with the noise known before (6 degrees)."""
    return math.sqrt(_pooled_variance(values, noise) / len(values))


def log_interval(values: Sequence[float], noise: float) -> tuple[float, float]:
    """95 % interval of the location of `values` (logarithms), Student's t on the pooled variance."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1 + PRIOR_DEGREES)) * standard_error(values, noise)
    centre = location(values)
    return centre - half, centre + half


def _pooled_variance(values: Sequence[float], noise: float) -> float:
    squares = float(np.sum((np.asarray(values) - np.mean(values)) ** 2))
    return (squares + PRIOR_DEGREES * noise**2) / (len(values) - 1 + PRIOR_DEGREES)


def log_ratios(seconds: Sequence[float], control: Sequence[float]) -> list[float]:
    """log(T / T_control) of the blocks that both ran."""
    return [math.log(mine / theirs) for mine, theirs in zip(seconds, control, strict=False)]


def num_blocks(noise: float) -> int:
    """Blocks of a full race: clip(8 * (noise / 1 %)^1.5, 6, 32)."""
    return int(min(max(8 * (noise / 0.01) ** 1.5 + 0.5, 6), 32))
