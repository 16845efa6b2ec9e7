"""What a training script uses at run time: one optimizer step by a plan.

step = autobatch.TrainingStep(plan, model, optimizer, loss, weight=count_targets)
for batch in loader:          # plan.target / plan.replicas samples each
    result = step(batch)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from autobatch.devices.step import Trainee, train_step
from autobatch.errors import WorkloadError
from autobatch.splits import balanced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from autobatch.workload import Precision


class HasMicroBatches(Protocol):
    """A plan, as `tune` returns it or `read_plan` reads it."""

    @property
    def micro_batches(self) -> Sequence[int]:
        """The sizes of one optimizer step on one replica."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step: the weighted mean loss over all replicas, and the samples this replica ran."""

    loss: float
    samples: int


class TrainingStep:
    """Runs one optimizer step over a batch, cut into the plan's micro-batches.

    The loss of each micro-batch counts by its `weight` (what its mean is over; default: its samples), over the whole
    optimizer step and all ranks, so that the gradient is that of the whole batch. Clips, steps and zeroes the
    gradients; under DistributedDataParallel gradients are exchanged in the last micro-step only. Checkpointing is put
    on the model, not here: train inside `with autobatch.checkpointed(model, plan.checkpointing)`.
    """

    def __init__(
        self,
        plan: HasMicroBatches,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor],
        *,
        weight: Callable[[Any], float] | None = None,
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._micro_batches = tuple(plan.micro_batches)
        self._weight = weight
        self._trainee = Trainee(
            model=model,
            optimizer=optimizer,
            loss=loss,
            precision=precision,
            clip_norm=clip_norm,
            scaler=scaler,
            device_type=next(model.parameters()).device.type,
        )

    def __call__(self, batch: Any) -> StepResult:
        """Train on `batch`, a pytree whose tensors have the samples first.

        A batch of another size than the plan's (the last of an epoch) is cut evenly into micro-batches no larger than
        the plan's. Raises WorkloadError when the batch holds no tensor with a first dimension.
        """
        samples = num_samples(batch)
        sizes = self._sizes(samples)
        batches = split_batch(batch, sizes)
        weights = [self._weight(b) for b in batches] if self._weight else [float(size) for size in sizes]
        return StepResult(loss=train_step(self._trainee, batches, weights), samples=samples)

    def _sizes(self, samples: int) -> tuple[int, ...]:
        if samples == sum(self._micro_batches):
            return self._micro_batches
        return balanced(samples, -(-samples // max(self._micro_batches)))


def num_samples(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.size(0)
    raise WorkloadError("a batch without tensors was given; a batch is a pytree of tensors with the samples first")


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut every tensor that has the batch's samples first into pieces of `sizes`; others go to all pieces."""
    samples = sum(sizes)

    def piece(start: int, size: int) -> Any:
        return tree_map_only(
            torch.Tensor,
            lambda t: t[start : start + size] if t.dim() and t.size(0) == samples else t,
            batch,
        )

    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [piece(start, size) for start, size in zip(starts, sizes, strict=True)]
