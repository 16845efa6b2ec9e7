import subprocess
import sys
import time

import psutil
import pytest

from autobatch.devices.cpu import WORKER_BYTES
from autobatch.devices.worker import Order, worker_session
from autobatch.errors import DeviceError, UsageError, UserCodeError, WorkloadError
from autobatch.records import Reading, Rejection, Visit

GIB = 1 << 30


def order(name="workload", *, budget=GIB, file="tests/toys.py"):
    return Order(device="cpu", reference=f"{file}:{name}", budget_bytes=budget, seed=0)


def visit(size, *, accumulation=2):
    return Visit(checkpointing="none", micro_batches=(size,) * 2, memory_accumulation=accumulation)


def test_a_worker_visits_rejects_and_goes_on():
    with worker_session(order(budget=4 << 20), visit_limit_seconds=60) as session:
        assert session.facts.name == "toy"
        assert session.facts.reference == "tests/toys.py:workload"
        assert isinstance(session.visit(visit(8)), Reading)
        assert session.visit(visit(8192)).kind == "out of memory"
        assert isinstance(session.visit(visit(8)), Reading)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("killed_from_32", "host memory", "SIGKILL"),
        ("crashes_from_32", "crash", "SIGSEGV"),
        ("hangs_from_32", "hang", "no word for 3 s"),
    ],
)
def test_a_lost_worker_is_replaced_and_the_size_rejected(name, kind, message):
    with worker_session(order(name), visit_limit_seconds=3) as session:
        lost = session.visit(visit(32))
        assert isinstance(lost, Rejection)
        assert lost.kind == kind
        assert message in lost.message
        assert isinstance(session.visit(visit(8)), Reading)
        with pytest.raises(DeviceError, match="micro-batch of 32"):
            session.visit(visit(32))


def test_a_worker_that_dies_at_one_sample_is_an_error_and_not_a_size():
    with worker_session(order("exits_always"), visit_limit_seconds=60) as session:
        with pytest.raises(DeviceError, match="exited with code 7"):
            session.visit(visit(1))


def test_no_process_is_left_behind():
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with worker_session(order(), visit_limit_seconds=60) as session:
        session.visit(visit(8))
        assert {p.pid for p in psutil.Process().children(recursive=True)} - before
    time.sleep(0.1)
    assert {p.pid for p in psutil.Process().children(recursive=True)} == before


def test_the_users_bug_is_shown_with_their_own_traceback():
    with worker_session(order("shape_bug"), visit_limit_seconds=60) as session:
        with pytest.raises(UserCodeError, match="RuntimeError: mat1 and mat2") as caught:
            session.visit(visit(2))
    lines = caught.value.traceback_text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "toys.py" in lines[1]
    assert lines[-1].startswith("RuntimeError: mat1 and mat2")


def test_contract_faults_cross_the_process():
    with worker_session(order("nan_loss"), visit_limit_seconds=60) as session:
        with pytest.raises(WorkloadError, match="loss is nan"):
            session.visit(visit(2))


@pytest.mark.parametrize(
    ("name", "file", "error", "message"),
    [
        ("missing", "tests/toys.py", UsageError, "has no 'missing'"),
        ("workload", "tests/absent.py", UsageError, "there is no file tests/absent.py"),
        ("workload", "absent_module", UsageError, "there is no module 'absent_module'"),
        ("not_a_workload", "tests/toys.py", WorkloadError, "it is a int"),
    ],
)
def test_a_workload_that_cannot_be_loaded_says_why(name, file, error, message):
    with pytest.raises(error, match=message), worker_session(order(name, file=file), visit_limit_seconds=60):
        pass


def test_a_file_that_raises_on_import_shows_its_own_traceback(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\nraise ValueError('my own mistake')\n")
    with pytest.raises(UserCodeError, match="ValueError: my own mistake") as caught:
        with worker_session(order(file=str(broken)), visit_limit_seconds=60):
            pass
    assert "broken.py" in caught.value.traceback_text


def test_what_the_users_code_prints_does_not_reach_stdout(capfd):
    with worker_session(order("noisy"), visit_limit_seconds=60) as session:
        session.visit(visit(2))
    printed = capfd.readouterr()
    assert "printed by the user's code" not in printed.out


def test_the_parent_never_imports_torch():
    code = (
        "import sys\n"
        "from autobatch.devices.worker import Order, worker_session\n"
        "order = Order(device='cpu', reference='tests/toys.py:workload', budget_bytes=1 << 30, seed=0)\n"
        "with worker_session(order, visit_limit_seconds=60) as session:\n"
        "    assert session.facts.name == 'toy'\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_worker_with_torch_loaded_takes_what_the_cpu_reserves_for_it():
    before = {p.pid for p in psutil.Process().children()}
    with worker_session(order(), visit_limit_seconds=60):
        (worker,) = [p for p in psutil.Process().children() if p.pid not in before]
        resident = worker.memory_info().rss
    assert 0.25 * WORKER_BYTES < resident <= WORKER_BYTES
