"""Workload: what is trained. Loading one from "train.py:workload", "package.module:name" or an embedded name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autobatch.errors import UsageError, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

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
        **options: Any,
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


def load_workload(reference: str, *, device_kind: str) -> Workload:
    """Load "FILE.py:NAME", "package.module:NAME" or an embedded name ("gpt" is the size that suits the device).

    NAME is a Workload, or a function without arguments that returns one. What the module raises comes through.

    Raises UsageError when there is no such file, module, name or embedded workload, and WorkloadError when NAME is
    something else.
    """
    place, separator, name = reference.rpartition(":")
    if not separator:
        from autobatch.workloads import load_embedded

        return load_embedded(reference, device_kind)
    module = _load_file(reference, Path(place)) if place.endswith(".py") else _load_module(reference, place)
    if not hasattr(module, name):
        raise UsageError(f"workload {reference!r} asked; {place} has no {name!r}; name a Workload in it")
    found = getattr(module, name)
    workload = found if isinstance(found, Workload) or not callable(found) else found()
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"workload {reference!r} asked; it is a {type(workload).__name__}; "
            "it has to be an autobatch.Workload or a function that returns one"
        )
    return workload


def _load_file(reference: str, path: Path) -> ModuleType:
    """Import a file as a module of its own name, with its folder importable as when it is run as a script."""
    if not path.is_file():
        raise UsageError(f"workload {reference!r} asked; there is no file {path}; give FILE.py:NAME")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _load_module(reference: str, place: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    if importlib.util.find_spec(place.partition(".")[0]) is None:
        raise UsageError(
            f"workload {reference!r} asked; there is no module {place!r} here; give FILE.py:NAME or module:NAME"
        )
    return importlib.import_module(place)
