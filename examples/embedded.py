"""The tuner inside a training script: a live model is tuned in the middle of its training, which goes on as if not.

python examples/embedded.py
"""

import argparse
import hashlib
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own convention

import autobatch
from autobatch.checkpointing import checkpointed
from autobatch.records import Split

TARGET = 256
CONTEXT = 16  # bytes that the next one is predicted from
TEXT = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8)


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(32 * CONTEXT, 512),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(512, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    warm_up = autobatch.TrainingStep(Split(replicas=1, micro_batches=(32,) * 8), model, optimizer, loss)
    train(warm_up, range(1, 6))

    before = checksum(model, optimizer)
    plan = autobatch.tune(
        autobatch.Workload.around(model, optimizer, loss, random_batch),
        target=TARGET,
        memory_limit=options.memory_limit << 20,
        checkpointing=["none"],  # this model has no blocks to checkpoint
        time_budget=options.time_budget,
    )
    after = checksum(model, optimizer)
    split = plan.chosen.candidate.split
    print(f"tuned: {split.micro_batch} x {split.accumulation} samples a step; {'; '.join(plan.why)}")
    print(f"checksum of weights, optimizer and random stream before the tune  {before}")
    print(f"                                              and after the tune  {after}")

    with checkpointed(model, plan.chosen.candidate.checkpointing):
        train(autobatch.TrainingStep(plan, model, optimizer, loss), range(6, options.steps + 1))


def train(training_step: autobatch.TrainingStep, steps: range) -> None:
    for step in steps:
        result = training_step(random_batch(TARGET))
        if step == steps.start or step % 5 == 0:
            print(f"step {step:4}  loss {result.loss:.3f}  samples {result.samples}", flush=True)


def random_batch(num_samples: int) -> tuple[Tensor, Tensor]:
    """Bytes of shape (samples, CONTEXT), and the byte after each row."""
    windows = TEXT.unfold(0, CONTEXT + 1, 1)
    rows = windows[torch.randint(len(windows), (num_samples,))].long()
    return rows[:, :-1], rows[:, -1]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    given, following = batch
    return F.cross_entropy(model(given), following)


def checksum(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of all that training goes on from: weights, buffers, optimizer state and the random stream."""
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    digest = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *moments, torch.get_rng_state()):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps, 5 of them before the tune")
    parser.add_argument("--time-budget", type=float, default=20, help="seconds for the tune")
    parser.add_argument("--memory-limit", type=int, default=512, help="MiB that tensors may hold during the tune")
    return parser.parse_args()


if __name__ == "__main__":
    main()
