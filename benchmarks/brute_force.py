"""Our pick against brute force, on this CPU: every candidate of the embedded gpt measured, interleaved.

First the real tune, through its worker process. Then every candidate that fits runs whole optimizer steps in rounds, in
random order, in one warm process; after three rounds only those within 25 % of the fastest go on. Last, the fastest of
them and our pick run in turn, on fresh rounds, since the fastest of many noisy figures is partly luck: "behind" is the
pick's time over that rival's there, block by block, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import dataclass
from statistics import stdev
from time import perf_counter
from typing import TYPE_CHECKING

from tabulate import tabulate

import autobatch
from autobatch.devices.cpu import CpuDevice
from autobatch.records import CHECKPOINTING_MODES, Candidate, Reading, Visit
from autobatch.splits import splits_of
from autobatch.timing import location, log_interval, log_ratios

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autobatch.devices import Session
    from autobatch.records import Plan

TARGET = 256
MEMORY_LIMIT = 1 << 30
MOST_BEHIND = 0.03
NEAR = 1.25


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


def measured(session: Session, everyone: Sequence[Candidate], *, rounds: int, seed: int = 0) -> list[Timed]:
    """Whole optimizer steps of everyone, in random order, round by round; fastest first."""
    seconds: dict[Candidate, list[float]] = {candidate: [] for candidate in everyone}
    order = random.Random(seed)
    for _ in range(rounds):
        for candidate in order.sample(everyone, len(everyone)):
            visit = Visit(checkpointing=candidate.checkpointing, micro_batches=candidate.split.micro_batches)
            outcome = session.visit(visit)
            assert isinstance(outcome, Reading), outcome
            seconds[candidate].append(sum(outcome.micro_step_seconds) + outcome.optimizer_step_seconds)
    return sorted((Timed(c, tuple(s)) for c, s in seconds.items()), key=lambda timed: timed.seconds)


def brute_force(session: Session, everyone: Sequence[Candidate], *, rounds: int) -> list[Timed]:
    """Everyone for three rounds, then those within 25 % of the fastest for the others; fastest first."""
    first = measured(session, everyone, rounds=3)
    near = [timed for timed in first if timed.seconds <= NEAR * first[0].seconds]
    more = {t.candidate: t.step_seconds for t in measured(session, [t.candidate for t in near], rounds=rounds, seed=1)}
    joined = [Timed(t.candidate, t.step_seconds + more.get(t.candidate, ())) for t in first]
    return sorted(joined, key=lambda timed: (timed.candidate not in more, timed.seconds))


def behind_rival(session: Session, pick: Candidate, rival: Candidate, *, rounds: int) -> tuple[float, float, float]:
    """The pick's time over the rival's, less one, on fresh paired rounds, and its 95 % interval."""
    if pick == rival:
        return 0.0, 0.0, 0.0
    seconds = {t.candidate: t.step_seconds for t in measured(session, [pick, rival], rounds=rounds, seed=2)}
    ratios = log_ratios(seconds[pick], seconds[rival])
    low, high = log_interval(ratios, stdev(ratios))
    return math.expm1(location(ratios)), math.expm1(low), math.expm1(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, micro-batches of 8 and more")
    parser.add_argument("--check", action="store_true", help="exit 1 when the figure misses its bar")
    options = parser.parse_args()

    start = perf_counter()
    plan = autobatch.tune("gpt", TARGET, device="cpu", memory_limit=MEMORY_LIMIT)
    tune_seconds = perf_counter() - start
    everyone = candidates(plan, smallest=8 if options.quick else 1)
    start = perf_counter()
    device = CpuDevice(visit_limit_seconds=600)
    with device.open("gpt", budget_bytes=MEMORY_LIMIT, seed=1) as session:
        timed = brute_force(session, everyone, rounds=2 if options.quick else 6)
        brute_seconds = perf_counter() - start
        pick = plan.chosen.candidate
        rank = next(index for index, t in enumerate(timed) if t.candidate == pick)
        behind, low, high = behind_rival(session, pick, timed[0].candidate, rounds=6 if options.quick else 16)
    print(table(timed, pick))
    print(f"\ntune {tune_seconds:.0f} s; brute force {brute_seconds:.0f} s for {len(everyone)} candidates")
    print(
        f"the pick ranks {rank + 1} of {len(timed)}; on fresh rounds it is {100 * behind:.1f} % "
        f"[{100 * low:.1f}, {100 * high:.1f}] behind the fastest (bar {MOST_BEHIND:.0%})"
    )
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
