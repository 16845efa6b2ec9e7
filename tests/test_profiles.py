import dataclasses
import json
import os
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from autobatch.errors import FileFormatError, UsageError
from autobatch.profiles import (
    default_profile_dir,
    plan_document,
    profile_path,
    read_plan,
    read_profile,
    require_writable,
    saved_plan,
    write_plan,
    write_profile,
)
from autobatch.records import (
    CHECKPOINTING_MODES,
    Profile,
    SavedCandidate,
    SavedDevice,
    SavedGain,
    SavedPlan,
    SavedProbe,
    SavedSearch,
)
from tests import plans
from tests.machine import info, settings

PLAN_KEYS = """
    schema target replicas micro_batch accumulation micro_batches uniform checkpointing precision compile
    tokens_per_second samples_per_second interval unit peak_allocated_bytes peak_reserved_bytes budget_bytes predicted
    device workload reached gain candidates probe search versions
"""


@pytest.fixture(scope="module")
def plan():
    return plans.plan()


def test_a_profile_comes_back_as_it_was_written(tmp_path, plan):
    path = tmp_path / "deep" / "profile.json"
    write_profile(plan.profile, path)
    assert read_profile(path) == plan.profile


def test_a_plan_comes_back_as_it_was_written(tmp_path, plan):
    path = tmp_path / "plan.json"
    write_plan(saved_plan(plan), path)
    assert read_plan(path) == saved_plan(plan)


NUMBERS = st.floats(0, 1e15)
BYTES = st.none() | st.integers(0, 1 << 50)
SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=5).map(tuple)


@st.composite
def splits(draw):
    sizes = draw(SIZES)
    return {
        "micro_batches": sizes,
        "micro_batch": max(sizes),
        "accumulation": len(sizes),
        "uniform": len(set(sizes)) == 1,
        "checkpointing": draw(st.sampled_from(CHECKPOINTING_MODES)),
        "peak_allocated_bytes": draw(BYTES),
        "peak_reserved_bytes": draw(BYTES),
    }


@st.composite
def candidates(draw):
    speed = st.none() | NUMBERS
    return SavedCandidate(
        **draw(splits()),
        tokens_per_second=draw(speed),
        samples_per_second=draw(speed),
        interval=draw(st.none() | st.tuples(NUMBERS, NUMBERS)),
        step_seconds=draw(speed),
        blocks=draw(st.integers(0, 32)),
        why_not=draw(st.none() | st.text(max_size=9)),
    )


@st.composite
def saved_plans(draw):
    split, replicas, words = draw(splits()), draw(st.integers(1, 64)), st.text(max_size=9)
    probes = st.builds(SavedProbe, seconds=NUMBERS, bounded_by=words, refused=st.none() | words)
    return SavedPlan(
        **split,
        target=replicas * sum(split["micro_batches"]),
        replicas=replicas,
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        compile=draw(st.booleans()),
        tokens_per_second=draw(NUMBERS),
        samples_per_second=draw(NUMBERS),
        interval=draw(st.tuples(NUMBERS, NUMBERS)),
        unit=draw(st.sampled_from(["tokens", "samples"])),
        step_seconds=draw(NUMBERS),
        budget_bytes=draw(st.integers(0, 1 << 50)),
        predicted=draw(st.booleans()),
        device=draw(st.builds(SavedDevice, kind=words, name=words)),
        workload=draw(words),
        workload_reference=draw(st.none() | words),
        num_parameters=draw(st.integers(0)),
        units_per_sample=draw(NUMBERS),
        clip_norm=draw(st.none() | NUMBERS),
        reached=draw(st.none() | NUMBERS),
        gain=draw(
            st.none() | st.builds(SavedGain, over=candidates(), ratio=NUMBERS, interval=st.tuples(NUMBERS, NUMBERS))
        ),
        candidates=draw(st.lists(candidates(), max_size=3).map(tuple)),
        probe=draw(st.dictionaries(st.sampled_from(CHECKPOINTING_MODES), probes)),
        search=draw(st.builds(SavedSearch, seconds=NUMBERS, noise=NUMBERS)),
        why=draw(st.lists(words, max_size=3).map(tuple)),
        created=draw(words),
        versions=draw(st.dictionaries(words, words, max_size=3)),
    )


@hypothesis_settings(max_examples=50)
@given(saved_plans())
def test_any_plan_comes_back_as_it_was_written(tmp_path_factory, any_plan):
    path = tmp_path_factory.getbasetemp() / "any.json"
    write_plan(any_plan, path)
    assert read_plan(path) == any_plan


def test_a_plan_file_has_the_keys_that_other_programs_rely_on(plan):
    document = plan_document(saved_plan(plan))
    assert set(document) >= set(PLAN_KEYS.split())
    assert document["schema"] == "autobatch.plan/1"
    assert sum(document["micro_batches"]) * document["replicas"] == document["target"] == 256
    assert document["micro_batch"] * document["accumulation"] >= 256
    assert document["gain"]["over"]["checkpointing"] == "none"
    assert document["probe"]["none"].keys() >= {"ceiling", "attempts", "out_of_memory", "seconds"}
    assert document["search"].keys() == {"visits", "seconds", "noise"}
    assert document["interval"][0] <= document["tokens_per_second"] <= document["interval"][1]
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[: len(text) // 2], r"not whole JSON \(line \d+, column \d+"),
        (lambda _: "", "not whole JSON"),
        (lambda text: text.replace('"target": 256', '"target": "many"'), r"expected int @ \$\.target"),
        (
            lambda text: text.replace('"micro_batches": [', '"micro": [', 1),
            r"required field missing @ \$\.micro_batches",
        ),
        (
            lambda text: text.replace('"target": 256', '"target": 250'),
            r"250, where replicas .* make it 256 @ \$\.target",
        ),
        (
            lambda text: text.replace('"precision": "fp32"', '"precision": "bf17"'),
            r"'bf17' is none of .* @ \$\.precision",
        ),
        (lambda text: text.replace('"replicas": 1', '"replicas": 0'), r"at least one replica @ \$\.micro_batches"),
        (lambda text: text.replace("plan/1", "plan/2"), "schema is autobatch.plan/2 and this autobatch reads version"),
        (lambda text: text.replace("autobatch.plan/1", "autobatch.profile/1"), "give a file of that kind"),
        (lambda _: "[1, 2]", "schema is None"),
    ],
)
def test_a_spoiled_plan_names_its_file_and_the_place(tmp_path, plan, spoil, message):
    path = tmp_path / "plan.json"
    write_plan(saved_plan(plan), path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(FileFormatError, match=message) as caught:
        read_plan(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_fields_are_met_with_silence(tmp_path, plan):
    path = tmp_path / "plan.json"
    write_plan(saved_plan(plan), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"invented_later": 1}))
    assert read_plan(path) == saved_plan(plan)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(FileFormatError, match="No such file"):
        read_profile(tmp_path / "absent.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, plan, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full_disk(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(UsageError, match="No space left on device"):
        write_plan(saved_plan(plan), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_directory_is_no_output(tmp_path):
    with pytest.raises(UsageError, match="it is a directory"):
        require_writable(tmp_path)


def test_a_file_in_the_way_of_a_folder_is_no_output(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Not a directory"):
        require_writable(tmp_path / "file" / "plan.json")


def test_profiles_go_to_the_folder_here_or_to_the_users_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_profile_dir().is_absolute()
    (tmp_path / "profiles").mkdir()
    assert default_profile_dir() == Path("profiles")


def test_a_profile_is_named_by_what_changes_its_answer():
    def name(workload="a.py:w", **changes):
        return profile_path(Path(), info(), workload, settings(**changes)).name

    assert re.fullmatch(r"toy-machine-a-py-w-[0-9a-f]{8}\.json", name())
    assert name() == name(time_budget_seconds=5.0, budget_bytes=7)
    changes = [{"target": 3}, {"seed": 1}, {"uneven": True}, {"memory_limit_bytes": 5}, {"workload": "b.py:w"}]
    assert len({name(), *(name(**change) for change in changes)}) == 6


def test_a_profile_names_no_user_and_no_host(tmp_path, plan):
    path = tmp_path / "profile.json"
    write_profile(plan.profile, path)
    text = path.read_text()
    assert os.uname().nodename not in text
    assert str(Path.home()) not in text


def test_every_field_of_the_files_is_documented_and_no_other():
    readme = (Path(__file__).parents[1] / "profiles" / "README.md").read_text()
    sections = re.split(r"^### .*\((\w+)\)$", readme, flags=re.MULTILINE)[1:]
    documented = {
        record: re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
        for record, rows in zip(sections[::2], sections[1::2], strict=True)
    }
    records = records_in(SavedPlan) | records_in(Profile)
    assert documented == {record.__name__: [f.name for f in dataclasses.fields(record)] for record in records}


def records_in(hint):
    """The records that a file of this type holds, itself included."""
    if not dataclasses.is_dataclass(hint):
        return set().union(*(records_in(part) for part in get_args(hint)))
    return {hint}.union(*(records_in(part) for part in get_type_hints(hint).values()))
