"""Checkpointing changes memory and time, and nothing else."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- torch's own convention

from autobatch.checkpointing import KEPT_OPERATIONS, _is_kept, checkpointed, find_blocks, refusal
from autobatch.devices.cpu import storage_ledger
from autobatch.errors import WorkloadError

WIDTH = 32


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other crawl where other programs share the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Attention(nn.Module):
    """A block with dropout in two places and a keyword argument."""

    def __init__(self, *, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )
        self.dropout = dropout

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + scale * mixed.transpose(1, 2).flatten(-2)
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, *, dropout: float = 0.2, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Attention(dropout=dropout) for _ in range(depth))
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, scale=self.scale)
        return F.linear(x, self.embedding.weight)  # tied


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Conv(nn.Module):
    def __init__(self, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, momentum=momentum)
        self.gate = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        return x + F.silu(self.gate(x), inplace=True)  # writes over what selective keeps


class Convnet(nn.Module):
    def __init__(self, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            nn.Sequential(*(Conv(momentum=momentum) for _ in range(3))),
            nn.AvgPool2d(2),
            nn.Sequential(*(Conv(momentum=momentum) for _ in range(2))),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stages(x).mean((2, 3))


class Spectral(nn.Module):
    """Its blocks change a buffer in forward, and use what they changed."""

    def __init__(self) -> None:
        super().__init__()
        make = nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(nn.Sequential(make(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SharedWeights(nn.Module):
    """One weight used by all blocks, so that autocast casts it in the first and finds it cached in the others."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Tanh(), first) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Pair(nn.Module):
    """Returns what selective would keep, and goes on to use it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, (y + 1).square()


class WrittenOutside(nn.Module):
    """A block's result is written to after it has left the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            left, right = layer(x)
            x = left.mul_(0.5) + right
        return x


def ids() -> torch.Tensor:
    return torch.randint(50, (8, 24))


def images() -> torch.Tensor:
    return torch.randn(8, 8, 12, 12)


def rows() -> torch.Tensor:
    return torch.randn(8, WIDTH)


MODELS = {
    "a transformer with dropout and tied weights": (Transformer, ids),
    "a transformer without dropout": (partial(Transformer, dropout=0.0), ids),
    "a transformer inside wrappers": (lambda: Wrapper(Wrapper(Transformer())), ids),
    "torch's own encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True), 3, enable_nested_tensor=False
        ),
        lambda: torch.randn(4, 16, WIDTH),
    ),
    "a convnet with batch norm and in-place activations": (Convnet, images),
    "a convnet with cumulative batch norm": (partial(Convnet, momentum=None), images),
    "spectral norm": (Spectral, rows),
    "weights shared by all blocks": (SharedWeights, rows),
    "blocks whose results are written to in place": (WrittenOutside, rows),
}
MODES = ("selective", "full")


@pytest.fixture(params=MODELS)
def model_and_data(request):
    torch.manual_seed(0)
    make, data = MODELS[request.param]
    return make(), data()


def trained_twice(model: nn.Module, data: torch.Tensor, mode: str, *, autocast: bool = False) -> tuple[list, list]:
    """Gradients of two accumulated micro-steps, and the state afterwards, with the random streams' places."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    with checkpointed(model, mode):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(data).float().square().mean()
            loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return gradients, [*model.state_dict().values(), torch.get_rng_state()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_buffers_and_random_streams_are_bit_for_bit_those_without(model_and_data, mode, autocast):
    model, data = model_and_data
    gradients, state = trained_twice(model, data, "none", autocast=autocast)
    checkpointed_gradients, checkpointed_state = trained_twice(model, data, mode, autocast=autocast)
    assert same(gradients, checkpointed_gradients)
    assert same(state, checkpointed_state)


def test_the_gradients_compared_are_of_models_that_use_their_random_numbers_and_buffers():
    torch.manual_seed(0)
    model = Transformer()
    data = ids()
    first, _ = trained_twice(model, data, "none")
    model.eval()
    second, _ = trained_twice(model, data, "none")
    assert not same(first, second)


def peak_bytes(model: nn.Module, data: torch.Tensor, mode: str) -> int:
    with checkpointed(model, mode), storage_ledger(1 << 40, list(model.parameters())) as ledger:
        model(data).square().mean().backward()
    model.zero_grad()
    return ledger.peak_bytes


@pytest.mark.parametrize(("make", "data"), [(partial(Transformer, depth=8), ids), (Convnet, images)])
def test_full_holds_less_memory_than_selective_and_selective_less_than_none(make, data):
    torch.manual_seed(0)
    model, batch = make(), torch.cat([data()] * 8)
    peaks = {mode: [peak_bytes(model, batch, mode) for _ in range(2)][-1] for mode in ("none", *MODES)}
    assert peaks["full"] < 0.85 * peaks["selective"]
    assert peaks["selective"] < 0.85 * peaks["none"]


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[object, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] = self.counts.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def num_kept_operations_run(mode: str) -> int:
    model = Transformer(dropout=0.0)
    with checkpointed(model, mode), Counted() as counted:
        model(ids()).square().mean().backward()
    return sum(count for func, count in counted.counts.items() if func in KEPT_OPERATIONS)


def test_selective_runs_no_matrix_product_or_attention_again_and_full_does():
    assert num_kept_operations_run("selective") == num_kept_operations_run("none") < num_kept_operations_run("full")


def test_attention_with_dropout_is_run_again_so_that_later_random_numbers_are_the_same():
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert _is_kept(flash, (None, None, None), {})
    assert _is_kept(flash, (None, None, None, 0.0, True), {})
    assert not _is_kept(flash, (None, None, None, 0.1, True), {})
    assert not _is_kept(efficient, (None, None, None, None, True), {"dropout_p": 0.1})


@pytest.mark.parametrize("mode", MODES)
def test_leaves_no_trace_in_the_modules(model_and_data, mode):
    model, data = model_and_data
    before = {name: (dict(vars(module)), module._buffers.copy()) for name, module in model.named_modules()}
    parameters = [id(parameter) for parameter in model.parameters()]
    with checkpointed(model, mode):
        model(data).square().mean().backward()
    for name, module in model.named_modules():
        attributes, buffers = before[name]
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[key] is value for key, value in attributes.items())
        assert all(module._buffers[key] is value for key, value in buffers.items())
    assert [id(parameter) for parameter in model.parameters()] == parameters


@pytest.mark.parametrize("mode", MODES)
def test_is_undone_when_the_body_raises(mode):
    model = Transformer()
    with pytest.raises(KeyError), checkpointed(model, mode):
        raise KeyError
    assert all("forward" not in vars(module) for module in model.modules())


def test_gives_back_a_forward_that_the_block_already_had_of_its_own():
    model = Transformer()
    layer = model.layers[1]
    own = partial(layer.forward)
    layer.forward = own
    with checkpointed(model, "full"):
        assert layer.forward is not own
        model(ids()).sum().backward()
    assert layer.forward is own


@pytest.mark.parametrize("mode", MODES)
def test_buffers_are_given_back_when_the_second_run_fails(mode):
    torch.manual_seed(0)
    model = Convnet()
    data = images()
    buffers = list(model.buffers())
    fail = False

    def failing(x):
        if fail:
            raise torch.OutOfMemoryError("injected")
        return type(block).forward(block, x)

    block = model.stages[0][1]
    block.forward = failing
    with checkpointed(model, mode):
        loss = model(data).sum()
        state = [buffer.clone() for buffer in buffers]
        fail = True
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            loss.backward()
    assert all(now is then for now, then in zip(model.buffers(), buffers, strict=True))
    assert same(buffers, state)


@pytest.mark.parametrize("mode", MODES)
def test_backward_may_come_after_the_context_has_ended(mode):
    torch.manual_seed(0)
    model = Transformer()
    data = ids()
    torch.manual_seed(1)
    model(data).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    with checkpointed(model, mode):
        loss = model(data).square().mean()
    loss.backward()
    assert same(expected, [parameter.grad for parameter in model.parameters()])


def test_full_allows_a_second_backward_through_the_same_graph():
    torch.manual_seed(0)
    model = Convnet()
    with checkpointed(model, "full"):
        loss = model(images()).square().mean()
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in model.parameters()]
        loss.backward()
    assert all(
        torch.allclose(2 * gradient, parameter.grad)
        for gradient, parameter in zip(once, model.parameters(), strict=True)
    )


def test_selective_says_so_when_a_graph_is_taken_backward_twice():
    model = Transformer()
    with checkpointed(model, "selective"):
        loss = model(ids()).square().mean()
        loss.backward(retain_graph=True)
        with pytest.raises(WorkloadError, match="taken backward twice"):
            loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_and_no_grad_run_as_they_are(mode):
    torch.manual_seed(0)
    model = Convnet()
    data = images()
    model.eval()
    expected = model(data)
    with checkpointed(model, mode):
        assert torch.equal(model(data), expected)
        model.train()
        with torch.no_grad():
            assert not model(data).requires_grad


def test_finds_the_longest_row_of_one_class_through_wrappers():
    model = Wrapper(Wrapper(Transformer()))
    assert find_blocks(model) == list(model.module.module.layers)


def test_finds_all_stages_of_the_class_of_the_longest_row():
    model = Convnet()
    assert find_blocks(model) == [*model.stages[0], *model.stages[2]]


def test_does_not_find_blocks_inside_blocks():
    outer = nn.Sequential(*(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.ReLU())) for _ in range(3)))
    assert find_blocks(outer) == list(outer)


def test_does_not_take_containers_without_a_forward_for_blocks():
    model = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]) for _ in range(3))
    assert find_blocks(model) == []


@pytest.mark.parametrize("mode", MODES)
def test_refuses_a_model_without_blocks_and_says_why(mode):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    reason = refusal(model, mode)
    assert reason == (
        f"checkpointing '{mode}' asked; Sequential has no ModuleList or Sequential of two or more modules of one "
        "class; name the modules to checkpoint in Workload.blocks"
    )
    with pytest.raises(WorkloadError, match="has no ModuleList"), checkpointed(model, mode):
        raise AssertionError
    assert "names no blocks" in refusal(Transformer(), mode, [])
    assert refusal(model, "none") is None
    assert refusal(Transformer(), mode) is None


def test_checkpoints_the_blocks_named_and_no_others():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with checkpointed(model, "full", [model[0]]):
        assert ["forward" in vars(module) for module in model] == [True, False]
