import subprocess
from dataclasses import replace

from autobatch.emit import emit
from tests import plans


def test_a_real_shell_reads_the_variables(tmp_path):
    plan = plans.saved(target=250)
    path = tmp_path / "autobatch.env"
    path.write_text(emit(plan, "env"))
    names = ["MICRO_BATCH", "ACCUMULATION", "MICRO_BATCHES", "CLIP_NORM"]
    micro_batch, accumulation, sizes, clip = sourced(path, names)
    assert (int(micro_batch), int(accumulation)) == (plan.micro_batch, plan.accumulation)
    assert sum(map(int, sizes.split())) == 250
    assert clip == ""


def test_nothing_in_a_plan_is_run_by_the_shell(tmp_path):
    plan = replace(plans.saved(), workload="x\ntouch owned", precision="fp32; touch owned $(touch owned)")
    path = tmp_path / "autobatch.env"
    path.write_text(emit(plan, "env"))
    assert sourced(path, ["PRECISION"]) == [plan.precision]
    assert [p.name for p in tmp_path.iterdir()] == ["autobatch.env"]


def sourced(path, names):
    """The variables as a POSIX shell sees them after sourcing the file."""
    shown = "|".join(f"$AUTOBATCH_{name}" for name in names)
    command = ["sh", "-euc", f'. {path}; echo "{shown}"']
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=path.parent)
    return done.stdout.strip().split("|")
