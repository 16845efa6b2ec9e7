"""Names to devices. What was asked for and is absent is an error, never another device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autobatch.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from autobatch.devices import Device

ACCELERATORS = ("cuda", "xpu", "mps")
KNOWN = f"auto, cpu, replay:PROFILE.json (and {', '.join(ACCELERATORS)}, not driven by this version)"


def find_device(name: str, *, visit_limit_seconds: float) -> Device:
    """The device of that name: "auto", "cpu", or "replay:PROFILE.json".

    Raises UsageError for an unknown name and DeviceError for a device that cannot be used here.
    """
    kind, _, rest = name.partition(":")
    if kind == "replay" and rest:
        from autobatch.devices.replay import ReplayDevice
        from autobatch.profiles import read_profile

        return ReplayDevice(read_profile(Path(rest)))
    if kind in ACCELERATORS:
        raise DeviceError(f"device {name} asked; this version measures on the CPU only; use --device cpu")
    if name == "auto" and (found := accelerator()):
        raise DeviceError(
            f"device auto asked; this machine has an accelerator ({found}) and this version measures on the CPU "
            "only; use --device cpu to tune for the CPU"
        )
    if name in ("auto", "cpu"):
        from autobatch.devices.cpu import CpuDevice

        return CpuDevice(visit_limit_seconds=visit_limit_seconds)
    raise UsageError(f"device {name!r} asked; there is no such device; use one of {KNOWN}")


def accelerator() -> str | None:
    """The kind of this machine's accelerator as torch sees it, or None."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found else None
