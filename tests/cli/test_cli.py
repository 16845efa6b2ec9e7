"""The command line as it is typed. Tunes replay a profile, so that no test here measures anything."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from autobatch import cli, doctor, pipeline, run
from autobatch.cli.probe import command as probe_command
from autobatch.cli.tune import command as tune_command
from autobatch.emit import emit
from autobatch.profiles import read_plan, saved_plan, write_plan, write_profile
from autobatch.records import CHECKPOINTING_MODES
from tests import plans

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plan():
    return plans.plan(uneven=False)


@pytest.fixture
def here(tmp_path, monkeypatch, plan):
    """An empty folder with a profile to replay in a folder beside it; the answer is that of `plan`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    write_profile(plan.profile, tmp_path / "recorded.json")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


REPLAY = ["--device", "replay:../recorded.json", "--workload", "toy", "--memory-limit", "1GB", "--headroom", "0"]
TUNE = ["tune", "--target", "256", *REPLAY, "--time-budget", "1e9", "--profile-dir", "profiles"]


def typed(*arguments):
    return CliRunner().invoke(cli.main, list(arguments))


def written():
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


# ------------------------------------------------------------------ fast, and without torch


@pytest.mark.parametrize("typed_line", ["--help", "tune --help", "probe --help", "--version", "emit --list"])
def test_help_and_emit_answer_without_torch(typed_line, tmp_path):
    code = (
        "import sys; sys.argv = ['autobatch', *sys.argv[1:]]\n"
        "from autobatch.cli import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'optuna', 'scipy') if name in sys.modules], file=sys.stderr)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *typed_line.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


def test_emit_reads_a_saved_plan_without_torch(here, plan):
    write_plan(saved_plan(plan), Path("plan.json"))
    code = (
        "import sys; from pathlib import Path\n"
        "from autobatch.emit import emit; from autobatch.profiles import read_plan\n"
        "emit(read_plan(Path('plan.json')), 'script'); print('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "False"


def test_python_m_autobatch_is_the_command(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "autobatch", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert re.fullmatch(r"autobatch, version \d+\.\d+\.\d+\S*\n", done.stdout)


def test_no_command_shows_the_help():
    shown = typed()
    assert shown.exit_code == 0
    assert all(command in shown.stdout for command in cli.COMMANDS)


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["tune"], 2, "Missing option '--target'; see autobatch tune --help"),
        (["tune", "--target", "x"], 2, "'x' is not a valid integer; see autobatch tune --help"),
        (["tune", "--targt", "4"], 2, "No such option '--targt'"),
        (["guess"], 2, "No such command 'guess'; see autobatch --help"),
        (["--guess"], 2, "No such option '--guess'; see autobatch --help"),
        ([*TUNE, "--target", "0"], 2, "target 0 asked; a target is at least 1 sample"),
        ([*TUNE, "--memory-limit", "some"], 2, "size 'some' asked; it is not a size; write it like 2GiB"),
        ([*TUNE, "--checkpointing", "none,sum"], 2, "'sum' asked; the modes are none, selective, full"),
        ([*TUNE, "--headroom", "100"], 2, "headroom 100.0 % asked"),
        ([*TUNE, "--device", "abacus"], 2, "device 'abacus' asked; there is no such device"),
        ([*TUNE, "--device", "replay:no.json"], 1, "no.json asked; it cannot be read (No such file or directory)"),
        ([*TUNE, "--workload", "other"], 2, "workload 'other' asked of a replay"),
        ([*TUNE, "--emit", "yaml"], 2, "format 'yaml' asked; there is no such emitter; use one of env, script"),
        ([*TUNE, "--output", "."], 2, "it cannot be written (it is a directory)"),
        ([*TUNE, "--output", "/proc/plan.json"], 2, "output /proc/plan.json asked; it cannot be written"),
        ([*TUNE, "--emit", "env:/proc/e"], 2, "output /proc/e asked; it cannot be written"),
        ([*TUNE, "--emit", "env:same", "--emit", "script:same"], 2, "output same asked twice"),
        (["emit"], 2, "a plan and a format are needed"),
        (["emit", "no.json", "env"], 1, "no.json asked; it cannot be read (No such file or directory)"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(here, arguments, code, message):
    shown = typed(*arguments)
    assert shown.exit_code == code
    assert shown.stdout == ""
    assert shown.stderr.count("\n") == 1
    assert shown.stderr.startswith("autobatch: ")
    assert message in shown.stderr
    assert written() == []


@pytest.mark.parametrize("arguments", [["--debug", *TUNE, "--target", "0"], [*TUNE, "--target", "0", "--debug"]])
def test_debug_lets_the_traceback_through(here, arguments):
    shown = typed(*arguments)
    assert type(shown.exception).__name__ == "UsageError"


def test_a_bug_in_the_users_model_shows_the_users_own_traceback(here):
    shown = typed("probe", "--workload", f"{ROOT}/tests/toys.py:shape_bug", "--device", "cpu", "--target", "2")
    assert shown.exit_code == 1
    assert "Traceback (most recent call last)" in shown.stderr
    assert "toys.py" in shown.stderr
    assert shown.stderr.rstrip().splitlines()[-1].startswith("autobatch: ")
    assert "autobatch/cli" not in shown.stderr


# ------------------------------------------------------------------ tune


def test_tune_prints_the_table_and_last_what_was_written_where(here, plan):
    shown = typed(*TUNE, "--emit", "env", "--emit", "env:other.env")
    assert shown.exit_code == 0, shown.output
    assert "<- chosen" in shown.stdout
    assert f"chosen: micro-batch {plan.chosen.candidate.split.micro_batch} x" in shown.stdout
    names = [line.split()[-1] for line in shown.stdout.splitlines()[-4:]]
    assert sorted(names) == written()
    assert names[0] == "autobatch.plan.json"


def test_tune_says_what_to_do_next_and_it_works(here):
    shown = typed(*TUNE, "--output", "p.json")
    assert "autobatch emit p.json script" in shown.stdout
    assert typed("emit", "p.json", "script").exit_code == 0


def test_json_is_one_document_and_nothing_else_on_stdout(here):
    shown = typed(*TUNE, "--json")
    document = json.loads(shown.stdout)
    assert document == json.loads(Path("autobatch.plan.json").read_text())
    assert sum(document["micro_batches"]) * document["replicas"] == 256
    assert "autobatch.plan.json" in shown.stderr


def test_the_plan_file_holds_the_plan(here, plan):
    typed(*TUNE)
    assert read_plan(Path("autobatch.plan.json")).micro_batches == plan.micro_batches


def test_without_a_workload_the_embedded_one_is_named(here):
    arguments = [word for word in TUNE if word not in ("--workload", "toy")]
    assert "no workload was named: the embedded 'gpt' is used" in typed(*arguments).stderr
    assert "no workload" not in typed(*TUNE).stderr
    assert "no workload" not in typed(*arguments, "--quiet").stderr


def test_a_file_below_the_current_folder_is_kept_by_its_relative_path(here):
    Path("mine.py").write_text("")
    shown = typed(*TUNE, "--workload", f"{here}/mine.py:w")
    assert "workload 'mine.py:w' asked of a replay" in shown.stderr


def test_ctrl_c_keeps_what_was_found_and_says_how_to_go_on(tmp_path):
    arguments = ["tune", "--target", "64", "--device", "cpu", "--workload", "gpt-nano", "--profile-dir", "facts"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "autobatch", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) as running:
        deadline = time.monotonic() + 100
        while not list(tmp_path.glob("facts/*.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=60)
    assert running.returncode == 130
    assert re.fullmatch(r"autobatch: interrupted with \d+ readings .*; go on with --resume\n", told)
    assert [path.suffix for path in (tmp_path / "facts").iterdir()] == [".json"]


# ------------------------------------------------------------------ probe, emit, doctor


def test_probe_prints_a_row_for_each_mode(here):
    shown = typed("probe", "--target", "256", *REPLAY, "--time-budget", "1e9")
    assert shown.exit_code == 0, shown.output
    assert all(re.search(rf"^{mode} +\d+ ", shown.stdout, re.MULTILINE) for mode in CHECKPOINTING_MODES)
    assert written() == []


def test_probe_json_is_one_document(here):
    document = json.loads(typed("probe", "--target", "256", *REPLAY, "--time-budget", "1e9", "--json").stdout)
    assert document["probe"].keys() == set(CHECKPOINTING_MODES)


def test_emit_writes_a_saved_plan_to_stdout_or_a_file(here, plan):
    saved = saved_plan(plan)
    write_plan(saved, Path("plan.json"))
    assert typed("emit", "plan.json", "env").stdout == emit(saved, "env")
    shown = typed("emit", "plan.json", "env", "--output", "x.env")
    assert shown.stdout.split() == ["env", "x.env"]
    assert Path("x.env").read_text() == emit(saved, "env")


def test_doctor_tells_what_would_be_used():
    facts = json.loads(typed("doctor", "--json").stdout)
    assert facts["would_use"]["device"] == "cpu"
    assert 0 < facts["would_use"]["budget_bytes"] <= facts["cpu"]["available_bytes"]
    page = typed("doctor").stdout
    assert facts["versions"]["torch"] in page
    assert "autobatch would use" in page


def test_doctor_names_what_is_not_installed():
    facts = doctor.examine()
    facts["versions"]["torch"] = None
    assert re.search(r"^torch +not installed$", doctor.render(facts), re.MULTILINE)


# ------------------------------------------------------------------ defaults


def configured(text, folder=Path()):
    (folder / "pyproject.toml").write_text(f"[tool.autobatch]\n{text}\n")


FILE = """
target = 256
device = "replay:../recorded.json"
workload = "toy"
memory-limit = "1GB"
headroom = 0
time_budget = 1e9
profile-dir = "facts"
checkpointing = ["none", "selective", "full"]
emit = ["env", "script:train.py"]
json = true
"""


def test_pyproject_gives_the_defaults_of_a_bare_tune(here):
    configured(FILE)
    shown = typed("tune")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["target"] == 256
    assert {"autobatch.env", "train.py", "autobatch.plan.json"} <= set(written())
    assert any(name.startswith("facts/") for name in written())
    assert "no workload was named" not in shown.stderr


def test_the_nearest_pyproject_of_the_folders_above_counts(here, monkeypatch):
    configured("target = 'far'", here.parent)
    configured("target = 'near'")
    (here / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(here / "deep" / "er")
    assert "'near' is not a valid integer" in typed("tune").stderr


def test_what_is_typed_wins_over_pyproject(here):
    configured(FILE + "output = 'from-file.json'")
    typed("tune", "--output", "typed.json")
    assert "typed.json" in written()
    assert "from-file.json" not in written()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("targt = 4", "sets 'targt' in [tool.autobatch]; it is no option; the options are checkpointing"),
        ("target = ", "it is not TOML"),
        ("memory-limit = 'some'", "size 'some' asked"),
    ],
)
def test_a_bad_pyproject_is_one_line(here, text, message):
    configured(text)
    shown = typed(*[word for word in TUNE if word not in ("--memory-limit", "1GB")])
    assert shown.exit_code == 2
    assert shown.stderr.count("\n") == 1
    assert message in shown.stderr
    assert written() == ["pyproject.toml"]


def test_a_tool_autobatch_that_is_no_table_is_said(here):
    Path("pyproject.toml").write_text("[tool]\nautobatch = 3\n")
    assert "it is a table: write [tool.autobatch]" in typed("tune").stderr


@pytest.mark.parametrize(("command", "function"), [(tune_command, pipeline.tune), (probe_command, pipeline.probe)])
def test_every_keyword_of_the_library_has_its_option(command, function):
    keywords = set(inspect.signature(function).parameters) - {"progress"}
    options = {option.name for option in command.params}
    assert options - keywords <= {"output", "emits", "as_json", "quiet", "debug"}
    assert keywords - options == set()


def test_the_help_shows_the_librarys_defaults():
    shown = {option.name: option.help for option in tune_command.params}
    assert f"[default: {run.DEFAULT_HEADROOM_PERCENT:g}]" in shown["headroom"]
    cpu, accelerator = run.CPU_TIME_BUDGET_SECONDS, run.ACCELERATOR_TIME_BUDGET_SECONDS
    assert f"[default: {cpu:g} on a CPU, else {accelerator:g}]" in shown["time_budget"]
    assert f"[default: {','.join(CHECKPOINTING_MODES)}]" in shown["checkpointing"]
    assert f"[default: {inspect.signature(pipeline.tune).parameters['seed'].default}]" in shown["seed"]
    bound = next(option.help for option in probe_command.params if option.name == "target")
    assert f"[default: {pipeline.DEFAULT_PROBE_BOUND}]" in bound
