"""The `script` format: one plain-PyTorch training file that follows the plan.

It trains exactly as `devices/step.py` does (a test compares the losses), spelled out for its reader to own.
"""

from __future__ import annotations

import re
import textwrap
from itertools import groupby
from typing import TYPE_CHECKING

from autobatch.errors import WorkloadError

if TYPE_CHECKING:
    from autobatch.records import SavedPlan

AUTOCAST_TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def emit(plan: SavedPlan) -> str:
    """A training script for the plan's workload; it takes `--steps`, `--seed` and `--device`, and runs under torchrun.

    Raises WorkloadError when the workload was made of live objects: a file cannot load those.
    """
    if plan.workload_reference is None:
        raise WorkloadError(
            f"a script was asked of {plan.workload!r}; it was tuned from live objects, which a file cannot load; "
            "put the workload in a file and tune FILE.py:NAME, or use autobatch.TrainingStep"
        )
    parts = _parts(plan, plan.workload_reference)
    return re.sub("@([A-Z_]+)@", lambda found: parts[found[1]], TEMPLATE)


def _parts(plan: SavedPlan, reference: str) -> dict[str, str]:
    """What the template leaves open; a piece that the plan does not need is empty."""
    scaled, checkpointed, counted = plan.precision == "fp16", plan.checkpointing != "none", plan.unit == "tokens"
    return {
        "HEADER": _header(plan),
        "CHECKPOINT_IMPORT": "from autobatch.checkpointing import checkpointed\n" if checkpointed else "",
        "CONSTANTS": _constants(plan, reference),
        "SCALER": "    scaler = torch.amp.GradScaler(device.type)\n" if scaled else "",
        "SCALER_ARGUMENT": ", scaler" if scaled else "",
        "AUTOCAST": _autocast(plan.precision),
        "BACKWARD": "scaler.scale(loss * share * world).backward()" if scaled else "(loss * share * world).backward()",
        "CLIP": _clip(scaled=scaled) if plan.clip_norm is not None else "",
        "STEP": "    scaler.step(optimizer)\n    scaler.update()" if scaled else "    optimizer.step()",
        "BLOCKS": "    blocks = workload.blocks(model) if workload.blocks else None\n" if checkpointed else "",
        "CONTEXT": "checkpointed(model, CHECKPOINTING, blocks)" if checkpointed else "contextlib.nullcontext()",
        "UNIT": plan.unit,
        "COUNT": "tokens_in(workload, batch, size)" if counted else "size",
        "TOKENS_IN": TOKENS_IN if counted else "",
    }


def _header(plan: SavedPlan) -> str:
    how = "predicted" if plan.predicted else "measured"
    sizes = " + ".join(str(size) for size in plan.micro_batches[:8]) + (" + ..." if plan.accumulation > 8 else "")
    text = (
        f"{plan.workload}: {plan.target} samples an optimizer step, cut into {sizes} on each of {plan.replicas} "
        f"replica(s), checkpointing {plan.checkpointing}; {how} on {plan.device.name}: "
        f"{plan.tokens_per_second:,.0f} {plan.unit}/s. Written by autobatch."
    )
    return textwrap.fill(text.replace("\\", "/").replace('"', "'"), width=100)


def _constants(plan: SavedPlan, reference: str) -> str:
    sizes = " + ".join(f"[{size}] * {len(list(run))}" for size, run in groupby(plan.micro_batches))
    lines = [
        f"WORKLOAD = {_literal(reference)}",
        f"REPLICAS = {plan.replicas}",
        f"MICRO_BATCHES = {sizes}  # of one optimizer step on one replica",
    ]
    if plan.checkpointing != "none":
        lines.append(f"CHECKPOINTING = {_literal(plan.checkpointing)}")
    if plan.clip_norm is not None:
        lines.append(f"CLIP_NORM = {plan.clip_norm}")
    return "\n".join(lines)


def _literal(text: str) -> str:
    """Python source for a string: in double quotes where it has nothing to escape."""
    return repr(text).replace("'", '"') if repr(text) == f"'{text}'" and '"' not in text else repr(text)


def _autocast(precision: str) -> str:
    if precision not in AUTOCAST_TYPES:
        return "contextlib.nullcontext()"
    return f"torch.autocast(device.type, dtype=torch.{AUTOCAST_TYPES[precision]})"


def _clip(*, scaled: bool) -> str:
    unscale = "    scaler.unscale_(optimizer)\n" if scaled else ""
    return unscale + "    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)\n"


TOKENS_IN = """

def tokens_in(workload, batch, size):
    per_sample = workload.tokens_per_sample
    return per_sample(batch) if callable(per_sample) else per_sample * size
"""

TEMPLATE = '''"""@HEADER@

    python autobatch_train.py --steps 100
    torchrun --nproc-per-node REPLICAS autobatch_train.py --steps 100
"""

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

@CHECKPOINT_IMPORT@from autobatch.workload import load_workload

@CONSTANTS@


def main():
    options = parse_options()
    device, rank, world = start(options.device)
    torch.manual_seed(options.seed)  # the same weights on every rank
    workload = load_workload(WORKLOAD, device_kind=device.type)
    model = workload.model().to(device).train()
    optimizer = workload.optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # put your schedule here
@SCALER@@BLOCKS@    torch.manual_seed(options.seed + rank)  # other samples on every rank
    with @CONTEXT@:
        wrapped = DistributedDataParallel(model) if world > 1 else model
        for step in range(1, options.steps + 1):
            began = time.perf_counter()
            loss, samples, counted = train_step(wrapped, optimizer, workload, device, world@SCALER_ARGUMENT@)
            scheduler.step()
            rate = f"{counted / (time.perf_counter() - began):,.0f} @UNIT@/s"
            if rank == 0:
                print(f"step {step}  loss {loss:.4f}  samples {samples:.0f}  {rate}", flush=True)
    if world > 1:
        dist.destroy_process_group()


def train_step(model, optimizer, workload, device, world@SCALER_ARGUMENT@):
    """One optimizer step; returns its mean loss, its samples and its @UNIT@, over all replicas."""
    batches = [(size, workload.batch(size)) for size in MICRO_BATCHES]
    # A mean loss counts by what it is a mean of, over the whole optimizer step and all replicas.
    weights = [workload.weight(batch) if workload.weight else size for size, batch in batches]
    total = summed(sum(weights), device, world)
    mean, samples, counted = 0.0, 0, 0
    for index, ((size, batch), weight) in enumerate(zip(batches, weights, strict=True)):
        batch = to(device, batch)
        share = weight / total
        last = index == len(batches) - 1
        with model.no_sync() if world > 1 and not last else contextlib.nullcontext():
            with @AUTOCAST@:
                loss = workload.loss(model, batch)
            @BACKWARD@  # DistributedDataParallel averages over the world
        mean += share * loss.item()
        samples += size
        counted += @COUNT@
@CLIP@@STEP@
    optimizer.zero_grad(set_to_none=True)
    return tuple(summed(value, device, world) for value in (mean, samples, counted))
@TOKENS_IN@

def summed(value, device, world):
    if world == 1:
        return value
    tensor = torch.tensor(float(value), device=device)
    dist.all_reduce(tensor)
    return tensor.item()


def to(device, batch):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def start(device):
    """The device of this process, its rank, and how many there are (torchrun sets the variables)."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world != REPLICAS:
        raise SystemExit(f"{world} process(es) started; the plan is for {REPLICAS}; start that many")
    device = torch.device(device)
    if world > 1:
        if device.type != "cpu":
            device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
            torch.accelerator.set_device_index(device.index)
        dist.init_process_group()
    return device, rank, world


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\\n\\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    default = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
'''
