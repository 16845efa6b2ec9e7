from dataclasses import replace

import pytest

from autobatch.report import format_seconds, plan_ceilings, plan_summary, plan_table, probe_table, split_text
from tests import plans


@pytest.fixture(scope="module")
def plan():
    return plans.saved()


def test_the_table_marks_the_chosen_one_and_only_it(plan):
    table = plan_table(plan)
    marked = [line for line in table.splitlines() if "<- chosen" in line]
    assert len(marked) == 1
    assert split_text(plan.micro_batches) in marked[0]


def test_the_table_lists_every_candidate_fastest_first(plan):
    rows = plan_table(plan).splitlines()[2:]
    assert len(rows) == len(plan.candidates)
    speeds = [c.tokens_per_second for c in plan.candidates]
    assert speeds == sorted(speeds, reverse=True)


def test_columns_are_aligned(plan):
    _, rule, *rows = plan_table(plan).splitlines()
    gaps = [place for place, mark in enumerate(rule) if mark == " "]
    assert all(row.ljust(len(rule))[place] == " " for row in rows for place in gaps)


def test_a_candidate_that_could_not_run_says_why(plan):
    unknown = dict.fromkeys(["tokens_per_second", "interval", "step_seconds"])
    failed = replace(plan.candidates[-1], **unknown, why_not="out of memory: full")
    assert "out of memory: full" in plan_table(replace(plan, candidates=(*plan.candidates[:-1], failed)))


def test_no_figure_has_more_digits_than_its_spread(plan):
    wide = replace(plan, tokens_per_second=25321.7, interval=(24000.0, 27000.0))
    assert "25,300 tokens/s" in plan_summary(wide)
    narrow = replace(plan, tokens_per_second=25321.7, interval=(25320.0, 25323.0))
    assert "25,321.7 tokens/s" in plan_summary(narrow)


def test_the_summary_states_the_split_the_memory_and_the_reasons(plan):
    text = plan_summary(plan)
    assert f"= {plan.target} samples a step" in text
    assert "GiB" in text or "MiB" in text
    assert all(reason in text for reason in plan.why)


def test_a_prediction_is_called_one(plan):
    predicted = replace(plan, predicted=True)
    assert "predicted" in plan_table(predicted)
    assert "tokens/s predicted" in plan_summary(predicted)
    assert "measured" in plan_summary(plan)


def test_replicas_are_shown(plan):
    assert "x 4 replicas" in plan_summary(replace(plan, replicas=4))


def test_ceilings_say_what_bounded_them(plan):
    assert "checkpointing none: ceiling 100 (bounded by memory" in plan_ceilings(plan)


def test_the_probe_table_shows_a_refused_mode_with_its_reason():
    probes = plans.profile().probe
    refused = replace(probes[1], refused="no repeated blocks were found")
    assert "no repeated blocks were found" in probe_table([probes[0], refused])


def test_uneven_splits_are_written_with_both_sizes():
    assert split_text((29, 29, 28)) == "29+28 x 3"
    assert split_text((32,) * 8) == "32 x 8"


def test_seconds_have_a_unit_that_suits_them():
    assert [format_seconds(s) for s in (1.234, 0.0456)] == ["1.23 s", "45.6 ms"]
