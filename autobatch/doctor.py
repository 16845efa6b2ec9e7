"""What this machine offers, what is in the way, and what autobatch would use: a page for a bug report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import psutil

from autobatch.devices.cpu import cgroup_memory, cpu_info
from autobatch.devices.registry import accelerator
from autobatch.run import DEFAULT_HEADROOM_PERCENT, budget_bytes
from autobatch.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("torch-autobatch", "torch", "optuna", "scipy", "nvidia-ml-py")


def examine() -> dict[str, Any]:
    """The facts, as one JSON-ready document: versions, the CPU, the accelerator, warnings, and what would be used."""
    info = cpu_info()
    limit, used = cgroup_memory()
    found = accelerator()
    return {
        "versions": {"python": platform.python_version(), "platform": platform.platform(terse=True)}
        | {package: _version(package) for package in PACKAGES},
        "cpu": {
            "name": info.name,
            **info.facts,
            "capacity_bytes": info.capacity_bytes,
            "available_bytes": info.available_bytes,
            "cgroup_limit_bytes": limit,
            "cgroup_used_bytes": used if limit else None,
        },
        "accelerator": found,
        "warnings": list(_warnings(found)),
        "would_use": {
            "device": "cpu",
            "budget_bytes": budget_bytes(info, None, DEFAULT_HEADROOM_PERCENT),
            "headroom_percent": DEFAULT_HEADROOM_PERCENT,
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _warnings(found: str | None) -> Iterator[str]:
    if found:
        yield f"an accelerator ({found}) is here; this version measures on the CPU only, by --device cpu"
    busy = psutil.getloadavg()[0]
    cores = os.cpu_count() or 1
    if busy > 0.5 * cores:
        yield f"the machine is busy (load {busy:.1f} on {cores} cores): times will be noisy"
    if threads := os.environ.get("OMP_NUM_THREADS"):
        yield f"OMP_NUM_THREADS is {threads}: torch will use that many threads"
    if psutil.swap_memory().used > 1 << 30:
        yield "more than 1 GiB is swapped out: what fits may still be slow"


def render(facts: dict[str, Any]) -> str:
    """The facts as a page."""
    use, cpu = facts["would_use"], facts["cpu"]
    using = f"{use['device']}, {format_size(use['budget_bytes'])} ({use['headroom_percent']:g} % headroom)"
    rows = [
        *facts["versions"].items(),
        ("cpu", cpu["name"]),
        ("cores", cpu["cores"]),
        ("threads", cpu["threads"]),
        ("memory", format_size(cpu["capacity_bytes"])),
        ("free for tensors", format_size(cpu["available_bytes"])),
        ("cgroup limit", format_size(cpu["cgroup_limit_bytes"]) if cpu["cgroup_limit_bytes"] else "none"),
        ("accelerator", facts["accelerator"] or "none that torch can use"),
        ("autobatch would use", using),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value or 'not installed'}" for name, value in rows]
    return "\n".join([*lines, *(f"warning: {text}" for text in facts["warnings"])])
