"""A small machine with an affine clock and an affine memory: a Session whose right answers are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from autobatch.records import (
    Checkpointing,
    DeviceInfo,
    Outcome,
    Reading,
    Rejection,
    Settings,
    Visit,
    WorkloadFacts,
)

BUDGET = 10**9


def facts(**changes: object) -> WorkloadFacts:
    values: dict[str, object] = {
        "name": "toy",
        "reference": "toy.py:workload",
        "num_parameters": 1000,
        "precision": "fp32",
        "unit": "tokens",
        "units_per_sample": 64.0,
        "clip_norm": None,
        "dataset_size": None,
    }
    return WorkloadFacts(**(values | changes))  # type: ignore[arg-type]


def info() -> DeviceInfo:
    return DeviceInfo(kind="cpu", name="toy machine", capacity_bytes=BUDGET, available_bytes=BUDGET)


def settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "target": 256,
        "replicas": 1,
        "uneven": False,
        "checkpointing": ("none",),
        "budget_bytes": BUDGET,
        "memory_limit_bytes": None,
        "headroom_percent": 5.0,
        "max_micro_batch": None,
        "time_budget_seconds": 1e9,
        "seed": 0,
    }
    return Settings(**(values | changes))  # type: ignore[arg-type]


@dataclass
class Machine:
    """Implements Session. `peak(mode, m)` in bytes; `seconds(mode, m)` of one micro-step; `gamma` an optimizer step."""

    peak: Callable[[Checkpointing, int], float] = lambda _mode, m: 3e8 + 7e6 * m
    seconds: Callable[[Checkpointing, int], float] = lambda _mode, m: 0.01 + 0.002 * m
    gamma: float = 0.005
    noise: float = 0.0
    seed: int = 0
    budget: int = BUDGET
    facts: WorkloadFacts = field(default_factory=facts)
    visits: list[Visit] = field(default_factory=list)
    invalid: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def visit(self, visit: Visit, /) -> Outcome:
        self.visits.append(visit)
        mode, size = visit.checkpointing, visit.micro_batches[0]
        if size in self.invalid:
            return Rejection(kind="size limit", message="grid too large", seconds=0.1)
        peak = self.peak(mode, size)
        if peak > self.budget:
            return Rejection(kind="out of memory", message="full", seconds=0.1)
        steps = tuple(self._noisy(self.seconds(mode, m)) for m in visit.micro_batches)
        warm = self.seconds(mode, size) * (1 + 2 * visit.memory_accumulation)
        return Reading(
            micro_step_seconds=steps,
            optimizer_step_seconds=self._noisy(self.gamma),
            seconds=warm + sum(steps) + self.gamma,
            peak_allocated_bytes=int(peak) if visit.memory_accumulation else None,
        )

    def _noisy(self, seconds: float) -> float:
        return seconds * math.exp(self._random.gauss(0, self.noise))
