import gc

import psutil
import pytest
import torch

from autobatch.devices.cpu import CpuBackend, CpuDevice, cpu_info, storage_ledger
from autobatch.devices.session import opened
from autobatch.errors import WorkloadError
from autobatch.records import Reading, Rejection, Visit
from tests import toys

GIB = 1 << 30


def visit(size, *, accumulation=2, mode="none", timed=2):
    return Visit(checkpointing=mode, micro_batches=(size,) * timed, memory_accumulation=accumulation)


def peak(workload, size, *, budget=GIB, **options):
    with opened(workload, CpuBackend(budget), seed=0) as session:
        outcome = session.visit(visit(size, **options))
    assert isinstance(outcome, Reading)
    return outcome.peak_allocated_bytes


def test_the_ledger_counts_live_storages_exactly():
    held = torch.zeros(1000)
    with storage_ledger(GIB, [held]) as ledger:
        a = torch.ones(500)
        view = a[:10]
        assert ledger.live_bytes == 4 * 1500
        del a
        assert ledger.live_bytes == 4 * 1500  # the view keeps the storage
        del view
        gc.collect()
        assert ledger.live_bytes == 4 * 1000
        assert ledger.peak_bytes == 4 * 1500


def test_the_ledger_raises_torchs_own_out_of_memory_error_at_the_budget():
    with storage_ledger(4000, []), pytest.raises(torch.OutOfMemoryError, match="budget is 3.91 KiB"):
        torch.zeros(1001)


def test_the_wall_holds_in_the_backward_pass():
    x = torch.randn(100, 100, requires_grad=True)
    forward_bytes = 100 * 100 * 4
    with storage_ledger(2 * forward_bytes + 100, [x]), pytest.raises(torch.OutOfMemoryError):
        (x * x).sum().backward()


def test_the_peak_holds_weights_gradients_optimizer_state_and_activations():
    parameters = sum(p.numel() for p in toys.Toy().parameters())
    small, large = peak(toys.toy(), 2), peak(toys.toy(), 512)
    assert small >= 4 * 4 * parameters  # weights, gradients and AdamW's two moments
    per_sample = (peak(toys.toy(), 1024) - large) / 512
    assert large == pytest.approx(4 * 4 * parameters + 512 * per_sample, rel=0.05)


def test_accumulation_keeps_gradients_alive_during_the_second_forward():
    parameters = sum(p.numel() for p in toys.Toy().parameters())
    assert peak(toys.toy(), 4096) - peak(toys.toy(), 4096, accumulation=1) == pytest.approx(4 * parameters, rel=0.01)


def test_checkpointing_lowers_the_peak():
    assert peak(toys.toy(), 4096, mode="full") < 0.8 * peak(toys.toy(), 4096)


def test_sgd_needs_less_than_adam():
    sgd = toys.toy(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    assert peak(sgd, 2) < peak(toys.toy(), 2)


def test_a_session_goes_on_after_an_out_of_memory():
    with opened(toys.toy(), CpuBackend(4 << 20), seed=0) as session:
        before = session.visit(visit(16))
        full = session.visit(visit(8192))
        after = session.visit(visit(16))
    assert isinstance(full, Rejection)
    assert full.kind == "out of memory"
    assert "budget is 4.00 MiB" in full.message
    assert after.peak_allocated_bytes == before.peak_allocated_bytes


def test_the_same_size_has_the_same_peak_before_and_after_other_sizes():
    with opened(toys.toy(), CpuBackend(GIB), seed=0) as session:
        session.visit(visit(16))
        first = session.visit(visit(64)).peak_allocated_bytes
        session.visit(visit(512))
        assert session.visit(visit(64)).peak_allocated_bytes == first


def test_a_visit_reads_one_duration_a_micro_step_and_one_for_the_optimizer():
    with opened(toys.toy(), CpuBackend(GIB), seed=0) as session:
        reading = session.visit(Visit(checkpointing="none", micro_batches=(8, 8, 7)))
    assert len(reading.micro_step_seconds) == 3
    assert min(reading.micro_step_seconds) > 0
    assert reading.seconds > sum(reading.micro_step_seconds) + reading.optimizer_step_seconds
    assert reading.peak_allocated_bytes is None


def test_the_wall_is_met_with_the_largest_batch_and_the_clock_with_the_typical_one():
    seen = []

    def recorded(name):
        def make(samples):
            seen.append(name)
            return toys.batch(samples)

        return make

    workload = toys.toy(batch=recorded("largest"), typical_batch=recorded("typical"))
    with opened(workload, CpuBackend(GIB), seed=0) as session:
        session.visit(visit(8))
        seen.clear()
        session.visit(visit(8))
        assert seen == ["largest", "typical"]
        seen.clear()
        session.visit(visit(8, accumulation=0))
        assert seen == ["typical"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precisions_train(precision):
    with opened(toys.toy(precision=precision), CpuBackend(GIB), seed=0) as session:
        assert isinstance(session.visit(visit(8)), Reading)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (toys.vector_loss, r"shape \(2, 1\); it has to be a scalar"),
        (toys.number_loss, "returned a float"),
        (toys.nan_loss, "loss is nan"),
        (toys.constant_batch, "has to grow with the samples"),
    ],
)
def test_a_workload_that_breaks_its_contract_is_told_how(workload, message):
    with opened(workload(), CpuBackend(GIB), seed=0) as session, pytest.raises(WorkloadError, match=message):
        session.visit(visit(2))


def test_a_bug_in_the_users_model_comes_through_as_it_is():
    with (
        opened(toys.shape_bug(), CpuBackend(GIB), seed=0) as session,
        pytest.raises(RuntimeError, match="mat1 and mat2"),
    ):
        session.visit(visit(2))


def test_the_cpu_says_what_the_machine_and_its_cgroup_leave():
    info = cpu_info()
    assert 0 < info.available_bytes < info.capacity_bytes <= psutil.virtual_memory().total
    assert info.kind == "cpu"
    assert info.versions["torch"].startswith("2.")
    assert CpuDevice(visit_limit_seconds=1).info.name == info.name
