"""MemoryModel: peak allocated bytes = fixed + per_sample * m (MEASUREMENT 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autobatch.records import MemoryModel

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def is_affine(peaks: Mapping[int, int]) -> bool:
    """Whether the two topmost segments rise alike (within 10 %), or there is only one.

    They do not where another phase makes the peak of small sizes, such as the optimizer step.
    """
    model = fit_memory(peaks)
    below = fit_memory({size: peak for size, peak in peaks.items() if size <= WELL_APART * max(peaks)})
    if len(peaks) <= 2 or model is None:
        return True
    return below is not None and abs(model.per_sample_bytes / below.per_sample_bytes - 1) <= 0.10
