"""Applying activation checkpointing to any nn.Module, and undoing it: none, selective, full (GPU.md)."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from autobatch.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from autobatch.records import Checkpointing

_aten = torch.ops.aten
KEPT_OPERATIONS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 -- the names that torch gives these operators
    _aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
    _aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
    _aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
]
"""What `selective` keeps instead of computing it again: matrix products, convolutions and attention."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: the longest ModuleList or Sequential whose modules are of one class.

    Empty when there is none of at least two modules with parameters.
    """
    containers = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    alike = [list(c) for c in containers if len(c) >= 2 and len({type(module) for module in c}) == 1]
    with_parameters = [blocks for blocks in alike if all(any(True for _ in b.parameters()) for b in blocks)]
    return max(with_parameters, key=len, default=[])


def refusal(model: nn.Module, mode: Checkpointing, blocks: Sequence[nn.Module] | None = None) -> str | None:
    """Why a mode cannot be applied to a model; None when it can."""
    if mode == "none" or blocks or find_blocks(model):
        return None
    return (
        f"no repeated blocks were found in {type(model).__name__} (a ModuleList or Sequential of one class); "
        "name them with the workload's blocks="
    )


@contextmanager
def checkpointed(model: nn.Module, mode: Checkpointing, blocks: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Checkpoint the blocks of a live model for as long as the context lasts.

    `full` computes each block's forward again in the backward pass; `selective` keeps what KEPT_OPERATIONS made. Both
    are non-reentrant, give dropout the same random numbers again, and leave BatchNorm's running statistics to the first
    computation. Raises WorkloadError when the model has no blocks.
    """
    if reason := refusal(model, mode, blocks):
        raise WorkloadError(f"checkpointing {mode} asked; {reason}")
    chosen = [] if mode == "none" else list(blocks or find_blocks(model))
    for block in chosen:
        block.forward = _checkpointing_forward(block, mode)
    try:
        yield
    finally:
        for block in chosen:
            del block.forward


def _checkpointing_forward(block: nn.Module, mode: Checkpointing) -> Callable[..., Any]:
    forward = block.forward

    @wraps(forward)
    def again_in_backward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        contexts = partial(_contexts, block, mode)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return again_in_backward


def _contexts(block: nn.Module, mode: Checkpointing) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    selective = partial(create_selective_checkpoint_contexts, KEPT_OPERATIONS)
    first, again = selective() if mode == "selective" else noop_context_fn()
    return first, _statistics_kept(block, again)


@contextmanager
def _statistics_kept(block: nn.Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Without updates of running statistics: computing a block again must not count its batch twice."""
    tracking = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    momenta = [m.momentum for m in tracking]
    counts = [m.num_batches_tracked.clone() for m in tracking if m.num_batches_tracked is not None]
    for module in tracking:
        module.momentum = 0.0
    try:
        with inner:
            yield
    finally:
        for module, momentum in zip(tracking, momenta, strict=True):
            module.momentum = momentum
        counted = [m.num_batches_tracked for m in tracking if m.num_batches_tracked is not None]
        for current, count in zip(counted, counts, strict=True):
            current.copy_(count)
