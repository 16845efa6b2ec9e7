"""autobatch: the micro-batch and accumulation split that reaches your effective batch at the most tokens per second.

The public names load on first use, so that `import autobatch` and `autobatch --help` do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autobatch.checkpointing import checkpointed
    from autobatch.errors import (
        AutobatchError,
        DeviceError,
        FileFormatError,
        NothingFits,
        Stopped,
        UsageError,
        UserCodeError,
        WorkloadError,
    )
    from autobatch.pipeline import probe, tune
    from autobatch.profiles import read_plan
    from autobatch.records import Plan, Profile
    from autobatch.training import TrainingStep
    from autobatch.workload import Workload

_HOMES = {
    "AutobatchError": "errors",
    "DeviceError": "errors",
    "FileFormatError": "errors",
    "NothingFits": "errors",
    "Plan": "records",
    "Profile": "records",
    "Stopped": "errors",
    "TrainingStep": "training",
    "UsageError": "errors",
    "UserCodeError": "errors",
    "Workload": "workload",
    "WorkloadError": "errors",
    "checkpointed": "checkpointing",
    "probe": "pipeline",
    "read_plan": "profiles",
    "tune": "pipeline",
}

__all__ = [
    "AutobatchError",
    "DeviceError",
    "FileFormatError",
    "NothingFits",
    "Plan",
    "Profile",
    "Stopped",
    "TrainingStep",
    "UsageError",
    "UserCodeError",
    "Workload",
    "WorkloadError",
    "checkpointed",
    "probe",
    "read_plan",
    "tune",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"autobatch.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'autobatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
