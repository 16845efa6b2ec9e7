import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.errors import NothingFits
from autobatch.plan import choose, decide, described, rival_of
from autobatch.records import Candidate, Confirmation, Measurement, Split
from tests import plans
from tests.machine import BUDGET, Machine


def measured(micro_batch, seconds, *, peak=None):
    split = Split(replicas=1, micro_batches=(micro_batch,) * (256 // micro_batch))
    return Measurement(
        candidate=Candidate(split=split, checkpointing="none"),
        step_seconds=tuple(seconds),
        peak_allocated_bytes=peak or micro_batch * 1000,
    )


def test_the_fastest_wins():
    assert decide([measured(64, [1.0] * 6), measured(32, [1.1] * 6)], 0.001).candidate.split.micro_batch == 64


def test_within_one_percent_the_least_memory_wins():
    assert decide([measured(64, [1.0] * 6), measured(32, [1.005] * 6)], 0.001).candidate.split.micro_batch == 32


def test_a_difference_that_may_be_more_than_one_percent_is_not_given_away_for_memory():
    raced = [measured(64, [1.0] * 6), measured(32, [1.005] * 6)]
    assert decide(raced, 0.05).candidate.split.micro_batch == 64


def test_drift_does_not_decide_since_blocks_are_paired():
    drift = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    pruned = measured(64, [1.02 * d for d in drift[:3]])
    assert decide([measured(32, drift), pruned], 0.001).candidate.split.micro_batch == 32


@given(st.integers(1, 600), st.booleans())
def test_the_target_is_always_hit_exactly(target, uneven):
    plan = plans.plan(target=target, uneven=uneven)
    assert sum(plan.micro_batches) == target
    assert plan.chosen.peak_allocated_bytes <= BUDGET


@pytest.mark.parametrize("target", [1, 250, 256, 257])
@pytest.mark.parametrize("uneven", [True, False])
def test_awkward_targets_are_hit_in_both_modes(target, uneven):
    plan = plans.plan(target=target, uneven=uneven)
    assert sum(plan.micro_batches) == target
    assert uneven or plan.chosen.candidate.split.uniform


def test_the_cost_of_staying_uniform_is_said_and_called_predicted():
    assert any("staying uniform costs" in r and "(predicted)" in r for r in plans.plan(target=257, uneven=False).why)
    assert any("a uniform split" in r and "would cost" in r for r in plans.plan(target=257, uneven=True).why)


def test_the_gain_is_measured_against_the_largest_that_fits():
    plan = plans.plan()
    assert plan.gain.over.split.accumulation == 3
    assert plan.gain.over.checkpointing == "none"
    assert plan.gain.interval[0] <= plan.gain.ratio <= plan.gain.interval[1]
    assert plan.gain.ratio > 1.02


def test_no_gain_is_claimed_below_the_detectable_difference():
    noisy = plans.machine(noise=0.04)
    reasons = plans.plan(session=noisy).why
    assert any("no gain" in reason for reason in reasons)


def test_no_gain_is_claimed_when_the_largest_that_fits_is_the_choice():
    plan = plans.plan(session=Machine(seconds=lambda _mode, m: 0.2 + 0.002 * m), checkpointing=("none",))
    assert plan.gain is None
    assert "no gain over the largest that fits: it is the choice" in plan.why


def test_a_winner_that_whole_steps_refute_gives_way_to_its_rival():
    profile = plans.profile()
    chosen = choose(profile).chosen.candidate
    rival = Measurement(candidate=rival_of(profile, chosen), step_seconds=(0.5, 0.5), peak_allocated_bytes=1)
    refuted = Confirmation(chosen=chosen, chosen_seconds=(0.6, 0.6), rival=rival)
    plan = choose(replace(profile, confirmation=refuted))
    assert plan.chosen.candidate == rival.candidate
    assert any("showed it faster" in reason for reason in plan.why)


def test_less_evidence_is_said_and_widens_the_interval():
    rich, poor = plans.plan(), plans.plan(time_budget_seconds=1.0)
    assert any("blocks, since the time budget was spent" in reason for reason in poor.why)

    def width(plan):
        return math.log(plan.chosen.interval[1] / plan.chosen.interval[0])

    assert width(poor) > width(rich)


def test_the_share_of_the_bound_is_a_share():
    assert 0.5 < plans.plan().reached <= 1


def test_nothing_fits_names_the_smallest_that_was_tried():
    with pytest.raises(NothingFits, match="smallest tried was a micro-batch of 1"):
        plans.profile(session=Machine(peak=lambda _mode, _m: 2 * BUDGET))


def test_replicas_share_the_target_and_the_unmeasured_exchange_is_said():
    plan = plans.plan(target=256, replicas=4)
    assert sum(plan.micro_batches) * 4 == 256
    assert any("exchange of gradients" in reason for reason in plan.why)


def test_a_plan_is_a_pure_function_of_its_profile():
    profile = plans.profile()
    assert choose(profile) == choose(profile)


def test_candidates_are_described_in_words():
    assert described(Candidate(split=Split(replicas=1, micro_batches=(29, 28)), checkpointing="full")) == (
        "29/28 x 2, checkpointing full"
    )
