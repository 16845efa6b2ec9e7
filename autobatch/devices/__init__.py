"""The seam: a device opens a workload, and a session visits candidates on it.

Devices decide nothing: no headroom, no choice of candidates, no statistics. A session that is asked for a visit
either runs it and returns a Reading, or returns a Rejection that says why it could not, and stays usable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from autobatch.records import DeviceInfo, Outcome, Visit, WorkloadFacts
    from autobatch.workload import Workload


class Session(Protocol):
    """A workload, open and warm on a device."""

    @property
    def facts(self) -> WorkloadFacts: ...

    def visit(self, visit: Visit, /) -> Outcome:
        """Run the visit. Raises UserCodeError for the user's own bug, DeviceError when the device is lost."""
        ...


class Device(Protocol):
    """Something a workload can be opened on."""

    @property
    def info(self) -> DeviceInfo: ...

    def open(self, workload: Workload | str, *, budget_bytes: int, seed: int) -> AbstractContextManager[Session]:
        """Open a workload (an object, or a reference such as "train.py:workload") under a memory budget.

        Raises WorkloadError when it cannot be loaded or breaks its contract.
        """
        ...
