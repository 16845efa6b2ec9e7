"""Each example, run as its user would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
STEP = re.compile(r"^step +(\d+)  loss (\d+\.\d+)  samples (\d+)$", re.MULTILINE)


def python(*arguments, folder, exit_code=0):
    """What `python ...` prints on stdout, or on stderr where it is to fail."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stderr if exit_code else done.stdout


def steps(output):
    found = [(int(step), float(loss), int(samples)) for step, loss, samples in STEP.findall(output)]
    assert len(found) >= 2, output
    return found


def assert_trains_at_256(output):
    rows = steps(output)
    assert {samples for _, _, samples in rows} == {256}
    assert rows[-1][1] < rows[0][1] - 1


def table(output):
    """{split: (first loss, final loss, largest difference, seconds, samples/s)}."""
    lines = [line.split() for line in output.splitlines()]
    return {cells[0]: tuple(map(float, cells[1:])) for cells in lines if re.fullmatch(r"\d+x\d+", (cells or [""])[0])}


@pytest.fixture(scope="module")
def without_plan(tmp_path_factory):
    """What the training script prints in an empty folder."""
    return python(EXAMPLES / "train.py", "--steps", 10, folder=tmp_path_factory.mktemp("empty"))


@pytest.fixture(scope="module")
def with_plan(tmp_path_factory):
    """What it prints in a folder in which `autobatch tune` has run on it."""
    folder = tmp_path_factory.mktemp("tuned")
    limits = ("--time-budget", 3, "--memory-limit", "24MiB", "--checkpointing", "none,full", "--profile-dir", folder)
    workload = f"{EXAMPLES / 'train.py'}:workload"
    python("-m", "autobatch", "tune", "--target", 256, "--workload", workload, *limits, "--quiet", folder=folder)
    return python(EXAMPLES / "train.py", "--steps", 10, folder=folder)


def test_the_training_script_trains_without_a_plan_and_says_by_which_split(without_plan):
    assert without_plan.startswith("no autobatch.plan.json here; the default split: 32 x 8 samples a step\n")
    assert_trains_at_256(without_plan)


def test_the_training_script_follows_the_plan_that_tune_left_in_the_folder(with_plan):
    found = re.match(r"autobatch.plan.json: (\d+) x (\d+) samples a step, checkpointing (none|full)\n", with_plan)
    assert found, with_plan
    assert int(found[1]) * int(found[2]) == 256
    assert_trains_at_256(with_plan)


def test_the_training_script_loses_the_same_with_the_plan_as_without(with_plan, without_plan):
    planned, default = ([loss for _, loss, _ in steps(output)] for output in (with_plan, without_plan))
    assert planned == pytest.approx(default, abs=2e-3)


def test_the_training_script_refuses_a_plan_that_is_not_there_in_one_line(tmp_path):
    said = python(EXAMPLES / "train.py", "--plan", "nowhere.json", folder=tmp_path, exit_code=1)
    assert said.startswith("error: nowhere.json asked; it cannot be read")
    assert said.count("\n") == 1


def test_a_tune_inside_a_training_script_changes_nothing_but_the_split(tmp_path):
    output = python(EXAMPLES / "embedded.py", "--steps", 15, "--time-budget", 3, "--memory-limit", 64, folder=tmp_path)
    before, after = re.findall(r"the tune  ([0-9a-f]{16})$", output, re.MULTILINE)
    assert before == after
    assert_trains_at_256(output)
    micro_batch, accumulation = re.findall(r"^tuned: (\d+) x (\d+) samples a step", output, re.MULTILINE)[0]
    assert int(micro_batch) * int(accumulation) == 256


def test_three_splits_of_256_train_the_same_and_the_picture_is_drawn(tmp_path):
    output = python(EXAMPLES / "same_training.py", "--steps", 2, "--plot", "curves.png", folder=tmp_path)
    rows = table(output)
    assert set(rows) == {"256x1", "32x8", "8x32"}
    for first, final, difference, seconds, samples_per_second in rows.values():
        assert final < first - 0.3
        assert difference < 1e-5
        assert seconds * samples_per_second == pytest.approx(2 * 256, rel=0.1)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))
