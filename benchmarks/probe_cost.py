"""Attempts and out-of-memory events until the ceiling is found, ours against the rules of other finders.

True ceilings from 1 to 1000 samples, bounded at a target of 256 or 4096, on four kinds of memory: affine; stepped
(padded to 4, 8 or 16 samples); floored (the optimizer step's peak hides the activations of small sizes); noisy
(affine, the peaks read are off by 1-3 %, the wall is exact). Each at several fixed parts (2-85 % of the budget) and
slacks (how far the budget reaches into the next sample). An attempt is one size tried, whatever it takes: ours takes
4 micro-steps and 2 optimizer steps against the budget and then times 3 micro-steps, Lightning's takes 3 steps. The
others do not depend on the kind: they only ask what fits. The wall here always rises with the size; where it has
holes no rule finds the largest, and that is not measured here.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING

from finders import (
    Finding,
    accelerate,
    binsearch_told_the_bound,
    lightning_binsearch,
    lightning_power,
    trainer,
)
from simulated import BUDGET_BYTES, Clock, Instance, Memory, SimulatedSession, memory_with_ceiling
from tabulate import tabulate

from autobatch.ceiling import find_ceiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CEILINGS = (1, 2, 7, 24, 47, 93, 200, 1000)
BOUNDS = (256, 4096)
KINDS = ("affine", "stepped", "floored", "noisy")
FIXED_SHARES, QUICK_FIXED_SHARES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.85), (0.1, 0.5, 0.85)
SLACKS, QUICK_SLACKS = (0.02, 0.3, 0.7, 0.98), (0.3, 0.98)
STEPS = (4, 8, 16)
FLOORS = (0.05, 0.15, 0.4)  # of the budget left beside the fixed part
READING_NOISES = (0.01, 0.02, 0.03)
SEEDS, QUICK_SEEDS = range(900_000, 900_010), range(900_000, 900_002)
MOST_ATTEMPTS, MOST_OUT_OF_MEMORY = 5, 1  # on affine memory
GAMMA_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One machine and bound."""

    kind: str
    ceiling: int  # of the memory; the answer wanted is min(ceiling, bound)
    bound: int
    memory: Memory
    reading_noise: float = 0.0
    seed: int = 0
    detail: str = ""

    @property
    def answer(self) -> int:
        return min(self.ceiling, self.bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What our probe did on a case, and what the rule compared with did."""

    case: Case
    answer: int
    sizes: tuple[int, ...]
    num_out_of_memory: int
    bisected: Finding

    @property
    def num_attempts(self) -> int:
        return len(self.sizes)

    @property
    def wrong(self) -> bool:
        return self.answer != self.case.answer

    @property
    def dear(self) -> bool:
        """Above the bar that affine memory is held to."""
        return self.num_attempts > MOST_ATTEMPTS or self.num_out_of_memory > MOST_OUT_OF_MEMORY


def cases(*, quick: bool) -> Iterator[Case]:
    """Every kind of memory at every ceiling, bound, fixed part and slack."""
    shares, slacks = (QUICK_FIXED_SHARES, QUICK_SLACKS) if quick else (FIXED_SHARES, SLACKS)
    seeds = QUICK_SEEDS if quick else SEEDS
    for ceiling, bound, share, slack in product(CEILINGS, BOUNDS, shares, slacks):
        where = f"fixed {share:g}, slack {slack:g}"
        affine = memory_with_ceiling(ceiling, BUDGET_BYTES, fixed_share=share, slack=slack)
        yield Case(kind="affine", ceiling=ceiling, bound=bound, memory=affine, detail=where)
        for step in STEPS:
            memory = memory_with_ceiling(ceiling, BUDGET_BYTES, fixed_share=share, slack=slack, step=step)
            detail = f"{where}, step {step}"
            yield Case(kind="stepped", ceiling=ceiling, bound=bound, memory=memory, detail=detail)
        for floor in FLOORS:
            floor_share = share + floor * (1 - share)
            memory = memory_with_ceiling(ceiling, BUDGET_BYTES, fixed_share=share, slack=slack, floor_share=floor_share)
            detail = f"{where}, floor {floor_share:.2f}"
            yield Case(kind="floored", ceiling=ceiling, bound=bound, memory=memory, detail=detail)
        for noise, seed in product(READING_NOISES, seeds):
            yield Case(
                kind="noisy",
                ceiling=ceiling,
                bound=bound,
                memory=affine,
                reading_noise=noise,
                seed=seed,
                detail=f"{where}, readings {100 * noise:g} %, seed {seed}",
            )


def probed(case: Case) -> Probed:
    """Run our probe on a case."""
    instance = Instance(
        seed=case.seed,
        noise=0.01,
        target=case.bound,
        uneven=False,
        clocks={"none": Clock(alpha_seconds=0.01, beta_seconds=0.01)},
        memories={"none": case.memory},
        gamma_seconds=GAMMA_SECONDS,
        reading_noise=case.reading_noise,
    )
    found = find_ceiling(
        SimulatedSession(instance, seed=4),
        "none",
        bound=case.bound,
        bounded_by="target",
        budget_bytes=BUDGET_BYTES,
        samples_per_replica=case.bound,
    )
    return Probed(
        case=case,
        answer=found.ceiling,
        sizes=tuple(attempt.micro_batch for attempt in found.attempts),
        num_out_of_memory=found.num_out_of_memory,
        bisected=binsearch_told_the_bound(lambda m: m <= case.ceiling, case.bound),
    )


# ------------------------------------------------------------------ reporting


def table(results: Sequence[Probed]) -> str:
    """One row a bound and ceiling: ours by kind of memory, mean (most), then the other rules."""
    headers = ["bound", "M", *(f"ours, {kind}" for kind in KINDS), "binsearch, told the bound"]
    headers += ["Lightning binsearch", "Lightning power", "Accelerate", "HF Trainer"]
    rows = []
    for bound, ceiling in product(BOUNDS, CEILINGS):
        at = [r for r in results if (r.case.bound, r.case.ceiling) == (bound, ceiling)]
        ours = [_mean_and_most([r for r in at if r.case.kind == kind]) for kind in KINDS]
        rows.append([bound, ceiling, *ours, _shown(at[0].bisected), *_others(ceiling)])
    return tabulate(rows, headers=headers, stralign="right", disable_numparse=True)


def _mean_and_most(results: Sequence[Probed]) -> str:
    attempts, failed = [r.num_attempts for r in results], [r.num_out_of_memory for r in results]
    num_wrong = sum(r.wrong for r in results)
    shown = f"{fmean(attempts):.1f}/{fmean(failed):.1f} ({max(attempts)}/{max(failed)})"
    return f"{shown}, {num_wrong} wrong" if num_wrong else shown


def _others(ceiling: int) -> list[str]:
    rules: tuple[Callable[[Callable[[int], bool]], Finding], ...] = (
        lightning_binsearch,
        lightning_power,
        accelerate,
        trainer,
    )
    return [_shown(rule(lambda m: m <= ceiling)) for rule in rules]


def _shown(finding: Finding) -> str:
    return f"{finding.num_attempts}/{finding.num_out_of_memory} -> {finding.answer}"


def totals(results: Sequence[Probed]) -> str:
    """One row a kind of memory and bound: the sums, and how many cases miss a bar."""
    headers = ["memory", "bound", "cases", "wrong", f"above {MOST_ATTEMPTS}/{MOST_OUT_OF_MEMORY}"]
    headers += ["ours, total", "binsearch told the bound, total", "dearer than it"]
    rows = []
    for kind, bound in product(KINDS, BOUNDS):
        kept = [r for r in results if (r.case.kind, r.case.bound) == (kind, bound)]
        ours, theirs = _sums(kept)
        missed = [sum(r.wrong for r in kept), sum(r.dear for r in kept)]
        dearer = sum(r.num_attempts > r.bisected.num_attempts for r in kept)
        rows.append([kind, bound, len(kept), *missed, "/".join(map(str, ours)), "/".join(map(str, theirs)), dearer])
    return tabulate(rows, headers=headers, stralign="right", disable_numparse=True)


def _sums(results: Sequence[Probed]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(attempts, out-of-memory events) of ours, and of the bisection that is told the bound."""
    ours = sum(r.num_attempts for r in results), sum(r.num_out_of_memory for r in results)
    theirs = sum(r.bisected.num_attempts for r in results), sum(r.bisected.num_out_of_memory for r in results)
    return ours, theirs


def misses(results: Sequence[Probed]) -> list[str]:
    """Every bar that is missed, with how often."""
    found = []
    if num_wrong := sum(r.wrong for r in results):
        found.append(f"a wrong ceiling in {num_wrong} of {len(results)} cases")
    affine = [r for r in results if r.case.kind == "affine"]
    if num_dear := sum(r.dear for r in affine):
        found.append(f"more than {MOST_ATTEMPTS}/{MOST_OUT_OF_MEMORY} in {num_dear} of {len(affine)} affine cases")
    for kind, bound in product(KINDS, BOUNDS):
        ours, theirs = _sums([r for r in results if (r.case.kind, r.case.bound) == (kind, bound)])
        if ours[0] > theirs[0] or ours[1] > theirs[1]:
            found.append(f"dearer in total than bisection on {kind} memory, bound {bound}")
    return found


def failures(results: Sequence[Probed]) -> str:
    """Every case with a wrong ceiling, and every affine case above the bar, with the sizes tried."""
    bad = [r for r in results if r.wrong or (r.dear and r.case.kind == "affine")]
    rows = [
        [r.case.kind, r.case.bound, r.case.ceiling, r.case.detail, r.answer, r.num_out_of_memory, [*r.sizes]]
        for r in bad
    ]
    return tabulate(rows, headers=["memory", "bound", "M", "machine", "answer", "out of memory", "sizes tried"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer machines")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    parser.add_argument("--failures", action="store_true", help="list the cases that miss a bar, with the sizes tried")
    options = parser.parse_args()
    results = [probed(case) for case in cases(quick=options.quick)]
    print("attempts/out-of-memory events; ours: mean (most), and how many wrong answers if any\n")
    print(table(results))
    print("\n" + totals(results))
    if options.failures:
        print("\n" + failures(results))
    missed = misses(results)
    print("\n" + ("\n".join(missed) or "no bar missed"))
    affine = [r for r in results if r.case.kind == "affine"]
    print(
        f"true ceiling in {sum(not r.wrong for r in results)} of {len(results)} cases; on affine memory at most "
        f"{max(r.num_attempts for r in affine)} attempts and {max(r.num_out_of_memory for r in affine)} out-of-memory"
    )
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
