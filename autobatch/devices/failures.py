"""What an out-of-memory looks like: by type first, by message last, in this one place (GPU.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from autobatch.records import RejectionKind

OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "could not create a primitive",  # oneDNN, when its scratchpad does not fit
)
INVALID_SIZE_MESSAGES = ("Expected more than 1 value per channel when training",)  # BatchNorm, one sample


def rejection_kind(error: BaseException) -> RejectionKind | None:
    """What an exception of a training step says of the size that was tried; None: it is the user's own error."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "out of memory"
    if isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_MESSAGES):
        return "out of memory"
    if isinstance(error, ValueError) and any(text in str(error) for text in INVALID_SIZE_MESSAGES):
        return "size limit"
    return None
