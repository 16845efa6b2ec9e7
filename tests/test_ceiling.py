import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.ceiling import find_ceiling
from tests.machine import BUDGET, Machine, facts


def probe(machine, *, bound=256, **options):
    return find_ceiling(
        machine, "none", bound=bound, bounded_by="target", budget_bytes=BUDGET, samples_per_replica=bound, **options
    )


def machine_with_ceiling(ceiling, *, fixed=0.3):
    return Machine(peak=lambda _mode, m: BUDGET * (fixed + (1 - fixed) * m / (ceiling + 0.5)))


@given(st.integers(1, 400), st.floats(0.0, 0.9))
def test_finds_the_true_ceiling_on_affine_memory_in_five_attempts_and_one_out_of_memory(ceiling, fixed):
    found = probe(machine_with_ceiling(ceiling, fixed=fixed))
    assert found.ceiling == min(ceiling, 256)
    assert found.num_out_of_memory <= 1
    assert len(found.attempts) <= (5 if fixed < 0.75 else 6)  # a nearly full card leaves no room for a lever


@given(st.integers(1, 300), st.integers(2, 32), st.floats(0.05, 0.6), st.floats(0, 0.7))
def test_stepped_and_flat_memory_does_not_fool_it(ceiling, step, fixed, flat):
    def peak(_mode, m):
        padded = -(-m // step) * step
        return BUDGET * max(fixed + (1 - fixed) * padded / (ceiling + 0.5), flat)

    truth = max((m for m in range(1, 257) if peak("none", m) <= BUDGET), default=0)
    found = probe(Machine(peak=peak))
    assert found.ceiling == truth
    assert len(found.attempts) <= 24


@given(st.integers(1, 300), st.integers(0, 1000))
def test_noisy_readings_do_not_fool_it(ceiling, seed):
    noise = random.Random(seed)
    machine = machine_with_ceiling(ceiling)
    visit = machine.visit

    def noisy(v):
        outcome = visit(v)
        if getattr(outcome, "peak_allocated_bytes", None) is None:
            return outcome
        object.__setattr__(outcome, "peak_allocated_bytes", int(outcome.peak_allocated_bytes * noise.gauss(1, 0.03)))
        return outcome

    machine.visit = noisy
    assert probe(machine).ceiling == min(ceiling, 256)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 256), max_size=40), st.integers(1, 300))
def test_only_sizes_that_ran_are_returned_even_where_fitting_is_not_monotone(holes, ceiling):
    machine = machine_with_ceiling(ceiling)
    machine.invalid = frozenset(holes)
    found = probe(machine)
    ran = {a.micro_batch for a in found.attempts if a.fits}
    assert found.ceiling == max(ran, default=0)
    if 0 < found.ceiling < 256:
        assert found.ceiling + 1 in {a.micro_batch for a in found.attempts if not a.fits}


def test_a_size_limit_is_not_called_memory():
    machine = machine_with_ceiling(1000)
    machine.invalid = frozenset(range(100, 300))
    found = probe(machine)
    assert found.ceiling == 99
    assert found.bounded_by == "size limit"


def test_the_bound_is_never_exceeded_and_named():
    machine = machine_with_ceiling(1000)
    found = find_ceiling(machine, "none", bound=37, bounded_by="dataset", budget_bytes=BUDGET)
    assert found.ceiling == 37
    assert found.bounded_by == "dataset"
    assert max(a.micro_batch for a in found.attempts) == 37


def test_nothing_fits_when_one_does_not():
    found = probe(Machine(peak=lambda _mode, _m: 2 * BUDGET))
    assert found.ceiling == 0
    assert [a.micro_batch for a in found.attempts] == [2, 1]
    assert found.bounded_by == "memory"


def test_a_target_of_one_is_tried_at_one():
    assert [a.micro_batch for a in probe(machine_with_ceiling(50), bound=1).attempts] == [1]


def test_a_size_that_reaches_the_target_alone_is_run_without_accumulation():
    machine = machine_with_ceiling(1000)
    probe(machine, bound=64)
    accumulation = {v.micro_batches[0]: v.memory_accumulation for v in machine.visits}
    assert accumulation[64] == 1
    assert accumulation[2] == 2


def test_attempts_are_capped():
    found = probe(machine_with_ceiling(100), max_attempts=3)
    assert len(found.attempts) == 3
    assert found.bounded_by == "attempts"


def test_seconds_are_capped_and_the_largest_that_ran_is_kept():
    machine = machine_with_ceiling(1000)
    found = probe(machine, allowance_seconds=1.0)
    assert 0 < found.ceiling < 256
    assert found.bounded_by == "time"
    assert found.seconds <= 1.5


def test_a_refused_mode_is_not_tried_and_says_why():
    machine = Machine(facts=facts(refused={"none": "no blocks"}))
    found = probe(machine)
    assert (found.ceiling, found.refused, machine.visits) == (0, "no blocks", [])


@pytest.mark.parametrize("ceiling", [7, 47, 200])
def test_the_memory_model_predicts_the_peak_of_the_ceiling(ceiling):
    found = probe(machine_with_ceiling(ceiling))
    model = found.memory
    predicted = model.fixed_bytes + model.per_sample_bytes * found.ceiling
    assert predicted == pytest.approx(BUDGET * (0.3 + 0.7 * ceiling / (ceiling + 0.5)), rel=1e-3)
