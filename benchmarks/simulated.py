"""A seeded noisy machine: a Session whose right answers are known, and a maker of instances of it.

The clock breaks in the ways that MEASUREMENT 1 names: a launch-bound floor at small micro-batches, allocator pressure
near the ceiling, a cache knee, tile steps of 1-2 %, kernel switches. Its noise has a part common to a whole visit,
which no averaging of micro-steps inside the visit removes, a part of each duration's own, outliers and a slow drift.

What it leaves out: peaks that depend on the accumulation or on what ran before (fragmentation), compile
specialisation, data loading, clocks that throttle in steps, other tenants that come and go, sizes that fail for
other reasons than memory, and replicas. The sizes of breaks are drawn from ranges that published figures suggest, not
fitted to any one machine, so a share of instances here is not a share of machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autobatch.records import (
    CHECKPOINTING_MODES,
    Candidate,
    Checkpointing,
    DeviceInfo,
    Outcome,
    Reading,
    Rejection,
    Settings,
    Visit,
    WorkloadFacts,
)
from autobatch.splits import splits_of

BUDGET_BYTES = 16 * 1024**3
NOISE_COMMON_TO_A_VISIT = 0.5  # of the variance
OUTLIER_SHARE, OUTLIER_FACTOR = 0.03, 1.2
DRIFT = 0.02
FEWEST_CANDIDATES, MOST_CANDIDATES = 12, 40  # an instance outside is drawn again; the mean is about 23
UNEVEN_SHARE = 0.35
TIGHT_SHARE = 0.5  # of the instances drawn, before those with few candidates are drawn again
DISCARDED_STEPS, TIMED_STEPS = 3, 10  # of the full grid that costs are compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak bytes of a micro-batch: affine, or in steps of `step` samples, and at least `floor_bytes`.

    The floor is the optimizer step's own peak, which hides the activations of small sizes. Steps end at
    `offset`, `offset` + `step`, ... samples.
    """

    fixed_bytes: float
    per_sample_bytes: float
    step: int = 1
    offset: int = 0
    floor_bytes: float = 0.0

    def peak_bytes(self, micro_batch: int) -> int:
        padded = self.offset + math.ceil((micro_batch - self.offset) / self.step) * self.step
        return int(max(self.fixed_bytes + self.per_sample_bytes * padded, self.floor_bytes))

    def ceiling(self, budget_bytes: int, bound: int) -> int:
        """The largest micro-batch up to `bound` inside the budget; 0 when none is."""
        return max((m for m in range(1, bound + 1) if self.peak_bytes(m) <= budget_bytes), default=0)


def memory_with_ceiling(
    ceiling: int, budget_bytes: int, *, fixed_share: float, step: int = 1, slack: float = 0.5, floor_share: float = 0.0
) -> Memory:
    """The memory whose ceiling is exactly `ceiling`, with `fixed_share` of the budget taken whatever the size.

    `slack`: how far into the next sample (or step) the budget reaches, in (0, 1).
    """
    return Memory(
        fixed_bytes=fixed_share * budget_bytes,
        per_sample_bytes=(1 - fixed_share) * budget_bytes / (ceiling + slack * step),
        step=step,
        offset=ceiling % step,
        floor_bytes=floor_share * budget_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """True seconds of one micro-step under one checkpointing mode: alpha + beta * m, with its breaks."""

    alpha_seconds: float
    beta_seconds: float
    floor_seconds: float = 0.0  # what launching the kernels takes, however little they do
    pressed_from: float = math.inf  # samples; above, the allocator is under pressure
    pressed_until: float = math.inf  # samples; here the pressure costs `pressure`
    pressure: float = 0.0
    knee: float = math.inf  # samples; above, the working set leaves the cache
    rise_per_doubling: float = 0.0
    largest_rise: float = 0.12
    tile: int = 1
    tile_cost: float = 0.0
    switches: tuple[tuple[float, float], ...] = ()  # (from this size on, factor)

    def micro_step_seconds(self, micro_batch: int) -> float:
        busy = self.alpha_seconds + self.beta_seconds * micro_batch * self._efficiency(micro_batch)
        return float((busy**8 + self.floor_seconds**8) ** (1 / 8)) * (1 + self._pressure(micro_batch))

    def _efficiency(self, micro_batch: int) -> float:
        doublings = max(0.0, math.log2(micro_batch / self.knee)) if self.knee < math.inf else 0.0
        cache = 1 + min(doublings * self.rise_per_doubling, self.largest_rise)
        tiles = 1 + self.tile_cost * (-micro_batch % self.tile) / self.tile
        return cache * tiles * math.prod(factor for size, factor in self.switches if micro_batch >= size)

    def _pressure(self, micro_batch: int) -> float:
        if micro_batch <= self.pressed_from:
            return 0.0
        return self.pressure * (micro_batch - self.pressed_from) / (self.pressed_until - self.pressed_from)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine with a workload, and the truth about it."""

    seed: int
    noise: float  # relative standard deviation of one duration
    target: int
    uneven: bool
    clocks: dict[Checkpointing, Clock]
    memories: dict[Checkpointing, Memory]
    gamma_seconds: float
    reading_noise: float = 0.0  # relative, of a peak that is read; the wall itself is exact
    drift: float = 0.0  # the machine ends this much slower (or faster) than it began
    drift_share: float = 0.1  # the drift's time constant, as a share of the full grid's seconds
    breaks: tuple[str, ...] = ()  # by name, for the report of failures
    budget_bytes: int = BUDGET_BYTES

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every candidate that fits."""
        return tuple(
            Candidate(split=split, checkpointing=mode)
            for mode, memory in self.memories.items()
            for split in splits_of(
                self.target, 1, ceiling=memory.ceiling(self.budget_bytes, self.target), uneven=self.uneven
            )
        )

    @cached_property
    def true_step_seconds(self) -> dict[Candidate, float]:
        """Noise-free seconds of one whole optimizer step, of every candidate that fits."""
        return {candidate: self._step_seconds(candidate) for candidate in self.candidates}

    @cached_property
    def full_grid_seconds(self) -> float:
        """What 3 discarded and 10 timed whole steps of every candidate that fits take, noise-free."""
        return (DISCARDED_STEPS + TIMED_STEPS) * sum(self.true_step_seconds.values())

    def _step_seconds(self, candidate: Candidate) -> float:
        clock = self.clocks[candidate.checkpointing]
        sizes = candidate.split.micro_batches
        return self.gamma_seconds + sum(sizes.count(m) * clock.micro_step_seconds(m) for m in set(sizes))

    @property
    def device(self) -> DeviceInfo:
        return DeviceInfo(
            kind="simulated",
            name=f"simulated machine {self.seed}",
            capacity_bytes=self.budget_bytes,
            available_bytes=self.budget_bytes,
        )

    @property
    def settings(self) -> Settings:
        return Settings(
            target=self.target,
            replicas=1,
            uneven=self.uneven,
            checkpointing=tuple(self.memories),
            budget_bytes=self.budget_bytes,
            memory_limit_bytes=None,
            headroom_percent=0.0,
            max_micro_batch=None,
            time_budget_seconds=1e12,  # the protocol at its full length
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The simulated seconds of one visit, by what they were spent on."""

    timing_seconds: float  # the discarded micro-step, the timed ones, the optimizer step
    memory_seconds: float  # the two whole optimizer steps against the budget, or the attempt that did not fit


class SimulatedSession:
    """An instance, open: implements autobatch.devices.Session, counts every simulated second it spends."""

    def __init__(self, instance: Instance, *, seed: int) -> None:
        self.instance = instance
        self.spent: list[Spent] = []
        self._elapsed_seconds = 0.0
        self._random = np.random.default_rng([instance.seed, seed])

    @property
    def facts(self) -> WorkloadFacts:
        return WorkloadFacts(
            name="simulated",
            reference=None,
            num_parameters=0,
            precision="fp32",
            unit="samples",
            units_per_sample=1.0,
            clip_norm=None,
            dataset_size=None,
        )

    def visit(self, visit: Visit, /) -> Outcome:
        size = max(visit.micro_batches)
        peak_bytes = self.instance.memories[visit.checkpointing].peak_bytes(size)
        if peak_bytes > self.instance.budget_bytes:
            return self._rejection(visit)
        common = self._common()
        micro_steps = self._micro_steps(visit.checkpointing, (visit.micro_batches[0], *visit.micro_batches), common)
        optimizer_step = float(self._durations(np.array([self.instance.gamma_seconds]), common)[0])
        spent = Spent(
            timing_seconds=float(micro_steps.sum()) + optimizer_step, memory_seconds=self._memory_seconds(visit)
        )
        self._spend(spent)
        return Reading(
            micro_step_seconds=tuple(micro_steps[1:].tolist()),
            optimizer_step_seconds=optimizer_step,
            seconds=spent.timing_seconds + spent.memory_seconds,
            peak_allocated_bytes=self._read(peak_bytes) if visit.memory_accumulation else None,
            counters={"num_alloc_retries": int(size > self.instance.clocks[visit.checkpointing].pressed_from)},
        )

    def whole_steps(self, candidate: Candidate, count: int) -> list[float]:
        """Seconds of `count` whole optimizer steps in one go: what the tools that we are compared with time."""
        common = self._common()
        sizes = candidate.split.micro_batches
        steps = []
        for _ in range(count):
            optimizer_step = self._durations(np.array([self.instance.gamma_seconds]), common)
            steps.append(float(self._micro_steps(candidate.checkpointing, sizes, common).sum() + optimizer_step[0]))
            self._spend(Spent(timing_seconds=steps[-1], memory_seconds=0.0))
        return steps

    @property
    def seconds(self) -> float:
        return self._elapsed_seconds

    def _spend(self, spent: Spent) -> None:
        self.spent.append(spent)
        self._elapsed_seconds += spent.timing_seconds + spent.memory_seconds

    def _rejection(self, visit: Visit) -> Rejection:
        """An attempt that does not fit takes about as long as the micro-step it did not finish."""
        seconds = self.instance.clocks[visit.checkpointing].micro_step_seconds(max(visit.micro_batches))
        self._spend(Spent(timing_seconds=0.0, memory_seconds=seconds))
        return Rejection(kind="out of memory", message="the simulated budget is full", seconds=seconds)

    def _memory_seconds(self, visit: Visit) -> float:
        if not visit.memory_accumulation:
            return 0.0
        clock = self.instance.clocks[visit.checkpointing]
        micro_steps = visit.memory_accumulation * clock.micro_step_seconds(visit.micro_batches[0])
        return 2 * (micro_steps + self.instance.gamma_seconds)

    def _micro_steps(self, mode: Checkpointing, sizes: tuple[int, ...], common: float) -> np.ndarray:
        clock = self.instance.clocks[mode]
        seconds = {size: clock.micro_step_seconds(size) for size in set(sizes)}
        return self._durations(np.array([seconds[size] for size in sizes]), common)

    def _common(self) -> float:
        """The part of the noise that a whole visit shares, and the drift so far."""
        sigma = self.instance.noise * math.sqrt(NOISE_COMMON_TO_A_VISIT)
        since = self._elapsed_seconds / (self.instance.drift_share * self.instance.full_grid_seconds)
        return math.exp(self._random.normal(0, sigma)) * (1 + self.instance.drift * (1 - math.exp(-since)))

    def _durations(self, true_seconds: np.ndarray, common: float) -> np.ndarray:
        sigma = self.instance.noise * math.sqrt(1 - NOISE_COMMON_TO_A_VISIT)
        own = np.exp(self._random.normal(0, sigma, len(true_seconds)))
        outliers = np.where(self._random.random(len(true_seconds)) < OUTLIER_SHARE, OUTLIER_FACTOR, 1.0)
        seconds: np.ndarray = true_seconds * common * own * outliers
        return seconds

    def _read(self, peak_bytes: int) -> int:
        return int(peak_bytes * math.exp(self._random.normal(0, self.instance.reading_noise)))


# ------------------------------------------------------------------ drawing instances


def make_instance(seed: int, noise: float) -> Instance:
    """Draw an instance; the same seed is the same machine at every noise."""
    uneven = bool(np.random.default_rng([seed]).random() < UNEVEN_SHARE)
    for attempt in range(1000):
        instance = _draw(np.random.default_rng([seed, attempt]), seed, noise, uneven=uneven)
        if FEWEST_CANDIDATES <= len(instance.candidates) <= MOST_CANDIDATES:
            return instance
    raise AssertionError(f"seed {seed} gives no instance with a usual number of candidates")


def _draw(random: np.random.Generator, seed: int, noise: float, *, uneven: bool) -> Instance:
    target = _draw_target(random, uneven=uneven)
    modes = CHECKPOINTING_MODES[: int(random.choice([1, 2]))] if uneven else CHECKPOINTING_MODES
    ceilings = _draw_ceilings(random, target, modes)
    clock, breaks = _draw_clock(random, target)
    pressure, pressed_share = random.uniform(0.03, 0.4), random.uniform(0.85, 0.97)
    pressed = "cache knee" not in breaks and bool(random.random() < 0.35)
    memories = _draw_memories(random, ceilings)
    return Instance(
        seed=seed,
        noise=noise,
        target=target,
        uneven=uneven,
        clocks={
            mode: _clock_of(clock, recompute, ceilings[mode], pressed_share, pressure if pressed else 0.0)
            for mode, recompute in _draw_recompute(random).items()
            if mode in modes
        },
        memories=memories,
        gamma_seconds=target * clock.beta_seconds * _log_uniform(random, 0.002, 0.05),
        reading_noise=float(random.choice([0.0, 0.0, 0.01])),
        drift=DRIFT * float(random.choice([-1, 1])),
        drift_share=_log_uniform(random, 0.02, 0.5),
        breaks=(
            *breaks,
            *(["allocator pressure"] if pressed else []),
            *(["stepped memory"] if memories[modes[0]].step > 1 else []),
        ),
    )


def _draw_target(random: np.random.Generator, *, uneven: bool) -> int:
    if not uneven and random.random() < 0.7:
        return int(random.choice([64, 96, 128, 192, 240, 256, 360, 384, 480, 512, 720, 768, 960, 1024]))
    return round(_log_uniform(random, 64, 1024))


def _draw_ceilings(
    random: np.random.Generator, target: int, modes: tuple[Checkpointing, ...]
) -> dict[Checkpointing, int]:
    """Without checkpointing from 1 sample to more than the target, often a tight few; checkpointing multiplies it."""
    none = _log_uniform(random, 1, target / 10 if random.random() < TIGHT_SHARE else 1.5 * target)
    factors = {"none": 1.0, "selective": random.uniform(1.3, 2.5), "full": random.uniform(3, 10)}
    return {mode: max(1, int(none * factors[mode])) for mode in modes}


def _draw_memories(random: np.random.Generator, ceilings: dict[Checkpointing, int]) -> dict[Checkpointing, Memory]:
    fixed_share = random.uniform(0.05, 0.6)
    step = int(random.choice([1, 1, 1, 4, 8]))
    floor_share = fixed_share + float(random.choice([0.0, 0.0, 0.1]))
    slack = random.uniform(0.1, 0.9)
    return {
        mode: memory_with_ceiling(
            ceiling,
            BUDGET_BYTES,
            fixed_share=fixed_share,
            step=min(step, ceiling),
            slack=slack,
            floor_share=floor_share,
        )
        for mode, ceiling in ceilings.items()
    }


def _draw_recompute(random: np.random.Generator) -> dict[Checkpointing, float]:
    return {"none": 1.0, "selective": random.uniform(1.05, 1.2), "full": random.uniform(1.2, 1.4)}


def _draw_clock(random: np.random.Generator, target: int) -> tuple[Clock, list[str]]:
    """An accelerator (a launch-bound floor, dear micro-steps, tiles) or a CPU (cheap ones, a cache)."""
    beta = 0.01
    switches = tuple(
        (_log_uniform(random, 2, target), math.exp(random.uniform(-0.015, 0.015))) for _ in range(random.integers(0, 4))
    )
    breaks = ["kernel switches"] if switches else []
    if random.random() < 0.6:
        floor, alpha = _log_uniform(random, 0.5, 8), _log_uniform(random, 0.05, 5)
        tile_cost = float(random.choice([0.0, random.uniform(0.01, 0.02), random.uniform(0.01, 0.02)]))
        return Clock(
            alpha_seconds=alpha * beta,
            beta_seconds=beta,
            floor_seconds=(alpha + floor) * beta,
            tile=int(random.choice([4, 8, 16])),
            tile_cost=tile_cost,
            switches=switches,
        ), [*breaks, "launch floor", *(["tiles"] if tile_cost else [])]
    knee = _log_uniform(random, 4, 48) if random.random() < 0.6 else math.inf
    return Clock(
        alpha_seconds=_log_uniform(random, 0.02, 0.5) * beta,
        beta_seconds=beta,
        knee=knee,
        rise_per_doubling=random.uniform(0.01, 0.04),
        tile=8,
        tile_cost=0.01,
        switches=switches,
    ), [*breaks, *(["cache knee"] if knee < math.inf else [])]


def _clock_of(clock: Clock, recompute: float, ceiling: int, pressed_share: float, pressure: float) -> Clock:
    """The clock of a checkpointing mode: each sample costs `recompute` times as much, and its own ceiling presses."""
    return Clock(
        alpha_seconds=clock.alpha_seconds,
        beta_seconds=clock.beta_seconds * recompute,
        floor_seconds=clock.floor_seconds * recompute,
        pressed_from=pressed_share * ceiling if pressure else math.inf,
        pressed_until=float(ceiling) if pressure else math.inf,
        pressure=pressure,
        knee=clock.knee,
        rise_per_doubling=clock.rise_per_doubling,
        tile=clock.tile,
        tile_cost=clock.tile_cost,
        switches=clock.switches,
    )


def _log_uniform(random: np.random.Generator, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))
