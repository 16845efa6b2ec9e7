"""Profiles and plans made by the real pipeline on a small machine whose answers are known."""

from __future__ import annotations

from autobatch.pipeline import measure
from autobatch.plan import choose
from autobatch.profiles import saved_plan
from autobatch.records import Plan, Profile, SavedPlan
from tests.machine import Machine, info, settings

SLOWER = {"none": 1.0, "selective": 1.12, "full": 1.3}
LEANER = {"none": 1.0, "selective": 0.6, "full": 0.3}


def machine(**changes: object) -> Machine:
    """Checkpointing is slower and leaner; the largest that fits is not the fastest."""
    values: dict[str, object] = {
        "seconds": lambda mode, m: (0.01 + 0.002 * m * (1.1 if m > 64 else 1)) * SLOWER[mode],
        "peak": lambda mode, m: 3e8 + 7e6 * m * LEANER[mode],
        "noise": 0.003,
    }
    return Machine(**(values | changes))  # type: ignore[arg-type]


def profile(*, session: Machine | None = None, **changes: object) -> Profile:
    changes = {"checkpointing": ("none", "selective", "full"), "uneven": True} | changes
    return measure(session or machine(), device=info(), settings=settings(**changes))


def plan(**changes: object) -> Plan:
    return choose(profile(**changes))


def saved(**changes: object) -> SavedPlan:
    return saved_plan(plan(**changes))
