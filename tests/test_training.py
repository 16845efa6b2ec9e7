from types import SimpleNamespace

import pytest
import torch

from autobatch import TrainingStep, WorkloadError
from autobatch.devices.step import Trainee, train_step
from autobatch.training import num_samples, split_batch
from tests import toys


def plan(*sizes):
    return SimpleNamespace(micro_batches=sizes)


def model_and_optimizer():
    torch.manual_seed(0)
    model = toys.Toy().double()
    for block in model.blocks:
        block[3].p = 0.0  # no dropout: splits draw other random streams
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def tokens():
    """Sequences with unequal numbers of targets: -100 is ignored."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, toys.WIDTH, dtype=torch.float64, generator=generator)
    y = torch.randn(12, 1, dtype=torch.float64, generator=generator)
    y[[1, 2, 3, 7]] = -100
    return x, y


def masked_loss(model, batch):
    x, y = batch
    kept = y != -100
    return (model(x) - y)[kept].square().mean()


def count(batch):
    return (batch[1] != -100).sum().item()


def trained(sizes, *, weight):
    model, optimizer = model_and_optimizer()
    step = TrainingStep(plan(*sizes), model, optimizer, masked_loss, weight=weight, clip_norm=0.5)
    result = step(tokens())
    return result, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("sizes", [(6, 6), (4, 4, 4), (5, 4, 3), (7, 5)])
def test_any_split_trains_as_the_whole_batch_when_weighted_by_its_targets(sizes):
    whole, expected = trained((12,), weight=count)
    split, weights = trained(sizes, weight=count)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
    assert split.loss == pytest.approx(whole.loss)
    assert split.samples == 12


def test_a_mean_of_means_trains_otherwise_on_unequal_targets():
    _, expected = trained((12,), weight=count)
    _, weights = trained((4, 4, 4), weight=None)
    assert not torch.allclose(weights, expected, rtol=1e-6)


def test_a_ragged_last_batch_is_cut_no_larger_than_the_plan():
    seen = []

    def loss(model, batch):
        seen.append(len(batch[0]))
        return masked_loss(model, batch)

    model, optimizer = model_and_optimizer()
    step = TrainingStep(plan(5, 5), model, optimizer, loss, weight=count)
    x, y = tokens()
    assert step((x, y)).samples == 12
    assert seen == [4, 4, 4]


def test_tensors_without_the_sample_dimension_go_to_every_piece():
    pieces = split_batch({"x": torch.arange(6), "scale": torch.tensor(2.0)}, [4, 2])
    assert [p["x"].tolist() for p in pieces] == [[0, 1, 2, 3], [4, 5]]
    assert all(p["scale"] == 2.0 for p in pieces)


def test_a_batch_without_tensors_is_refused():
    with pytest.raises(WorkloadError, match="a pytree of tensors with the samples first"):
        num_samples({"x": 3})


def test_gradients_are_zeroed_and_clipped():
    model, optimizer = model_and_optimizer()
    before = [p.detach().clone() for p in model.parameters()]
    TrainingStep(plan(12), model, optimizer, masked_loss, clip_norm=1e-3)(tokens())
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(0.1 * 1e-3, rel=1e-2)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_near_full(precision):
    def loss_after(precision):
        torch.manual_seed(0)
        model = toys.Toy()
        trainee = Trainee(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=toys.loss, precision=precision
        )
        torch.manual_seed(1)
        batch = toys.batch(64)
        return [train_step(trainee, [batch], [64.0]) for _ in range(5)][-1]

    assert loss_after(precision) == pytest.approx(loss_after("fp32"), rel=0.1)
