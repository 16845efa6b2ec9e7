"""Tiny workloads with known faults; some are loaded by reference: tests/toys.py:NAME."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn

from autobatch import Workload

WIDTH = 64


class Toy(nn.Module):
    def __init__(self, *, depth: int = 4, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(0.1)
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, WIDTH)
    return x, x[:, :1] * 0.5


def loss(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = data
    return nn.functional.mse_loss(model(x), y)


def toy(**changes: object) -> Workload:
    values = {
        "name": "toy",
        "model": Toy,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "batch": batch,
        "loss": loss,
        "clip_norm": 1.0,
    }
    return Workload(**(values | changes))


workload = toy()


def function() -> Workload:
    return toy(name="from a function")


not_a_workload = 3


def vector_loss() -> Workload:
    return toy(loss=lambda model, data: (model(data[0]) - data[1]).square())


def number_loss() -> Workload:
    return toy(loss=lambda model, data: loss(model, data).item())


def nan_loss() -> Workload:
    return toy(loss=lambda model, data: loss(model, data) * float("nan"))


def constant_batch() -> Workload:
    return toy(batch=lambda _samples: batch(8))


def shape_bug() -> Workload:
    return toy(loss=lambda model, data: loss(model, (data[0][:, :-1], data[1])))


def noisy() -> Workload:
    def chatty(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        print("printed by the user's code")
        return loss(model, data)

    return toy(loss=chatty)


def _from(size: int, fault: object) -> Workload:
    """A workload whose loss does something bad from a batch of `size` on."""

    def faulty(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if data[0].size(0) >= size:
            fault()
        return loss(model, data)

    return toy(loss=faulty)


def killed_from_32() -> Workload:
    return _from(32, lambda: os.kill(os.getpid(), signal.SIGKILL))


def crashes_from_32() -> Workload:
    return _from(32, lambda: os.kill(os.getpid(), signal.SIGSEGV))


def hangs_from_32() -> Workload:
    return _from(32, lambda: time.sleep(3600))


def exits_always() -> Workload:
    return _from(1, lambda: sys.exit(7) or os._exit(7))
