import math

import optuna
import pytest

from autobatch.ceiling import find_ceiling
from autobatch.records import Candidate, Split
from autobatch.search import bracket, confirm, race, sampled, shortlist
from autobatch.splits import balanced, splits_of
from autobatch.timing import TimeBudget, step_time_models
from tests.machine import BUDGET, Machine

FOREVER = 1e9


def candidate(micro_batch, *, target=256, checkpointing="none"):
    return Candidate(
        split=Split(replicas=1, micro_batches=balanced(target, -(-target // micro_batch))), checkpointing=checkpointing
    )


def probe(machine, mode="none"):
    return find_ceiling(machine, mode, bound=256, bounded_by="target", budget_bytes=BUDGET, samples_per_replica=256)


def bracketed(machine, sizes, **options):
    values = {"fastest": math.inf, "noise": 0.005, "budget": TimeBudget(FOREVER), "allowance_seconds": FOREVER}
    return bracket(machine, probe(machine), sizes, **(values | options))


def run_race(machine, candidates, *, budget=None, noise=0.005, **options):
    found = probe(machine)
    return race(
        machine,
        candidates,
        [found],
        models=step_time_models([found], []),
        noise=noise,
        budget=budget or TimeBudget(FOREVER),
        seed=0,
        **options,
    )


POWERS = [1, 2, 4, 8, 16, 32, 64]


def test_the_bracket_stops_after_the_first_half_on_an_affine_clock():
    timings = bracketed(Machine(), POWERS)
    assert [t.micro_batch for t in timings] == [64, 32]


def test_the_bracket_follows_a_cache_down_to_the_knee():
    knee = Machine(seconds=lambda _mode, m: 0.002 * m * (1 + 0.05 * abs(math.log2(m / 8))) + 1e-4)
    assert [t.micro_batch for t in bracketed(knee, POWERS)] == [64, 32, 16, 8, 4]


def test_a_hopeless_mode_is_not_bracketed():
    assert bracketed(Machine(), POWERS, fastest=0.001) == []


def test_the_bracket_stops_when_its_seconds_are_spent():
    class Spending(Machine):
        def visit(self, visit, /):
            outcome = super().visit(visit)
            budget.spend(outcome.seconds)
            return outcome

    budget = TimeBudget(FOREVER)
    knee = Spending(seconds=lambda _mode, m: 0.01 * m**1.1)
    assert len(bracketed(knee, POWERS, budget=budget, allowance_seconds=0.1)) == 1


def test_the_shortlist_holds_what_could_be_best_and_the_predicted_best_first():
    machine = Machine(seconds=lambda _mode, m: 0.05 + 0.002 * m)
    models = step_time_models([probe(machine)], [])
    splits = {"none": splits_of(256, 1, ceiling=99, uneven=True)}
    kept = shortlist(splits, models, noise=0.005)
    assert kept[0].split.accumulation == 3
    assert all(c.split.accumulation <= 4 for c in kept)


def test_a_slow_checkpointing_mode_is_not_shortlisted():
    machine = Machine(seconds=lambda mode, m: (0.01 + 0.002 * m) * (1.3 if mode == "full" else 1))
    models = step_time_models([probe(machine), probe(machine, "full")], [])
    splits = {mode: splits_of(256, 1, ceiling=64, uneven=False) for mode in ("none", "full")}
    assert {c.checkpointing for c in shortlist(splits, models, noise=0.005)} == {"none"}


def test_a_visit_samples_large_and_small_micro_batches_of_an_uneven_split():
    split = Split(replicas=1, micro_batches=balanced(250, 8))
    assert split.micro_batches == (32, 32, 31, 31, 31, 31, 31, 31)
    assert sampled(split, 4) == (32, 31, 31, 31)
    assert sampled(split, 8) == split.micro_batches


def test_a_visit_of_a_few_micro_steps_is_projected_to_the_whole_step():
    machine = Machine()
    split = Split(replicas=1, micro_batches=(32,) * 8)
    measured = run_race(machine, [candidate(32)])[0]
    assert measured.step_seconds[0] == pytest.approx(8 * machine.seconds("none", 32) + machine.gamma)
    assert measured.candidate.split == split
    assert len(machine.visits[-1].micro_batches) < split.accumulation


def test_the_race_prunes_what_is_surely_slower_and_keeps_its_blocks():
    machine = Machine(noise=0.005, seconds=lambda _mode, m: 0.02 + 0.002 * m)
    fast, slow = run_race(machine, [candidate(64), candidate(16)])
    assert len(slow.step_seconds) <= len(fast.step_seconds)
    assert len(fast.step_seconds) >= 4
    assert math.log(slow.step_seconds[0] / fast.step_seconds[0]) > 0.1


def test_the_race_is_the_same_for_the_same_seed():
    first, second = (
        run_race(Machine(noise=0.02, seed=3), [candidate(64), candidate(32)], noise=0.02) for _ in range(2)
    )
    assert first == second


def test_a_candidate_that_does_not_fit_is_told_to_the_study_and_does_not_stop_the_race(tmp_path):
    machine = Machine(peak=lambda _mode, m: 2 * BUDGET if m == 32 else 3e8 + 7e6 * m)
    storage = str(tmp_path / "journal.log")
    measured = run_race(machine, [candidate(32), candidate(64)], storage=storage, study_name="s")
    assert measured[0].why_not == "out of memory: full"
    assert measured[1].step_seconds
    study = optuna.load_study(
        study_name="s",
        storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(storage)),
    )
    states = {t.params["accumulation"]: t.state.name for t in study.trials}
    assert states == {8: "FAIL", 4: "COMPLETE"}
    assert study.trials[0].user_attrs["why_not"] == "out of memory: full"


def test_stale_trials_of_a_stopped_run_are_failed_on_resume(tmp_path):
    storage = str(tmp_path / "journal.log")
    backend = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(storage))
    optuna.create_study(study_name="s", storage=backend).ask()
    run_race(Machine(), [candidate(64), candidate(32)], storage=storage, study_name="s")
    states = [t.state.name for t in optuna.load_study(study_name="s", storage=backend).trials]
    assert states[0] == "FAIL"
    assert "RUNNING" not in states


def test_every_raced_candidate_has_a_measured_peak():
    machine = Machine()
    for measured in run_race(machine, [candidate(64), candidate(32), candidate(16)]):
        assert measured.peak_allocated_bytes == machine.peak("none", measured.candidate.split.micro_batch)


def test_the_first_block_is_run_even_when_no_seconds_are_left():
    measured = run_race(Machine(), [candidate(64), candidate(32)], budget=TimeBudget(0))
    assert [len(m.step_seconds) for m in measured] == [1]


def test_visits_shrink_when_seconds_are_short():
    plenty, short = Machine(), Machine()
    run_race(plenty, [candidate(16)])
    run_race(short, [candidate(16)], budget=TimeBudget(1.5))
    assert len(plenty.visits[-1].micro_batches) > len(short.visits[-1].micro_batches)


def test_the_confirmation_runs_whole_steps_in_abba_order():
    machine = Machine()
    found = confirm(
        machine, candidate(64), candidate(32), [], expected_seconds=1, noise=0.005, budget=TimeBudget(FOREVER)
    )
    assert [v.micro_batches[0] for v in machine.visits] == [64, 32, 32, 64]
    assert all(sum(v.micro_batches) == 256 for v in machine.visits)
    assert len(found.chosen_seconds) == len(found.rival.step_seconds) == 2
    assert found.rival.peak_allocated_bytes == machine.peak("none", 32)


def test_a_noisy_machine_is_confirmed_twice_and_a_hurried_one_not_at_all():
    machine = Machine()
    options = {"expected_seconds": 1}
    twice = confirm(machine, candidate(64), candidate(32), [], noise=0.02, budget=TimeBudget(FOREVER), **options)
    assert len(twice.chosen_seconds) == 4
    assert confirm(machine, candidate(64), candidate(32), [], noise=0.02, budget=TimeBudget(1), **options) is None
