"""Plans and probes as a person reads them. No figure has more digits than its spread."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tabulate import tabulate

from autobatch.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autobatch.records import Probe, SavedCandidate, SavedPlan

CHOSEN = "<- chosen"


def plan_table(plan: SavedPlan) -> str:
    """The candidates of a plan, fastest first, the chosen one marked."""
    rows = [_row(candidate, plan) for candidate in plan.candidates]
    predicted = " (predicted)" if plan.predicted else ""
    headers = [
        "micro-batch x accumulation",
        "checkpointing",
        f"{plan.unit}/s{predicted}",
        "95 % interval",
        "step",
        "peak memory",
        "",
    ]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=("right", "left", *["right"] * 4, "left"))


def _row(candidate: SavedCandidate, plan: SavedPlan) -> list[str]:
    cells = [split_text(candidate.micro_batches), candidate.checkpointing]
    peak = format_size(candidate.peak_allocated_bytes) if candidate.peak_allocated_bytes else "-"
    if candidate.tokens_per_second is None or candidate.interval is None or candidate.step_seconds is None:
        return [*cells, "-", "-", "-", peak, candidate.why_not or ""]
    digits = _digits(candidate.interval)
    low, high = (_rounded(bound, digits) for bound in candidate.interval)
    chosen = (candidate.micro_batches, candidate.checkpointing) == (plan.micro_batches, plan.checkpointing)
    return [
        *cells,
        _rounded(candidate.tokens_per_second, digits),
        f"{low} - {high}",
        format_seconds(candidate.step_seconds),
        peak,
        CHOSEN if chosen else "",
    ]


def split_text(micro_batches: Sequence[int]) -> str:
    """ "32 x 8", or "29+28 x 9" for sizes that differ by one."""
    sizes = "+".join(str(size) for size in sorted(set(micro_batches), reverse=True))
    return f"{sizes} x {len(micro_batches)}"


def _digits(interval: tuple[float, float]) -> int:
    """The decimal place that a tenth of the interval's width reaches; negative: left of the point."""
    width = max(interval[1] - interval[0], 1e-9)
    return -math.floor(math.log10(width / 5))


def _rounded(value: float, digits: int) -> str:
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def format_seconds(seconds: float) -> str:
    """ "1.23 s" or "45.6 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def plan_summary(plan: SavedPlan) -> str:
    """The chosen line, why it was chosen, how near the limit it is, and how sure that is."""
    replicas = f" x {plan.replicas} replicas" if plan.replicas > 1 else ""
    measured = "predicted" if plan.predicted else "measured"
    peak = format_size(plan.peak_allocated_bytes) if plan.peak_allocated_bytes else "unknown"
    digits = _digits(plan.interval)
    chosen = f"micro-batch {split_text(plan.micro_batches)} micro-steps{replicas} = {plan.target} samples a step"
    speed = f"{_rounded(plan.tokens_per_second, digits)} {plan.unit}/s {measured}"
    lines = [
        f"chosen: {chosen}, checkpointing {plan.checkpointing}",
        f"        {speed}, peak memory {peak} of {format_size(plan.budget_bytes)}",
        *(f"why:    {reason}" for reason in plan.why),
    ]
    if plan.reached is not None:
        lines.append(
            f"limit:  {100 * plan.reached:.0f} % of what this code would reach here with unlimited memory (estimated "
            "from the times measured)"
        )
    lines.append(
        f"search: {plan.search.visits} visits, {plan.search.seconds:.0f} s; a micro-step's time varies by "
        f"{100 * plan.search.noise:.1f} %"
    )
    return "\n".join(lines)


def plan_ceilings(plan: SavedPlan) -> str:
    """One line a checkpointing mode: its ceiling, and what bounded it."""
    lines = []
    for mode, probe in plan.probe.items():
        found = probe.refused or (
            f"ceiling {probe.ceiling} (bounded by {probe.bounded_by}; {probe.attempts} attempts, "
            f"{probe.out_of_memory} out of memory)"
        )
        lines.append(f"checkpointing {mode}: {found}")
    return "\n".join(lines)


def probe_table(probes: Sequence[Probe], *, predicted: bool = False) -> str:
    """The ceilings of a probe, a row a checkpointing mode."""
    rows = [_probe_row(probe) for probe in probes]
    headers = [
        "checkpointing",
        "ceiling" + (" (predicted)" if predicted else ""),
        "bounded by",
        "peak memory",
        "budget",
    ]
    headers += ["per sample", "attempts", "out of memory", "seconds"]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", "right", "left", *["right"] * 6))


def _probe_row(probe: Probe) -> list[str]:
    if probe.refused:
        return [probe.checkpointing, "-", probe.refused, *["-"] * 6]
    peaks = [a.peak_allocated_bytes for a in probe.attempts if a.micro_batch == probe.ceiling and a.fits]
    return [
        probe.checkpointing,
        str(probe.ceiling),
        probe.bounded_by,
        format_size(peaks[0]) if peaks and peaks[0] else "-",
        format_size(probe.budget_bytes),
        format_size(probe.memory.per_sample_bytes) if probe.memory else "-",
        str(len(probe.attempts)),
        str(probe.num_out_of_memory),
        f"{probe.seconds:.1f}",
    ]
