"""The replay device: a saved profile answers the visits it recorded, so that decisions are redone without a device."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from autobatch.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autobatch.records import DeviceInfo, Outcome, Profile, Visit, WorkloadFacts
    from autobatch.workload import Workload


class ReplayDevice:
    """Answers with what a profile recorded: its wall, its memory readings, its clock."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    @property
    def info(self) -> DeviceInfo:
        return self._profile.device

    @contextmanager
    def open(self, workload: Workload | str, **_recorded: int) -> Iterator[ReplaySession]:
        """Open the recorded workload; its budget and seed are the recorded run's.

        Raises UsageError when another workload is asked for than was recorded.
        """
        asked = workload if isinstance(workload, str) else workload.name
        facts = self._profile.workload
        if asked not in (facts.name, facts.reference):
            raise UsageError(
                f"workload {asked!r} asked of a replay; its profile recorded {facts.name!r}; ask for that one"
            )
        yield ReplaySession(self._profile)


class ReplaySession:
    """Implements Session: the outcomes of equal visits are played back in the order they were recorded."""

    def __init__(self, profile: Profile) -> None:
        self._outcomes: dict[Visit, list[Outcome]] = {}
        self.facts: WorkloadFacts = profile.workload
        for recorded in profile.visits:
            self._outcomes.setdefault(recorded.visit, []).append(recorded.outcome)

    def visit(self, visit: Visit, /) -> Outcome:
        """The next recorded outcome of this visit; the last one again when there are no more.

        Raises DeviceError for a visit that was never recorded.
        """
        outcomes = self._outcomes.get(visit)
        if not outcomes:
            raise DeviceError(
                f"the replay has no reading of micro-batches {list(visit.micro_batches)} with checkpointing "
                f"{visit.checkpointing}; ask with the settings of its profile"
            )
        return outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
