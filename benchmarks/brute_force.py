"""Our pick against brute force, on this CPU: every candidate of the embedded gpt measured, interleaved.

First the real tune, through its worker process. Then every candidate that fits runs whole optimizer steps in
rounds, in random order, in one warm process; a candidate's time is the location (Hodges-Lehmann) of its rounds. "Rank"
is where the pick stands among all; "behind" is its time over the fastest's, both as brute force measured them.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from tabulate import tabulate

import autobatch
from autobatch.devices.cpu import CpuDevice
from autobatch.records import CHECKPOINTING_MODES, Candidate, Reading, Visit
from autobatch.splits import splits_of
from autobatch.timing import location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autobatch.devices import Session
    from autobatch.records import Plan

TARGET = 256
MEMORY_LIMIT = 1 << 30
MOST_BEHIND = 0.03


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate and the seconds of its whole optimizer steps, one a round."""

    candidate: Candidate
    step_seconds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return math.exp(location([math.log(s) for s in self.step_seconds]))


def candidates(plan: Plan, *, smallest: int) -> list[Candidate]:
    """Every uniform split of at least `smallest` samples a micro-step under its mode's ceiling."""
    ceilings = {probe.checkpointing: probe.ceiling for probe in plan.profile.probe}
    return [
        Candidate(split=split, checkpointing=mode)
        for mode in CHECKPOINTING_MODES
        for split in splits_of(TARGET, 1, ceiling=ceilings[mode], uneven=False)
        if split.micro_batch >= smallest
    ]


def measured(session: Session, everyone: Sequence[Candidate], *, rounds: int) -> list[Timed]:
    """Whole optimizer steps of everyone, in random order, round by round."""
    seconds: dict[Candidate, list[float]] = {candidate: [] for candidate in everyone}
    order = random.Random(0)
    for _ in range(rounds):
        for candidate in order.sample(everyone, len(everyone)):
            visit = Visit(checkpointing=candidate.checkpointing, micro_batches=candidate.split.micro_batches)
            outcome = session.visit(visit)
            assert isinstance(outcome, Reading), outcome
            seconds[candidate].append(sum(outcome.micro_step_seconds) + outcome.optimizer_step_seconds)
    return sorted((Timed(c, tuple(s)) for c, s in seconds.items()), key=lambda timed: timed.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds, micro-batches of 8 and more")
    parser.add_argument("--check", action="store_true", help="exit 1 when the figure misses its bar")
    options = parser.parse_args()

    start = perf_counter()
    plan = autobatch.tune("gpt", TARGET, device="cpu", memory_limit=MEMORY_LIMIT)
    tune_seconds = perf_counter() - start
    everyone = candidates(plan, smallest=8 if options.quick else 1)
    start = perf_counter()
    device = CpuDevice(visit_limit_seconds=600)
    with device.open("gpt", budget_bytes=MEMORY_LIMIT, seed=1) as session:
        timed = measured(session, everyone, rounds=3 if options.quick else 8)
    brute_seconds = perf_counter() - start

    pick = plan.chosen.candidate
    rank = next(index for index, t in enumerate(timed) if t.candidate == pick)
    behind = timed[rank].seconds / timed[0].seconds - 1
    print(table(timed, pick))
    print(f"\ntune {tune_seconds:.0f} s; brute force {brute_seconds:.0f} s for {len(everyone)} candidates")
    print(f"the pick ranks {rank + 1} of {len(timed)}, {100 * behind:.1f} % behind the fastest (bar {MOST_BEHIND:.0%})")
    return int(options.check and behind > MOST_BEHIND)


def table(timed: Sequence[Timed], pick: Candidate) -> str:
    """One row a candidate, fastest first."""
    rows = [
        [
            f"{t.candidate.split.micro_batch} x {t.candidate.split.accumulation}",
            t.candidate.checkpointing,
            f"{1000 * t.seconds:.0f}",
            f"{1000 * min(t.step_seconds):.0f} - {1000 * max(t.step_seconds):.0f}",
            f"{100 * (t.seconds / timed[0].seconds - 1):.1f} %",
            "<- our pick" if t.candidate == pick else "",
        ]
        for t in timed
    ]
    headers = ["split", "checkpointing", "step, ms", "range, ms", "behind", ""]
    return tabulate(rows, headers=headers, disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
