"""Live objects as they were: weights, buffers, gradients, optimizer, scaler, RNG streams and train/eval modes."""

from __future__ import annotations

import copy
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer


@contextmanager
def rng_preserved() -> Iterator[None]:
    """Give back every RNG stream (Python, NumPy, torch on the CPU and all accelerators) bit for bit."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    accelerators = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 -- the legacy stream is what users' code draws from
        torch.set_rng_state(cpu)
        if accelerators:
            torch.cuda.set_rng_state_all(accelerators)


@contextmanager
def objects_preserved(model: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> Iterator[None]:
    """Give back live objects bit for bit, also when the body raises.

    The copies are kept in host memory, so that an accelerator holds no more than in training. The same tensor objects
    get their values back in place: views, hooks and references of the user's stay valid.
    """
    restores = [
        *_tensors(model),
        *_gradients(model),
        *_modes(model),
        *_optimizer(optimizer),
        *_scaler(scaler),
    ]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _tensors(model: nn.Module) -> Iterator[Callable[[], None]]:
    for module in model.modules():
        for slots in (module._parameters, module._buffers):  # noqa: SLF001 -- non-persistent buffers too
            yield _slots_restore(slots)


def _slots_restore(slots: dict[str, Any]) -> Callable[[], None]:
    saved = {name: _saved(value) for name, value in slots.items()}

    def restore() -> None:
        slots.clear()
        slots.update({name: give_back() for name, give_back in saved.items()})

    return restore


def _saved(value: Any) -> Callable[[], Any]:
    """A function that returns `value` as it is now: the same tensor objects, with the values they have now."""
    if isinstance(value, torch.Tensor):
        host = value.detach().to("cpu", copy=True)
        return lambda: _copied_into(value, host)
    if isinstance(value, dict):
        entries = {key: _saved(entry) for key, entry in value.items()}
        return lambda: _refilled(value, {key: entry() for key, entry in entries.items()})
    if isinstance(value, (list, tuple)):
        items = [_saved(item) for item in value]
        return lambda: type(value)(item() for item in items)
    kept = copy.deepcopy(value)
    return lambda: kept


def _copied_into(tensor: Tensor, host: Tensor) -> Tensor:
    with torch.no_grad():
        tensor.copy_(host)
    return tensor


def _refilled(mapping: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    mapping.clear()
    mapping.update(entries)
    return mapping


def _gradients(model: nn.Module) -> Iterator[Callable[[], None]]:
    for parameter in model.parameters():
        yield _gradient_restore(parameter, _saved(parameter.grad))


def _gradient_restore(parameter: nn.Parameter, give_back: Callable[[], Any]) -> Callable[[], None]:
    def restore() -> None:
        parameter.grad = give_back()

    return restore


def _modes(model: nn.Module) -> Iterator[Callable[[], None]]:
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    yield restore


def _optimizer(optimizer: Optimizer) -> Iterator[Callable[[], None]]:
    state = _saved(dict(optimizer.state))
    groups = [
        (group, {key: _saved(value) for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]
    attributes = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}

    def restore() -> None:
        optimizer.state.clear()
        optimizer.state.update(state())
        for group, entries in groups:
            group.update({key: give_back() for key, give_back in entries.items()})
        vars(optimizer).update(attributes)

    yield restore


def _scaler(scaler: torch.amp.GradScaler | None) -> Iterator[Callable[[], None]]:
    if scaler is not None:
        attributes = {key: _saved(value) for key, value in vars(scaler).items()}
        yield lambda: vars(scaler).update({key: give_back() for key, give_back in attributes.items()})
