"""Every error raised on purpose, drawn as a tree.

AutobatchError                 one clear line: what was asked, what is so, what to do   (exit 1)
|-- UsageError                 an option or name that cannot be                         (exit 2)
|-- WorkloadError              the workload cannot be loaded or breaks its contract
|   `-- UserCodeError          the user's code raised; carries their own traceback
|-- DeviceError                the device is absent, hung, or cannot do what was asked
|-- NothingFits                not even a micro-batch of one                            (exit 3)
|-- FileFormatError            a profile or plan that cannot be read
`-- Stopped                    interrupted; what was found so far is saved              (exit 130)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autobatch.records import Plan


class AutobatchError(Exception):
    """Base of every error autobatch raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(AutobatchError):
    """An option, name or argument that cannot be."""

    exit_code = 2


class WorkloadError(AutobatchError):
    """A workload that cannot be loaded or does not keep its contract."""


class UserCodeError(WorkloadError):
    """The user's own code raised.

    `traceback_text` is the traceback as Python would have printed it, from the first frame outside autobatch.
    """

    def __init__(self, message: str, traceback_text: str) -> None:
        super().__init__(message)
        self.traceback_text = traceback_text

    def __reduce__(self) -> tuple[type[UserCodeError], tuple[str, str]]:
        return type(self), (str(self), self.traceback_text)


class DeviceError(AutobatchError):
    """A device that is absent, hung, or cannot do what was asked of it."""


class NothingFits(AutobatchError):
    """Not even the smallest micro-batch fits the budget in any checkpointing mode asked for."""

    exit_code = 3


class FileFormatError(AutobatchError):
    """A profile or plan file that cannot be read: truncated, broken, or of another schema."""


class Stopped(AutobatchError):
    """The run was interrupted; what was found so far is saved and the message says where.

    `plan` is the best plan that the readings so far allow, or None.
    """

    exit_code = 130

    def __init__(self, message: str, plan: Plan | None = None) -> None:
        super().__init__(message)
        self.plan = plan
