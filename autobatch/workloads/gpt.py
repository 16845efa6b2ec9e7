"""gpt: a decoder-only transformer over bytes, on English text that every Python carries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own convention

from autobatch.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

    from autobatch.workload import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a model and how it is trained."""

    num_layers: int
    num_heads: int
    width: int
    context: int  # tokens in one sample
    vocabulary: int = 256
    precision: Precision = "fp32"
    learning_rate: float = 1e-3


SHAPES: dict[str, Shape] = {
    "gpt-nano": Shape(num_layers=4, num_heads=4, width=128, context=64, learning_rate=3e-3),
    "gpt-mini": Shape(num_layers=6, num_heads=6, width=384, context=256),
    # GPT-2's shapes and learning rates (Radford et al. 2019, Brown et al. 2020, table 2.1), its vocabulary of 50257
    # rounded up to a multiple of 64 as in nanoGPT. Bytes use the first 256 rows; memory and time are GPT-2's.
    "gpt-small": Shape(
        num_layers=12, num_heads=12, width=768, context=1024, vocabulary=50304, precision="bf16", learning_rate=6e-4
    ),
    "gpt-medium": Shape(
        num_layers=24, num_heads=16, width=1024, context=1024, vocabulary=50304, precision="bf16", learning_rate=3e-4
    ),
}


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x))
        added: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + added

    def _attention(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # samples, tokens, 3, heads, width
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return out


class Gpt(nn.Module):
    """Ids of shape (samples, tokens) to logits of shape (samples, tokens, vocabulary); the embedding is tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self._initialise(shape)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = F.linear(self.norm(x), self.embedding.weight)
        return logits

    def _initialise(self, shape: Shape) -> None:
        """GPT-2's: N(0, 0.02), and what is added to the residual stream smaller by the root of its number of terms."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                added = name.endswith("out.weight")
                nn.init.normal_(parameter, std=0.02 * ((2 * shape.num_layers) ** -0.5 if added else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def gpt_workload(name: str) -> Workload:
    """The workload of one of SHAPES, trained to predict the next byte."""
    shape = SHAPES[name]
    return Workload(
        name=name,
        model=partial(Gpt, shape),
        optimizer=partial(_optimizer, shape),
        batch=partial(windows, shape.context),
        loss=next_byte_loss,
        tokens_per_sample=shape.context,
        weight=num_targets,
        precision=shape.precision,
        clip_norm=1.0,
    )


@cache
def text() -> Tensor:
    """The standard library's help topics, about 0.5 MB of English, as a uint8 tensor."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n\n".join(topics.values()), "utf-8"), dtype=torch.uint8)


def windows(context: int, samples: int) -> Tensor:
    """Windows of the text at random places, int64 of shape (samples, context + 1), from torch's global generator."""
    starts = torch.randint(text().numel() - context, (samples,))
    return text().unfold(0, context + 1, 1)[starts].long()


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each byte given those before it in its window."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def num_targets(batch: Tensor) -> float:
    """Bytes predicted: what the mean loss is over."""
    return float(batch[:, 1:].numel())


def _optimizer(shape: Shape, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=shape.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
