"""Which splits reach a target."""

from __future__ import annotations

from autobatch.errors import UsageError
from autobatch.records import Split


def balanced(samples: int, parts: int) -> tuple[int, ...]:
    """Cut `samples` into `parts` sizes that differ by at most one, the larger ones first."""
    size, larger = divmod(samples, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def samples_per_replica(target: int, replicas: int) -> int:
    """The share of one optimizer step's samples that each replica runs.

    Raises UsageError when the target is below one or cannot be shared equally.
    """
    if target < 1:
        raise UsageError(f"target {target} asked; a target is at least 1 sample; give a positive number")
    if replicas < 1:
        raise UsageError(f"{replicas} replicas asked; there is at least 1; give a positive number")
    if target % replicas:
        below = target - target % replicas
        raise UsageError(
            f"target {target} asked over {replicas} replicas; it does not divide by {replicas}; "
            f"use {below or replicas} or {below + replicas}"
        )
    return target // replicas


def splits_of(target: int, replicas: int, *, ceiling: int, uneven: bool) -> list[Split]:
    """Every split worth considering whose micro-batch is at most `ceiling`, fewest micro-steps first.

    Uniform: one for each accumulation that divides the samples of a replica. Uneven: one for each different
    largest size, with the fewest micro-steps that reach it, since at a fixed target only their number costs
    (MEASUREMENT 1); so N = 256 has 31 of them.
    """
    samples = samples_per_replica(target, replicas)
    counts = range(-(-samples // ceiling), samples + 1) if ceiling else range(0)
    if not uneven:
        kept = [count for count in counts if samples % count == 0]
    else:
        fewest: dict[int, int] = {}
        for count in counts:
            fewest.setdefault(-(-samples // count), count)
        kept = list(fewest.values())
    return [Split(replicas=replicas, micro_batches=balanced(samples, count)) for count in kept]
