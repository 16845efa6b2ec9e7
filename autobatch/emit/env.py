"""The `env` format: shell variables to source before a launcher."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autobatch.records import SavedPlan


def emit(plan: SavedPlan) -> str:
    """`export AUTOBATCH_...=...` lines, to be sourced by a POSIX shell."""
    variables = {
        "TARGET": plan.target,
        "REPLICAS": plan.replicas,
        "MICRO_BATCH": plan.micro_batch,
        "ACCUMULATION": plan.accumulation,
        "MICRO_BATCHES": " ".join(str(size) for size in plan.micro_batches),
        "CHECKPOINTING": plan.checkpointing,
        "PRECISION": plan.precision,
        "CLIP_NORM": "" if plan.clip_norm is None else plan.clip_norm,
        "PREDICTED": int(plan.predicted),
    }
    lines = [f"export AUTOBATCH_{name}={shlex.quote(str(value))}" for name, value in variables.items()]
    name = " ".join(plan.workload.split())  # a comment ends with its line
    return "\n".join([f"# {name}: effective batch {plan.target}. Use: . ./autobatch.env", *lines]) + "\n"
