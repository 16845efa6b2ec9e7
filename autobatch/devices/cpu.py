"""The CPU: its wall is a ledger of live tensor storage that raises torch.OutOfMemoryError at the budget.

Hard limits (RLIMIT_DATA, RLIMIT_AS) are a poor wall: torch answers them with four kinds of failure, and the process is
often unusable afterwards (GPU.md). The ledger is exact and portable. It bounds what torch's tensors hold, as
`--memory-limit` does on a GPU; what one kernel uses inside itself and gives back is not seen. It slows small steps, so
memory is read with it and time without it.
"""

from __future__ import annotations

import platform
import weakref
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import psutil

from autobatch.records import DeviceInfo
from autobatch.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

    from autobatch.devices import Session
    from autobatch.devices.session import Peaks
    from autobatch.workload import Workload

CGROUP = Path("/sys/fs/cgroup")
WORKER_BYTES = 400 << 20
"""Resident size of a worker with torch loaded, before it holds any tensor (held by tests/devices/test_worker.py)."""


class CpuDevice:
    """The CPU of this machine. References are opened in a worker process, live objects in this one."""

    def __init__(self, *, visit_limit_seconds: float) -> None:
        self.info = cpu_info()
        self._visit_limit_seconds = visit_limit_seconds

    def open(self, workload: Workload | str, *, budget_bytes: int, seed: int) -> AbstractContextManager[Session]:
        """Open a workload; a reference goes to a warm worker process, replaced when it dies."""
        if isinstance(workload, str):
            from autobatch.devices.worker import Order, worker_session

            order = Order(device="cpu", reference=workload, budget_bytes=budget_bytes, seed=seed)
            return worker_session(order, visit_limit_seconds=self._visit_limit_seconds)
        from autobatch.devices.session import opened

        return opened(workload, CpuBackend(budget_bytes), seed=seed)


class CpuBackend:
    """Implements Backend: the ledger as the wall, perf_counter as the clock."""

    def __init__(self, budget_bytes: int) -> None:
        import torch

        self.torch_device = torch.device("cpu")
        self._budget_bytes = budget_bytes

    @contextmanager
    def wall(self, held: list[torch.Tensor]) -> Iterator[Peaks]:
        """Count every storage alive, `held` first, and raise at the budget."""
        from autobatch.devices.session import Peaks

        peaks = Peaks()
        with storage_ledger(self._budget_bytes, held) as ledger:
            yield peaks
        peaks.allocated_bytes = ledger.peak_bytes

    def seconds_now(self) -> float:
        return perf_counter()


class Ledger:
    """Bytes of all storages alive, and the most there were."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, int] = {}

    def enter(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage, once. Raises torch.OutOfMemoryError when that is beyond the budget."""
        import torch

        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 -- the storage's identity, as torch's own MemTracker uses
        if key in self._storages:
            return
        if self.live_bytes + size > self.budget_bytes:
            raise torch.OutOfMemoryError(
                f"CPU out of memory: tried to allocate {format_size(size)} with {format_size(self.live_bytes)} "
                f"in live tensors; the budget is {format_size(self.budget_bytes)}"
            )
        self._storages[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._leave, key)

    def _leave(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)


@contextmanager
def storage_ledger(budget_bytes: int, held: list[torch.Tensor]) -> Iterator[Ledger]:
    """Count the storages of `held` and of every tensor made inside, in forward, backward and optimizer alike.

    A storage is counted when the operation that made it returns, so an operation has already allocated when it is
    refused; tensors made by other means than torch operations (`torch.from_numpy`) are not seen.
    """
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    ledger = Ledger(budget_bytes)
    for tensor in held:
        ledger.enter(tensor)

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own is untyped
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    ledger.enter(leaf)
            return result

    with Counting():  # type: ignore[no-untyped-call]
        yield ledger


def cpu_info() -> DeviceInfo:
    """This machine's CPU: capacity and free bytes are what RAM and the cgroup both allow."""
    memory = psutil.virtual_memory()
    limit, used = cgroup_memory()
    capacity = min(memory.total, limit or memory.total)
    free = min(memory.available, limit - used if limit else memory.available)
    return DeviceInfo(
        kind="cpu",
        name=_processor_name(),
        capacity_bytes=capacity,
        available_bytes=max(free - WORKER_BYTES, 0),
        versions={"torch": version("torch")},
        facts={
            "cores": psutil.cpu_count(logical=False) or 0,
            "threads": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else 0,
            "architecture": platform.machine(),
        },
    )


def cgroup_memory() -> tuple[int | None, int]:
    """(limit, used) bytes of this process's cgroup, reclaimable file cache not counted; (None, 0) without a limit.

    cgroup v2 `memory.max`, `memory.current` and `inactive_file`; v1 `memory.limit_in_bytes` and its kin.
    """
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit_path = _cgroup_folder() / limit_name
        limit_path = limit_path if limit_path.exists() else CGROUP / limit_name
        if not limit_path.exists():
            continue
        text = limit_path.read_text().strip()
        if text == "max" or int(text) > psutil.virtual_memory().total:
            return None, 0
        used = int((limit_path.parent / Path(used_name).name).read_text())
        return int(text), max(used - _inactive_file(limit_path.parent / "memory.stat"), 0)
    return None, 0


def _cgroup_folder() -> Path:
    """The folder of this process's own v2 cgroup."""
    membership = Path("/proc/self/cgroup")
    lines = membership.read_text().splitlines() if membership.exists() else []
    own = next((line.split("::", 1)[1] for line in lines if line.startswith("0::")), "/")
    return CGROUP / own.lstrip("/")


def _inactive_file(stat: Path) -> int:
    lines = stat.read_text().splitlines() if stat.exists() else []
    found = (line.split() for line in lines if line.startswith(("inactive_file ", "total_inactive_file ")))
    return int(next(found, ["", "0"])[1])


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
