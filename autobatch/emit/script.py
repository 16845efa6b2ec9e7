"""The `script` format: one plain-PyTorch training file that follows the plan.

It trains exactly as `devices/step.py` does (a test compares the weights), spelled out for its reader to own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autobatch.errors import WorkloadError

if TYPE_CHECKING:
    from autobatch.records import SavedPlan


def emit(plan: SavedPlan) -> str:
    """A training script for the plan's workload; it takes `--steps`, `--seed` and `--device`, and runs under torchrun.

    Raises WorkloadError when the workload was made of live objects: a file cannot load those.
    """
    if plan.workload_reference is None:
        raise WorkloadError(
            f"a script was asked of {plan.workload!r}; it was tuned from live objects, which a file cannot load; "
            "put the workload in a file and tune FILE.py:NAME, or use autobatch.TrainingStep"
        )
    half, scaled, clipped = plan.precision != "fp32", plan.precision == "fp16", plan.clip_norm is not None
    checkpointed = plan.checkpointing != "none"
    parts = {
        "HEADER": _header(plan),
        "CHECKPOINT_IMPORT": "from autobatch.checkpointing import checkpointed\n" if checkpointed else "",
        "CONSTANTS": _constants(plan),
        "SCALER": "    scaler = torch.amp.GradScaler(device.type)\n" if scaled else "",
        "SCALER_ARGUMENT": ", scaler" if scaled else "",
        "SCALER_PARAMETER": ", scaler" if scaled else "",
        "AUTOCAST": (
            f"torch.autocast(device.type, dtype=torch.{'bfloat16' if plan.precision == 'bf16' else 'float16'})"
            if half
            else "contextlib.nullcontext()"
        ),
        "BACKWARD": "scaler.scale(loss * share * world).backward()" if scaled else "(loss * share * world).backward()",
        "CLIP": _clip(scaled=scaled) if clipped else "",
        "STEP": "    scaler.step(optimizer)\n    scaler.update()" if scaled else "    optimizer.step()",
        "BLOCKS": "    blocks = workload.blocks(model) if workload.blocks else None\n" if checkpointed else "",
        "CONTEXT": "checkpointed(model, CHECKPOINTING, blocks)" if checkpointed else "contextlib.nullcontext()",
    }
    script = TEMPLATE
    for name, text in parts.items():
        script = script.replace(f"@{name}@", text)
    return script


def _header(plan: SavedPlan) -> str:
    how = "predicted" if plan.predicted else "measured"
    return (
        f"{plan.workload}: {plan.target} samples an optimizer step, written by autobatch.\n\n"
        f"{' + '.join(str(size) for size in plan.micro_batches[:8])}"
        f"{' + ...' if plan.accumulation > 8 else ''} samples a step on each of {plan.replicas} replica(s), "
        f"checkpointing {plan.checkpointing};\n"
        f"{how} on {plan.device.name}: {plan.tokens_per_second:,.0f} {plan.unit}/s."
    )


def _constants(plan: SavedPlan) -> str:
    sizes = f"[{plan.micro_batch}] * {plan.accumulation}"
    if not plan.uniform:
        larger = plan.micro_batches.count(plan.micro_batch)
        sizes = f"[{plan.micro_batch}] * {larger} + [{plan.micro_batch - 1}] * {plan.accumulation - larger}"
    lines = [
        f"WORKLOAD = {plan.workload_reference!r}",
        f"REPLICAS = {plan.replicas}",
        f"MICRO_BATCHES = {sizes}  # of one optimizer step on one replica",
    ]
    if plan.checkpointing != "none":
        lines.append(f"CHECKPOINTING = {plan.checkpointing!r}")
    if plan.clip_norm is not None:
        lines.append(f"CLIP_NORM = {plan.clip_norm}")
    return "\n".join(lines).replace("'", '"')


def _clip(*, scaled: bool) -> str:
    unscale = "    scaler.unscale_(optimizer)\n" if scaled else ""
    return unscale + "    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)\n"


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
            loss, samples = train_step(wrapped, optimizer, workload, device, world@SCALER_ARGUMENT@)
            scheduler.step()
            seconds = time.perf_counter() - began
            if rank == 0:
                rate = f"{samples / seconds:,.0f} samples/s"
                print(f"step {step}  loss {loss:.4f}  samples {samples}  {rate}", flush=True)
    if world > 1:
        dist.destroy_process_group()


def train_step(model, optimizer, workload, device, world@SCALER_PARAMETER@):
    """One optimizer step; returns its mean loss and its samples over all replicas."""
    batches = [to(device, workload.batch(size)) for size in MICRO_BATCHES]
    # A mean loss counts by what it is a mean of, over the whole optimizer step and all replicas.
    weights = [workload.weight(b) if workload.weight else size for b, size in zip(batches, MICRO_BATCHES)]
    total = summed(sum(weights), device, world)
    mean = 0.0
    for index, (batch, weight) in enumerate(zip(batches, weights)):
        share = weight / total
        last = index == len(batches) - 1
        with model.no_sync() if world > 1 and not last else contextlib.nullcontext():
            with @AUTOCAST@:
                loss = workload.loss(model, batch)
            @BACKWARD@  # DistributedDataParallel averages over the world
        mean += share * loss.item()
@CLIP@@STEP@
    optimizer.zero_grad(set_to_none=True)
    return summed(mean, device, world), int(summed(sum(MICRO_BATCHES), device, world))


def summed(value, device, world):
    if world == 1:
        return value
    tensor = torch.tensor(float(value), device=device)
    dist.all_reduce(tensor)
    return tensor.item()


def to(device, batch):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def start(device):
    """The device of this process, its rank, and how many processes train together (torchrun sets the variables)."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world != REPLICAS:
        raise SystemExit(f"{world} process(es) started; the plan is for {REPLICAS}; start as many, or tune for {world}")
    if world > 1:
        dist.init_process_group()
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
    return torch.device(device), rank, world


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    default = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
'''
