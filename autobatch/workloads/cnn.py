"""cnn: a small residual network with BatchNorm, telling ten orientations of noisy gratings apart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own convention

from autobatch.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

NUM_CLASSES = 10
PIXELS = 32
NOISE = 1.0  # standard deviation; the grating's amplitude is 1


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.shortcut(x) + self.second_norm(self.second(inner)))


class Cnn(nn.Module):
    """Images of shape (samples, 3, 32, 32) to logits of shape (samples, 10): ResNet-20's shape (He et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(*_stage(16, 16, stride=1), *_stage(16, 32, stride=2), *_stage(32, 64, stride=2))
        self.head = nn.Linear(64, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return logits


def _stage(channels_in: int, channels: int, *, stride: int) -> list[Residual]:
    return [Residual(channels_in, channels, stride=stride), *(Residual(channels, channels, stride=1) for _ in range(2))]


def cnn_workload() -> Workload:
    """The workload; speed is counted in samples."""
    return Workload(
        name="cnn",
        model=Cnn,
        optimizer=_optimizer,
        batch=gratings,
        loss=orientation_loss,
    )


def gratings(samples: int) -> tuple[Tensor, Tensor]:
    """Images (samples, 3, 32, 32) and labels (samples,), made with torch's global generator.

    Class c is a sine grating turned by pi * c / 10, of any phase, 3 to 6 periods an image, in a random colour, with
    noise of the same size on every pixel.
    """
    labels = torch.randint(NUM_CLASSES, (samples,))
    angles = (labels * (math.pi / NUM_CLASSES)).view(-1, 1, 1)
    steps = torch.linspace(0, 2 * math.pi, PIXELS)
    along = steps * angles.cos() + steps.view(-1, 1) * angles.sin()
    periods, phases = 3 + 3 * torch.rand(samples, 1, 1), 2 * math.pi * torch.rand(samples, 1, 1)
    waves = torch.sin(periods * along + phases).unsqueeze(1)
    colours = 0.5 + torch.rand(samples, 3, 1, 1)
    return waves * colours + NOISE * torch.randn(samples, 3, PIXELS, PIXELS), labels


def orientation_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy, in nats."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
