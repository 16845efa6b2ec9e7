import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.records import Split
from autobatch.splits import balanced
from autobatch.timing import (
    TimeBudget,
    between_visits,
    fit_step_times,
    location,
    log_interval,
    num_blocks,
    relative_noise,
    standard_error,
)


@given(st.floats(1e-4, 1.0), st.floats(1e-4, 0.1))
def test_the_line_of_an_affine_clock_is_found(alpha, beta):
    model = fit_step_times({m: alpha + beta * m for m in (16, 32, 64)}, 0.5)
    assert model.beta == pytest.approx(beta, rel=1e-6)
    assert model.alpha == pytest.approx(alpha, rel=1e-4, abs=1e-6)
    assert model.gamma == 0.5


def test_step_seconds_are_k_times_alpha_plus_beta_m_plus_gamma():
    model = fit_step_times({8: 0.1 + 0.02 * 8, 16: 0.1 + 0.02 * 16, 32: 0.1 + 0.02 * 32}, 0.3)
    split = Split(replicas=1, micro_batches=balanced(100, 5))
    assert model.step_seconds(split) == pytest.approx(5 * (0.1 + 0.02 * 20) + 0.3)
    assert model.bound_seconds(split) == pytest.approx(100 * 0.02 + 0.3)


def test_the_launch_bound_floor_is_left_out_of_the_line():
    clean = fit_step_times({m: 0.001 * m for m in (32, 64, 128)}, 0)
    floored = fit_step_times({1: 0.03, 2: 0.0301, 32: 0.032} | {m: 0.001 * m for m in (64, 128)}, 0)
    assert floored.beta == pytest.approx(clean.beta, rel=0.05)


def test_a_pressed_top_attempt_is_left_out_of_the_line():
    model = fit_step_times({25: 0.35, 50: 0.6, 100: 1.1, 200: 3.0}, 0)
    assert model.beta == pytest.approx(0.01, rel=1e-3)


def test_never_credits_more_than_three_percent_beyond_what_was_measured():
    model = fit_step_times({16: 0.16 + 0.1, 32: 0.32 + 0.1}, 0)
    assert model.micro_step_seconds(64) / 64 >= 0.97 * (0.42 / 32)
    pressed = fit_step_times({25: 0.35, 50: 0.6, 100: 1.1, 200: 3.0}, 0)
    assert pressed.optimistic_micro_step_seconds(150) / 150 >= 0.97 * (1.1 / 100)


def test_a_pressed_top_point_does_not_hide_the_sizes_below_it():
    pressed = fit_step_times({25: 0.35, 50: 0.6, 100: 1.1, 200: 3.0}, 0)
    assert pressed.optimistic_micro_step_seconds(190) < 0.8 * pressed.micro_step_seconds(190)
    assert pressed.optimistic_micro_step_seconds(200) == 3.0


def test_noise_between_visits_is_seen_where_repeats_inside_one_do_not_show_it():
    noise = random.Random(3)
    drift = [1 + 0.01 * block for block in range(30)]
    lanes = [[d * math.exp(noise.gauss(0, 0.02)) for d in drift] for _ in range(5)]
    assert between_visits(lanes) == pytest.approx(0.02, rel=0.3)
    assert between_visits([[1.0, 1.1], [1.0, 1.2]]) == 0.0


@given(st.floats(0.002, 0.05), st.integers(0, 100))
def test_noise_is_recovered_from_repeats(sigma, seed):
    noise = random.Random(seed)
    groups = [[math.exp(noise.gauss(0, sigma)) for _ in range(2)] for _ in range(400)]
    assert relative_noise(groups) == pytest.approx(sigma, rel=0.2)


def test_noise_is_not_inflated_by_outliers():
    noise = random.Random(0)
    groups = [
        [math.exp(noise.gauss(0, 0.01)) * (1.2 if noise.random() < 0.03 else 1) for _ in range(2)] for _ in range(400)
    ]
    assert relative_noise(groups) == pytest.approx(0.01, rel=0.2)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.floats(-5, 5))
def test_location_shifts_with_its_values_and_stays_inside_them(values, shift):
    assert min(values) - 1e-9 <= location(values) <= max(values) + 1e-9
    assert location([v + shift for v in values]) == pytest.approx(location(values) + shift, abs=1e-9)


def test_one_outlier_barely_moves_the_location():
    assert location([0.0] * 9 + [100.0]) == 0.0


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    noise = random.Random(1)
    held = 0
    for _ in range(400):
        low, high = log_interval([noise.gauss(0.3, 0.02) for _ in range(6)], 0.02)
        held += low <= 0.3 <= high
    assert 0.90 <= held / 400 <= 0.99


def test_less_evidence_gives_a_wider_interval():
    few, many = log_interval([0.0, 0.01], 0.02), log_interval([0.0, 0.01] * 4, 0.02)
    assert few[1] - few[0] > many[1] - many[0]
    assert standard_error([0.0], 0.02) == pytest.approx(0.02)


def test_blocks_follow_the_noise_between_six_and_thirty_two():
    assert [num_blocks(n) for n in (0.001, 0.01, 0.02, 0.2)] == [6, 8, 23, 32]


def test_a_time_budget_counts_down():
    budget = TimeBudget(10)
    budget.spend(4)
    assert budget.remaining_seconds == 6
