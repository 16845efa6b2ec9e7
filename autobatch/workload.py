"""Workload: what is trained. Loading one from "train.py:workload", "package.module:name" or an embedded name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import nn
    from torch.optim import Optimizer

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained: model, optimizer, loss and a batch maker.

    `batch(samples)` returns any pytree of tensors holding that many samples: the largest batch of that many
    samples that training can meet (the longest sequences), since memory is probed with it. `typical_batch`, when
    given, is what training meets on average; speed is measured with it. `loss(model, batch)` returns a scalar, the
    mean over what it averages, and `weight(batch)` is the number that mean is over (non-ignored target tokens for
    a language model; default: samples). `tokens_per_sample` is a number, or a function of a batch that counts its
    non-padding tokens; None: speed is reported in samples per second.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    typical_batch: Callable[[int], Any] | None = None
    tokens_per_sample: int | Callable[[Any], int] | None = None
    weight: Callable[[Any], float] | None = None
    precision: Precision = "fp32"
    clip_norm: float | None = None
    blocks: Callable[[nn.Module], list[nn.Module]] | None = None
    dataset_size: int | None = None
    scaler: torch.amp.GradScaler | None = None
    live: bool = False

    @classmethod
    def around(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], torch.Tensor],
        batch: Callable[[int], Any],
        **options: Any,  # noqa: ANN401 -- the other fields of Workload, passed on
    ) -> Workload:
        """Wrap live objects for an embedded tune.

        After the tune, weights, buffers, gradients, optimizer state, `scaler`, every RNG stream and the train/eval
        modes are as they were before, bit for bit, also when the tune fails.
        """
        defaults: dict[str, Any] = {"name": type(model).__name__}
        return cls(
            model=lambda: model,
            optimizer=lambda _parameters: optimizer,
            loss=loss,
            batch=batch,
            live=True,
            **(defaults | options),
        )

    def renamed(self, name: str) -> Workload:
        return dataclasses.replace(self, name=name)
