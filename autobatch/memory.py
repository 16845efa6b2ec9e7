"""MemoryModel: peak allocated bytes = fixed + per_sample * m (MEASUREMENT 2)."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from autobatch.records import MemoryModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

WELL_APART = 0.75
"""A second size to draw a line through is at most this share of the first: neighbours give slopes of noise."""


def fit_memory(peaks: Mapping[int, int]) -> MemoryModel | None:
    """The line through the two largest sizes that lie well apart.

    `peaks` maps a micro-batch (samples) to its peak allocated bytes. Small sizes are left out on purpose: there the
    optimizer step, not the activations, makes the peak. Returns None when no line with a positive slope exists.
    """
    if not peaks:
        return None
    top = max(peaks)
    lower = max((size for size in peaks if size <= WELL_APART * top), default=None)
    if lower is None:
        return None
    per_sample = (peaks[top] - peaks[lower]) / (top - lower)
    if per_sample <= 0:
        return None
    fixed = peaks[top] - per_sample * top
    residual = max(abs(fixed + per_sample * size - peak) / peak for size, peak in peaks.items() if size >= lower)
    return MemoryModel(fixed_bytes=fixed, per_sample_bytes=per_sample, largest_residual=residual)


def predicted_ceiling(model: MemoryModel, budget_bytes: int) -> int:
    """The largest micro-batch whose predicted peak is inside the budget."""
    return int((budget_bytes - model.fixed_bytes) // model.per_sample_bytes)


def well_apart(sizes: Iterable[int]) -> list[int]:
    """From the largest down, the sizes that are each at most WELL_APART of the one before."""
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or size <= WELL_APART * kept[-1]:
            kept.append(size)
    return kept


def is_affine(peaks: Mapping[int, int]) -> bool:
    """Whether the two topmost segments rise alike (within 10 %), or there is only one.

    They do not where another phase makes the peak of small sizes, such as the optimizer step.
    """
    sizes = well_apart(peaks)[:3]
    if len(sizes) < 3:
        return True
    upper, lower = ((peaks[a] - peaks[b]) / (a - b) for a, b in pairwise(sizes))
    return lower > 0 and abs(upper / lower - 1) <= 0.10


def longest_stride(peaks: Mapping[int, int]) -> float:
    """How many times the largest size that ran a prediction may be trusted: more evidence, longer strides."""
    sizes = well_apart(peaks)
    if not is_affine(peaks):
        return 2
    if len(sizes) > 2:
        return inf
    return 16 if sizes[0] >= 2 * sizes[-1] else 4
