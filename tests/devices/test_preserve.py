"""Bit for bit: every tensor of an embedded tune's live objects is hashed before and after."""

import hashlib
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

from autobatch import Workload, tune
from autobatch.errors import NothingFits
from tests import toys


def fingerprint(model, optimizer, scaler=None):
    """A hash of weights, buffers, gradients, optimizer state and settings, modes, the scaler and every RNG stream."""

    def raw(value):
        return tree_map_only(
            torch.Tensor, lambda t: (str(t.dtype), tuple(t.shape), t.detach().numpy().tobytes()), value
        )

    parts = {
        "state": raw(dict(model.state_dict(keep_vars=True))),
        "gradients": raw([p.grad for p in model.parameters()]),
        "optimizer": raw(optimizer.state_dict()),
        "scaler": scaler and scaler.state_dict(),
        "modes": [module.training for module in model.modules()],
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    return {name: hashlib.sha256(pickle.dumps(part)).hexdigest() for name, part in parts.items()}


@pytest.fixture
def live():
    """A model in the middle of training: optimizer state, gradients, BatchNorm statistics, mixed modes."""
    torch.manual_seed(7)
    model = toys.Toy(norm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    for _ in range(3):
        optimizer.zero_grad()
        toys.loss(model, toys.batch(16)).backward()
        optimizer.step()
    model.blocks[1].eval()
    return model, optimizer


OPTIONS = {"device": "cpu", "memory_limit": 64 << 20, "time_budget": 60.0}


def test_two_embedded_tunes_leave_everything_bit_identical(live):
    model, optimizer = live
    before = fingerprint(model, optimizer)
    identities = {name: id(p) for name, p in model.named_parameters()}
    workload = Workload.around(model, optimizer, toys.loss, toys.batch, clip_norm=1.0)
    for _ in range(2):
        plan = tune(workload, 32, **OPTIONS)
        assert plan.chosen.candidate.split.target == 32
        assert fingerprint(model, optimizer) == before
    assert {name: id(p) for name, p in model.named_parameters()} == identities


def test_a_fresh_optimizer_is_empty_again():
    model = toys.Toy()
    optimizer = torch.optim.AdamW(model.parameters())
    before = fingerprint(model, optimizer)
    tune(Workload.around(model, optimizer, toys.loss, toys.batch), 8, **OPTIONS)
    assert len(optimizer.state) == 0
    assert fingerprint(model, optimizer) == before


def test_an_out_of_memory_leaves_everything_bit_identical(live):
    model, optimizer = live
    before = fingerprint(model, optimizer)

    def loss(model, data):
        if data[0].size(0) > 8:
            raise torch.OutOfMemoryError("injected")
        return toys.loss(model, data)

    plan = tune(Workload.around(model, optimizer, loss, toys.batch), 32, **OPTIONS)
    assert plan.chosen.candidate.split.micro_batch <= 8
    assert fingerprint(model, optimizer) == before


def test_nothing_fitting_leaves_everything_bit_identical(live):
    model, optimizer = live
    before = fingerprint(model, optimizer)
    with pytest.raises(NothingFits, match="the smallest tried was a micro-batch of 1"):
        tune(Workload.around(model, optimizer, toys.loss, toys.batch), 32, device="cpu", memory_limit=50_000)
    assert fingerprint(model, optimizer) == before


def test_a_user_error_in_the_middle_leaves_everything_bit_identical_and_comes_through(live):
    model, optimizer = live
    before = fingerprint(model, optimizer)
    calls = []

    def loss(model, data):
        calls.append(1)
        if len(calls) == 20:
            raise KeyError("my own mistake")
        return toys.loss(model, data)

    with pytest.raises(KeyError, match="my own mistake"):
        tune(Workload.around(model, optimizer, loss, toys.batch), 32, **OPTIONS)
    assert fingerprint(model, optimizer) == before


def test_a_grad_scaler_is_given_back(live):
    model, optimizer = live
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    before = fingerprint(model, optimizer, scaler)
    workload = Workload.around(model, optimizer, toys.loss, toys.batch, precision="fp16", scaler=scaler)
    tune(workload, 16, **OPTIONS)
    assert fingerprint(model, optimizer, scaler) == before


def test_a_learning_rate_scheduler_goes_on_where_it_was(live):
    model, optimizer = live
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    before, rates = scheduler.state_dict(), scheduler.get_last_lr()
    tune(Workload.around(model, optimizer, toys.loss, toys.batch), 16, **OPTIONS)
    assert scheduler.state_dict() == before
    assert [group["lr"] for group in optimizer.param_groups] == rates
