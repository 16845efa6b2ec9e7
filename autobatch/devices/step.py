"""The one training step. Probe, race, the training helper and the emitted script all train this way.

A split's gradient equals that of the whole batch only if each micro-batch's mean loss is weighted by its share of what
the means are over (FRAMEWORKS, "Loss normalisation").
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from autobatch.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from autobatch.workload import Precision

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class Trainee:
    """What is trained, and how: everything one optimizer step needs."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Any, Any], Tensor]
    precision: Precision = "fp32"
    clip_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        if self.precision == "fp16" and self.scaler is None:
            self.scaler = torch.amp.GradScaler(self.device_type)


def micro_step(trainee: Trainee, batch: Any, *, share: float, last: bool = True) -> Tensor:
    """Forward and backward of one micro-batch whose mean loss counts for `share` of the optimizer step.

    Under DistributedDataParallel gradients are exchanged only when it is the `last`. Returns the loss, detached.
    Raises WorkloadError when the loss is not one number that has a gradient.
    """
    with _no_exchange(trainee.model) if not last else nullcontext():
        with _autocast(trainee):
            loss = trainee.loss(trainee.model, batch)
        _require_scalar(loss)
        weighted = loss * share
        torch.autograd.backward(trainee.scaler.scale(weighted) if trainee.scaler else weighted)
    return loss.detach()


def optimizer_step(trainee: Trainee) -> None:
    """Clip, step and zero the gradients, through the GradScaler where there is one."""
    optimizer, scaler = trainee.optimizer, trainee.scaler
    if trainee.clip_norm is not None:
        if scaler:
            scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, trainee.clip_norm)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train_step(trainee: Trainee, batches: Sequence[Any], weights: Sequence[float]) -> float:
    """One whole optimizer step over the micro-batches of this replica; returns the weighted mean loss of all.

    `weights[i]` is what the mean loss of `batches[i]` is over: samples, or non-ignored target tokens. The total is
    taken over all ranks where torch.distributed is initialised, and the shares are multiplied by the number of ranks,
    since DistributedDataParallel averages gradients.
    """
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    total = torch.tensor(float(sum(weights)), dtype=torch.float64)
    if world > 1:
        total = _summed_over_ranks(total, trainee)
    mean = 0.0
    for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        share = weight / total.item()
        loss = micro_step(trainee, batch, share=share * world, last=index == len(batches) - 1)
        mean += share * loss.item()
    optimizer_step(trainee)
    if world > 1:
        mean = _summed_over_ranks(torch.tensor(mean, dtype=torch.float64), trainee).item()
    return mean


def _summed_over_ranks(value: Tensor, trainee: Trainee) -> Tensor:
    parameter = next(trainee.model.parameters())
    value = value.to(parameter.device, torch.float32 if parameter.device.type == "mps" else None)
    distributed.all_reduce(value)
    return value


def _autocast(trainee: Trainee) -> AbstractContextManager[Any]:
    dtype = AUTOCAST_TYPES.get(trainee.precision)
    return torch.autocast(trainee.device_type, dtype=dtype) if dtype else nullcontext()


def _no_exchange(model: nn.Module) -> AbstractContextManager[Any]:
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def _require_scalar(loss: object) -> None:
    if not isinstance(loss, torch.Tensor):
        raise WorkloadError(
            f"the workload's loss returned a {type(loss).__name__}; it has to return a scalar tensor; "
            "return the mean loss of the batch"
        )
    if loss.numel() != 1:
        raise WorkloadError(
            f"the workload's loss returned a tensor of shape {tuple(loss.shape)}; it has to be a scalar; "
            "return its mean"
        )
    if not loss.requires_grad:
        raise WorkloadError(
            "the workload's loss has no gradient; it has to depend on parameters that require one; "
            "check for no_grad, detach or frozen parameters"
        )
