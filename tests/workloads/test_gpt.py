from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from autobatch.checkpointing import find_blocks
from autobatch.devices.step import Trainee, train_step
from autobatch.errors import UsageError
from autobatch.workloads import EMBEDDED, embedded_names, load_embedded
from autobatch.workloads.gpt import SHAPES, Gpt, next_byte_loss, text, windows


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other crawl where other programs share the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_the_names_are_read_without_importing_torch():
    code = "import sys, autobatch.workloads as w; print(*w.embedded_names()); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert tuple(result.stdout.split()) == embedded_names() == tuple(EMBEDDED)


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_name_loads(name):
    workload = load_embedded(name, "cpu")
    assert workload.name == ("gpt-nano" if name == "gpt" else name)


@pytest.mark.parametrize(("kind", "name"), [("cpu", "gpt-nano"), ("cuda", "gpt-small"), ("virtual", "gpt-small")])
def test_gpt_is_the_size_that_suits_the_device(kind, name):
    assert load_embedded("gpt", kind).name == name


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match=r"workload 'gtp' asked; the embedded ones are gpt, .*, cnn; name one of them"):
        load_embedded("gtp", "cpu")


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt-nano", 0.834), ("gpt-mini", 10.84), ("gpt-small", 124.5), ("gpt-medium", 354.9)]
)
def test_each_size_has_the_parameters_it_says(name, millions):
    with torch.device("meta"):
        model = Gpt(SHAPES[name])
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.002)
    assert find_blocks(model) == list(model.blocks)


def test_the_text_is_english():
    words = bytes(text().tolist()).decode().split()
    assert words.count("the") > 1000
    assert len(words) > 50_000


def test_a_batch_is_windows_of_the_text_and_is_seeded():
    torch.manual_seed(3)
    batch = windows(64, 5)
    assert batch.shape == (5, 65)
    assert batch.dtype == torch.int64
    assert bytes(batch[4].tolist()) in bytes(text().tolist())
    torch.manual_seed(3)
    assert torch.equal(windows(64, 5), batch)


def test_the_weight_is_the_number_of_bytes_predicted():
    workload = load_embedded("gpt-nano", "cpu")
    assert workload.weight(workload.batch(6)) == 6 * 64
    assert workload.tokens_per_sample == 64


def test_a_byte_is_predicted_from_those_before_it_alone():
    torch.manual_seed(0)
    model = Gpt(SHAPES["gpt-nano"])
    ids = windows(63, 2)
    changed = ids.clone()
    changed[:, 40:] = 7
    assert torch.allclose(model(ids)[:, :40], model(changed)[:, :40], atol=1e-5)
    assert not torch.allclose(model(ids)[:, 40], model(changed)[:, 40], atol=1e-2)


def test_an_untrained_model_is_as_good_as_guessing():
    torch.manual_seed(0)
    loss = next_byte_loss(Gpt(SHAPES["gpt-nano"]), windows(64, 8))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.15)


def test_the_loss_falls_when_it_is_trained():
    torch.manual_seed(0)
    workload = load_embedded("gpt-nano", "cpu")
    model = workload.model()
    trainee = Trainee(
        model=model,
        optimizer=workload.optimizer(model.parameters()),
        loss=workload.loss,
        precision=workload.precision,
        clip_norm=workload.clip_norm,
    )
    losses = [train_step(trainee, [workload.batch(16)], [1.0]) for _ in range(30)]
    assert losses[0] > 5.3
    assert sum(losses[-5:]) / 5 < 3.6
