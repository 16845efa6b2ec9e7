"""Every keyword of tune() changes what comes out; runs stop and resume; replays decide alike."""

import inspect
from contextlib import contextmanager
from pathlib import Path

import pytest

from autobatch import Stopped, UsageError, pipeline, tune
from autobatch.devices.replay import ReplayDevice
from autobatch.profiles import read_profile, saved_plan
from autobatch.records import Reading
from tests import plans
from tests.machine import BUDGET, Machine, info


class ToyDevice:
    """Implements Device around a Machine."""

    def __init__(self, machine=None, *, interrupt_after=None):
        self.machine = machine or plans.machine()
        self.info = info()
        self.seeds = []
        self._interrupt_after = interrupt_after

    @contextmanager
    def open(self, workload, *, budget_bytes, seed):
        self.machine.budget = budget_bytes
        self.seeds.append(seed)
        yield Interrupting(self.machine, self._interrupt_after) if self._interrupt_after else self.machine


class Interrupting:
    def __init__(self, machine, after):
        self.machine, self.facts, self.after = machine, machine.facts, after

    def visit(self, visit, /):
        if len(self.machine.visits) == self.after:
            raise KeyboardInterrupt
        return self.machine.visit(visit)


def run(**changes):
    options = {"device": ToyDevice(), "headroom": 0.0, "time_budget": 1e6, "uneven": True}
    return tune("toy.py:workload", 256, **(options | changes))


def spoken(**changes):
    lines = []
    run(progress=lines.append, **changes)
    return lines


FLIPS = {
    "device": lambda _: run(device=ToyDevice(Machine())).chosen != run().chosen,
    "replicas": lambda _: sum(run(replicas=2).micro_batches) == 128,
    "memory_limit": lambda _: run(memory_limit=4 * 10**8).profile.settings.budget_bytes == 4 * 10**8,
    "headroom": lambda _: run(headroom=50.0).profile.settings.budget_bytes == BUDGET // 2,
    "checkpointing": lambda _: [p.checkpointing for p in run(checkpointing=["full"]).profile.probe] == ["full"],
    "uneven": lambda _: run(uneven=True).profile.timings != run(uneven=False).profile.timings,
    "max_micro_batch": lambda _: max(run(max_micro_batch=16).micro_batches) <= 16,
    "time_budget": lambda _: len(run(time_budget=1.0).profile.visits) < len(run().profile.visits),
    "seed": lambda _: [v.visit for v in run(seed=5).profile.visits] != [v.visit for v in run().profile.visits],
    "storage": lambda tmp: run(storage=str(tmp / "journal")) and (tmp / "journal").exists(),
    "resume": lambda tmp: resumed_visits(tmp, resume=True) < resumed_visits(tmp, resume=False),
    "profile_dir": lambda tmp: run(profile_dir=tmp / "kept") and len(list((tmp / "kept").glob("*.json"))) == 1,
    "progress": lambda _: "racing" in " ".join(spoken()),
}


@pytest.mark.parametrize("keyword", FLIPS)
def test_every_keyword_changes_the_outcome(keyword, tmp_path):
    assert FLIPS[keyword](tmp_path)


def test_no_keyword_goes_untested():
    assert set(FLIPS) == set(inspect.signature(tune).parameters) - {"workload", "target"}


def resumed_visits(folder: Path, *, resume: bool) -> int:
    """Visits that a second run still has to make after a first was stopped at its 20th."""
    folder = folder / str(resume)
    with pytest.raises(Stopped):
        run(device=ToyDevice(interrupt_after=20), profile_dir=folder)
    second = ToyDevice()
    run(device=second, profile_dir=folder, resume=resume)
    return len(second.machine.visits)


@pytest.mark.parametrize("after", [1, 7, 13, 25])
def test_a_stopped_run_resumes_to_the_same_profile_as_an_undisturbed_one(tmp_path, after):
    quiet = plans.machine(noise=0.0)
    undisturbed = run(device=ToyDevice(quiet))
    with pytest.raises(Stopped, match=f"interrupted with {after} readings"):
        run(device=ToyDevice(plans.machine(noise=0.0), interrupt_after=after), profile_dir=tmp_path)
    assert not read_profile(next(tmp_path.glob("*.json"))).complete
    second = ToyDevice(plans.machine(noise=0.0))
    resumed = run(device=second, profile_dir=tmp_path, resume=True)
    assert len(second.machine.visits) == len(undisturbed.profile.visits) - after
    assert resumed.chosen == undisturbed.chosen
    assert read_profile(next(tmp_path.glob("*.json"))).complete


def test_an_interrupted_race_still_gives_the_best_plan_so_far(tmp_path):
    total = len(run().profile.visits)
    with pytest.raises(Stopped) as caught:
        run(device=ToyDevice(interrupt_after=total - 3), profile_dir=tmp_path)
    assert sum(caught.value.plan.micro_batches) == 256
    assert "go on with --resume" in str(caught.value)


def test_a_workload_that_changed_since_is_measured_anew(tmp_path):
    with pytest.raises(Stopped):
        run(device=ToyDevice(interrupt_after=20), profile_dir=tmp_path)
    changed = plans.machine()
    object.__setattr__(changed.facts, "num_parameters", 7)
    lines = spoken(device=ToyDevice(changed), profile_dir=tmp_path, resume=True)
    assert any("changed since" in line for line in lines)


def test_a_replayed_profile_gives_the_same_plan_without_the_device():
    plan = run()
    replay = ReplayDevice(plan.profile)
    again = run(device=replay)
    assert again.chosen == plan.chosen
    assert again.why == plan.why


def test_a_replay_asked_for_something_else_says_so():
    profile = run().profile
    with pytest.raises(UsageError, match="recorded 'toy'"):
        tune("other.py:workload", 256, device=ReplayDevice(profile))


def test_every_raced_candidate_ran_inside_the_budget():
    plan = run()
    assert all(c.peak_allocated_bytes <= BUDGET for c in plan.candidates if c.step_seconds)


def test_each_mode_takes_at_most_five_attempts_and_one_out_of_memory():
    for probe in saved_plan(run()).probe.values():
        assert probe.attempts <= 5
        assert probe.out_of_memory <= 1


def test_the_time_budget_is_kept_to_within_one_visit():
    plan = run(time_budget=20.0)
    seconds = [v.outcome.seconds for v in plan.profile.visits]
    assert sum(seconds) <= 20 + max(seconds)


def test_more_time_never_means_fewer_visits():
    visits = [len(run(time_budget=budget).profile.visits) for budget in (1.0, 5.0, 20.0, 200.0)]
    assert visits == sorted(visits)


def test_a_probe_alone_finds_only_ceilings():
    profile = pipeline.probe("toy.py:workload", device=ToyDevice(), headroom=0.0, time_budget=1e6)
    assert [p.ceiling for p in profile.probe] == [100, 166, 333]
    assert profile.measurements == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"headroom": 100.0}, "headroom 100.0 % asked"),
        ({"time_budget": 0.0}, "time budget 0.0 s asked"),
        ({"max_micro_batch": 0}, "max micro-batch 0 asked"),
        ({"memory_limit": 0}, "memory limit 0 B asked"),
        ({"memory_limit": 10**12}, "has 953.67 MiB free; ask for less"),
        ({"checkpointing": ["some"]}, "the modes are none, selective, full"),
        ({"checkpointing": []}, "no checkpointing mode asked"),
        ({"replicas": 0}, "0 replicas asked"),
        ({"device": "tpu"}, "there is no such device; use one of auto, cpu"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(changes, message):
    with pytest.raises(UsageError) as caught:
        run(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_readings_carry_the_seconds_that_the_budget_counts():
    visits = run().profile.visits
    assert all(v.outcome.seconds > 0 for v in visits)
    assert any(isinstance(v.outcome, Reading) for v in visits)
