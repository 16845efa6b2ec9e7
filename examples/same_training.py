"""One model, one effective batch of 256, three splits: the same training at another speed.

    python examples/same_training.py --steps 15 --plot same_training.png

Trains the embedded gpt-nano as 256x1, 32x8 and 8x32 (micro-batch x accumulation) from the same seed on the same samples
in the same order. The splits take turns at every step, so that a change of the machine's speed meets all three.

Measured with that command on 2 cores of an AMD EPYC, torch 2.13.0+cpu, 2 threads: the losses fall from 5.4856 to 3.2876
and are never further apart than 1.9e-6 of themselves, the same in 10 runs. That is rounding: with
torch.set_default_dtype(torch.float64) before main() it is 1.1e-15.
In 7 of them 32x8 was 1.16 to 1.50 times as fast as 256x1, and 8x32 1.01 to 1.31 times. In the other 3, during which
further processes held the cores, 256x1 was the fastest.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import autobatch
from autobatch.records import Split
from autobatch.workload import Workload, load_workload

TARGET = 256
MICRO_BATCHES = (256, 32, 8)


@dataclass(slots=True)
class Run:
    """The training under one split, and what came of it, one number a step."""

    split: Split
    training_step: autobatch.TrainingStep
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.split.micro_batch}x{self.split.accumulation}"

    @property
    def samples_per_second(self) -> float:
        return TARGET * len(self.seconds) / sum(self.seconds)


def main() -> None:
    options = parse_options()
    workload = load_workload("gpt-nano", device_kind="cpu")
    torch.manual_seed(options.seed)
    batches = [workload.batch(TARGET) for _ in range(options.steps)]
    warm_up([start(workload, size, options.seed) for size in MICRO_BATCHES], batches[0])
    runs = [start(workload, size, options.seed) for size in MICRO_BATCHES]
    for step, batch in enumerate(batches):
        turn = step % len(runs)
        for run in runs[turn:] + runs[:turn]:
            train(run, batch)
    print_table(runs)
    if options.plot:
        plot(runs, options.plot)
        print(f"\nplot  {options.plot}")


def start(workload: Workload, micro_batch: int, seed: int) -> Run:
    """A model with the seed's weights, to be trained in micro-batches of that size."""
    torch.manual_seed(seed)
    model = workload.model()
    split = Split(replicas=1, micro_batches=(micro_batch,) * (TARGET // micro_batch))
    training_step = autobatch.TrainingStep(
        split,
        model,
        workload.optimizer(model.parameters()),
        workload.loss,
        weight=workload.weight,
        clip_norm=workload.clip_norm,
    )
    return Run(split, training_step)


def warm_up(runs: Sequence[Run], batch: Any) -> None:
    """Let the first steps' costs (threads, caches, memory from the system) fall on runs that are thrown away."""
    for run in runs:
        train(run, batch)


def train(run: Run, batch: Any) -> None:
    began = time.perf_counter()
    result = run.training_step(batch)
    run.seconds.append(time.perf_counter() - began)
    run.losses.append(result.loss)
    assert result.samples == TARGET


def differences(run: Run, reference: Run) -> list[float]:
    """How far each step's loss is from the reference's, relative to it."""
    return [abs(loss - other) / other for loss, other in zip(run.losses, reference.losses, strict=True)]


def print_table(runs: Sequence[Run]) -> None:
    reference = runs[0]
    print(f"gpt-nano, {TARGET} samples a step, {len(reference.losses)} steps, {torch.get_num_threads()} threads\n")
    print(f"split   first loss  final loss  largest difference to {reference.name}  seconds  samples/s")
    for run in runs:
        print(
            f"{run.name:<6}  {run.losses[0]:10.4f}  {run.losses[-1]:10.4f}  {max(differences(run, reference)):27.1e}"
            f"  {sum(run.seconds):7.1f}  {run.samples_per_second:9.0f}"
        )


def plot(runs: Sequence[Run], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.5), layout="constrained", facecolor="white")
    figure.suptitle(f"gpt-nano at {TARGET} samples a step, cut three ways (micro-batch x accumulation)", fontsize=12)
    grid = figure.add_gridspec(2, 2, width_ratios=(4, 3))
    loss, difference, clock = (figure.add_subplot(grid[place]) for place in ((0, 0), (1, 0), (slice(None), 1)))
    colours, widths, styles = ("#7fb3d8", "#1b5e94", "#d1495b"), (7, 3, 1.5), ("-", "-", "--")
    steps = range(1, len(runs[0].losses) + 1)
    for run, colour, width, style in zip(runs, colours, widths, styles, strict=True):
        loss.plot(steps, run.losses, style, color=colour, linewidth=width, label=run.name)
        if run is not runs[0]:
            millionths = [1e6 * part for part in differences(run, runs[0])]
            difference.plot(steps, millionths, "o-", color=colour, markersize=3, label=run.name)
    loss.set(ylabel="loss (nats per byte)", title="Loss: the curves lie on each other")
    difference.set(
        xlabel="optimizer step",
        ylabel="millionths of the loss",
        title=f"Difference to {runs[0].name}",
    )
    bars = clock.bar([run.name for run in runs], [sum(run.seconds) for run in runs], color=colours)
    labels = [f"{sum(run.seconds):.1f} s\n{run.samples_per_second:.0f} samples/s" for run in runs]
    clock.bar_label(bars, labels=labels, fontsize=8, padding=2)
    clock.set(xlabel="split", ylabel="seconds for all steps", title="Wall-clock")
    clock.margins(y=0.12)
    for axes in (loss, difference):
        axes.legend(frameon=False)
    for axes in (loss, difference, clock):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    figure.savefig(path, dpi=80)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the curves and the times (.png, .svg)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
