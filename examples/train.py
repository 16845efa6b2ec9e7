"""A small transformer that predicts the next byte of Python's help topics, trained with the split autobatch found.

autobatch tune --target 256 --workload examples/train.py:workload    # writes autobatch.plan.json
python examples/train.py --steps 60                                  # reads it
"""

import argparse
from collections.abc import Iterable
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from pydoc_data.topics import topics
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own convention
from torch.utils.data import DataLoader, Dataset

import autobatch
from autobatch.checkpointing import checkpointed
from autobatch.profiles import read_plan
from autobatch.records import SavedPlan, Split

CONTEXT = 32  # bytes in one sample
CLIP_NORM = 1.0
PLAN = Path("autobatch.plan.json")  # where `autobatch tune` writes it
DEFAULT_SPLIT = Split(replicas=1, micro_batches=(32,) * 8)


class ByteModel(nn.Module):
    """Byte ids of shape (samples, CONTEXT) to logits of shape (samples, CONTEXT, 256)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.logits = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.bytes(ids) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=causal, is_causal=True)
        logits: Tensor = self.logits(x)
        return logits


@cache
def samples() -> Tensor:
    """The text cut into samples: int64 of shape (number of samples, CONTEXT + 1)."""
    text = "\n".join(topics.values()).encode()
    return torch.tensor(list(text)).unfold(0, CONTEXT + 1, CONTEXT).contiguous()


def random_batch(num_samples: int) -> Tensor:
    return samples()[torch.randint(len(samples()), (num_samples,))]


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def workload() -> autobatch.Workload:
    """What `autobatch tune --workload examples/train.py:workload` tunes: the parts this script trains with."""
    return autobatch.Workload(
        name="byte-model",
        model=ByteModel,
        optimizer=make_optimizer,
        batch=random_batch,
        loss=next_byte_loss,
        tokens_per_sample=CONTEXT,
        clip_norm=CLIP_NORM,
        dataset_size=len(samples()),
    )


def main() -> None:
    options = parse_options()
    plan = find_plan(options.plan)
    split = plan or DEFAULT_SPLIT
    torch.manual_seed(options.seed)
    model = ByteModel()
    optimizer = make_optimizer(model.parameters())
    training_step = autobatch.TrainingStep(split, model, optimizer, next_byte_loss, clip_norm=CLIP_NORM)
    loader = DataLoader(
        cast(Dataset[Tensor], samples()),  # a tensor has the length and the indexing that a DataLoader asks for
        batch_size=sum(split.micro_batches),
        shuffle=True,
        drop_last=True,
    )
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    with checkpointed(model, plan.checkpointing if plan else "none"):
        for step, batch in zip(range(1, options.steps + 1), batches, strict=False):
            result = training_step(batch)
            if step == 1 or step % 5 == 0:
                print(f"step {step:4}  loss {result.loss:.3f}  samples {result.samples}", flush=True)


def find_plan(asked: Path | None) -> SavedPlan | None:
    """The plan asked for, or the one in the current folder, or None: the default split. Says which."""
    if asked is None and not PLAN.is_file():
        split = DEFAULT_SPLIT
        print(f"no {PLAN} here; the default split: {split.micro_batch} x {split.accumulation} samples a step")
        return None
    path = asked or PLAN
    try:
        plan = read_plan(path)
    except autobatch.FileFormatError as error:
        raise SystemExit(f"error: {error}") from error
    if plan.replicas != 1:
        raise SystemExit(f"error: {path} is for {plan.replicas} replicas; this script runs one; tune with --replicas 1")
    print(f"{path}: {plan.micro_batch} x {plan.accumulation} samples a step, checkpointing {plan.checkpointing}")
    return plan


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plan", type=Path, help="a plan that autobatch tune wrote; default: eight micro-batches of 32"
    )
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
