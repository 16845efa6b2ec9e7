from __future__ import annotations

import pytest
import torch

from autobatch.checkpointing import find_blocks
from autobatch.devices.step import Trainee, train_step
from autobatch.workloads import load_embedded
from autobatch.workloads.cnn import NUM_CLASSES, Cnn, gratings, orientation_loss


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other crawl where other programs share the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_it_is_a_small_network_of_nine_blocks_with_batch_norm():
    model = Cnn()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(0.27, rel=0.01)
    assert find_blocks(model) == list(model.blocks)
    assert sum(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()) == 19


def test_speed_is_counted_in_samples():
    workload = load_embedded("cnn", "cpu")
    assert workload.tokens_per_sample is None
    assert workload.weight is None


def test_a_batch_is_seeded_images_with_labels():
    torch.manual_seed(3)
    images, labels = gratings(200)
    assert images.shape == (200, 3, 32, 32)
    assert set(labels.tolist()) == set(range(NUM_CLASSES))
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(gratings(200), (images, labels), strict=True))


def test_no_pixel_tells_the_class_alone():
    torch.manual_seed(0)
    images, labels = gratings(2000)
    means = torch.stack([images[labels == label].mean(0) for label in range(NUM_CLASSES)])
    assert means.abs().max() < 0.5


def test_an_untrained_model_is_no_better_than_guessing():
    torch.manual_seed(0)
    assert orientation_loss(Cnn(), gratings(64)).item() > 2.0


def test_the_loss_falls_when_it_is_trained():
    torch.manual_seed(0)
    workload = load_embedded("cnn", "cpu")
    model = workload.model()
    trainee = Trainee(model=model, optimizer=workload.optimizer(model.parameters()), loss=workload.loss)
    losses = [train_step(trainee, [workload.batch(24)], [24.0]) for _ in range(40)]
    assert losses[0] > 2.0
    assert sum(losses[-5:]) / 5 < 1.6
