"""The emitted script is run, and trains as devices/step.py does."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autobatch import WorkloadError
from autobatch.checkpointing import checkpointed
from autobatch.devices.step import Trainee, train_step
from autobatch.emit import emit
from tests import plans, toys

ROOT = Path(__file__).parents[2]


def script_for(tmp_path, reference=f"{ROOT}/tests/toys.py:workload", **changes):
    plan = plans.saved(target=50)
    unit = "tokens" if reference and "gpt" in reference else "samples"
    plan = replace(plan, **({"workload_reference": reference, "clip_norm": 1.0, "unit": unit} | changes))
    path = tmp_path / "emitted.py"
    path.write_text(emit(plan, "script"))
    return path, plan


def run(path, *arguments, launcher=()):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(path), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return re.findall(r"step (\d+)  loss (\S+)  samples (\d+)", done.stdout)


def test_the_script_trains_and_counts_its_samples(tmp_path):
    path, _ = script_for(tmp_path)
    lines = run(path, "--steps", "20")
    assert [int(step) for step, _, _ in lines] == list(range(1, 21))
    assert {int(samples) for _, _, samples in lines} == {50}
    assert float(lines[-1][1]) < float(lines[0][1])


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpointing": "none"},
        {"checkpointing": "full"},
        {"precision": "bf16"},
        {"precision": "fp16", "clip_norm": 0.1},
        {"micro_batches": (17, 17, 16), "micro_batch": 17, "accumulation": 3, "uniform": False},
        {"micro_batches": (25, 25), "micro_batch": 25, "accumulation": 2, "uniform": True},
    ],
)
def test_the_script_trains_exactly_as_the_measured_step(tmp_path, changes):
    path, plan = script_for(tmp_path, **changes)
    losses = [float(loss) for _, loss, _ in run(path, "--steps", "5")]
    assert losses == pytest.approx(reference_losses(plan, steps=5), abs=2e-4)


def reference_losses(plan, *, steps):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = toys.Toy()
    trainee = Trainee(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=toys.loss,
        precision=plan.precision,
        clip_norm=plan.clip_norm,
    )
    torch.manual_seed(0)
    losses = []
    with checkpointed(model, plan.checkpointing):
        for _ in range(steps):
            batches = [toys.batch(size) for size in plan.micro_batches]
            losses.append(train_step(trainee, batches, [float(size) for size in plan.micro_batches]))
    torch.set_num_threads(threads)
    return losses


SAME_ON_EVERY_RANK = """
import torch
from autobatch import Workload

def batch(samples):
    x = torch.linspace(-1, 1, samples * 8).reshape(samples, 8)
    return x, x.sum(1).sin()

workload = Workload(
    name="same",
    model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    batch=batch,
    loss=lambda model, data: (model(data[0])[:, 0] - data[1]).square().mean(),
    weight=lambda data: float((data[1] > 0.1).sum()),
)
"""


def test_two_processes_under_torchrun_train_as_one_with_all_the_micro_batches(tmp_path):
    (tmp_path / "same.py").write_text(SAME_ON_EVERY_RANK)
    reference = f"{tmp_path}/same.py:workload"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    path, _ = script_for(tmp_path, reference=reference, replicas=2, micro_batches=(13, 2, 10))
    together = run(path, "--steps", "6", launcher=torchrun)
    path, _ = script_for(tmp_path, reference=reference, micro_batches=(13, 2, 10) * 2)
    alone = run(path, "--steps", "6")
    assert {int(samples) for _, _, samples in together} == {50}
    assert [float(loss) for _, loss, _ in together] == pytest.approx([float(loss) for _, loss, _ in alone], abs=2e-4)
    assert float(alone[-1][1]) < 0.9 * float(alone[0][1])


def test_the_wrong_number_of_processes_is_said(tmp_path):
    path, _ = script_for(tmp_path, replicas=2)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1
    assert "1 process(es) started; the plan is for 2" in done.stderr


def test_an_embedded_workload_needs_no_file(tmp_path):
    path, _ = script_for(tmp_path, reference="gpt-nano")
    assert len(run(path, "--steps", "1")) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_the_script_is_clean_and_holds_only_what_the_plan_needs(tmp_path, precision, checkpointing, clip_norm):
    path, _ = script_for(tmp_path, precision=precision, checkpointing=checkpointing, clip_norm=clip_norm)
    text = path.read_text()
    assert not re.search("@[A-Z_]+@", text)
    assert ("GradScaler" in text) == (precision == "fp16")
    assert ("checkpointed" in text) == (checkpointing != "none")
    assert ("clip_grad_norm_" in text) == (clip_norm is not None)
    compile(text, str(path), "exec")
    assert_clean(path)


def assert_clean(path):
    rules = ["--isolated", "--select", "E,F,I,B", "--line-length", "110"]
    done = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ['it"""s', "it's \\N here", "@CLIP@", "line\nbreak", "long " * 40])
def test_any_name_makes_a_script_that_parses(tmp_path, name):
    plan = plans.saved(target=50)
    device = replace(plan.device, name=name)
    reference = f"{name[:20]}.py:w"
    path = tmp_path / "emitted.py"
    path.write_text(emit(replace(plan, workload=name, workload_reference=reference, device=device), "script"))
    assert_clean(path)
    assigned = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(assigned[0].value) == reference


def test_the_unit_of_speed_is_the_plans(tmp_path):
    for unit in ("tokens", "samples"):
        path, _ = script_for(tmp_path, unit=unit)
        assert f"{unit}/s" in path.read_text()
        assert ("tokens_in" in path.read_text()) == (unit == "tokens")


def test_tokens_are_counted_in_the_batches_that_were_made(tmp_path):
    path, _ = script_for(tmp_path, reference="gpt-nano", micro_batches=(3, 2))
    counting = path.read_text().replace("return tuple(", "print('counted', counted)\n    return tuple(")
    path.write_text(counting)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), "--device", "cpu", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    assert "counted 320" in done.stdout


def test_live_objects_cannot_be_put_in_a_script(tmp_path):
    with pytest.raises(WorkloadError, match="put the workload in a file"):
        script_for(tmp_path, reference=None)
