"""Activation checkpointing, none / selective / full, put on the blocks of any live nn.Module and taken off again.

`full` keeps a block's inputs and runs the block again in backward. `selective` also keeps the results of matrix
products, convolutions and attention, so that only the cheap operations between them run again. Gradients and buffers
come out as without checkpointing: the random streams and the buffers that a block's forward changes (BatchNorm's
running statistics) are set back for the second run, and that run's changes to them are dropped.

Known limitations: what a forward changes in Python attributes, or in buffers that its first call leaves alone, is
changed twice; a block that fills a key-value cache must have the cache turned off.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from autobatch.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from autobatch.records import Checkpointing

KEPT_OPERATIONS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",  # one operation on MPS; made of mm and addmm elsewhere
        "convolution",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math_for_mps",
    )
    if hasattr(torch.ops.aten, name)  # torch adds and renames the private ones
)
"""What `selective` keeps: costly to run again for the bytes of the result."""

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, in its order; empty where there are none.

    The longest ModuleList or Sequential of modules of one class, at least 2, says what a block is; the modules of
    other containers of that same class alone are blocks too (the stages of a ResNet, encoder and decoder). Blocks
    inside a block are left out. A mixture of more experts than layers has its experts found: name its layers in
    `Workload.blocks`.
    """
    rows = [row for module in model.modules() if (row := _row(module))]
    longest = max(rows, key=len, default=[])
    if len(longest) < 2:
        return []
    kind = type(longest[0])
    return _outermost(block for row in rows if type(row[0]) is kind for block in row)


def refusal(model: nn.Module, mode: Checkpointing, blocks: Sequence[nn.Module] | None = None) -> str | None:
    """Why the mode cannot be put on the model; None when it can. `blocks` None: found."""
    if mode == "none" or blocks or (blocks is None and find_blocks(model)):
        return None
    found = (
        "has no ModuleList or Sequential of two or more modules of one class"
        if blocks is None
        else "names no blocks of its own"
    )
    return (
        f"checkpointing {mode!r} asked; {type(model).__name__} {found}; "
        "name the modules to checkpoint in Workload.blocks"
    )


@contextmanager
def checkpointed(model: nn.Module, mode: Checkpointing, blocks: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Checkpoint the model's blocks for as long as the context lasts; `blocks` None: found.

    Modules are left as they were. What ran inside may be taken backward after the context has ended.

    Raises WorkloadError when there are no blocks to checkpoint.
    """
    if reason := refusal(model, mode, blocks):
        raise WorkloadError(reason)
    with ExitStack() as stack:
        if mode != "none":
            for block in dict.fromkeys(blocks or find_blocks(model)):
                forward = _CheckpointedForward(block, selective=mode == "selective")
                stack.enter_context(_forward_replaced(block, forward))
        yield


def _row(module: nn.Module) -> list[nn.Module]:
    """The modules of a container that holds one class of modules with a forward, else nothing."""
    children = list(module) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
    same = len({type(child) for child in children}) == 1 and not isinstance(children[0], _WITHOUT_FORWARD)
    return children if same else []


def _outermost(blocks: Iterator[nn.Module]) -> list[nn.Module]:
    unique = list(dict.fromkeys(blocks))
    inner = {module for block in unique for module in block.modules() if module is not block}
    return [block for block in unique if block not in inner]


@contextmanager
def _forward_replaced(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Shadow the class's forward in the instance, or an own forward that the instance already has."""
    attributes = vars(block)
    own = {"forward": attributes["forward"]} if "forward" in attributes else {}
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(own)


class _CheckpointedForward:
    """A block's forward, checkpointed where a backward may follow: in training mode with gradients enabled."""

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        self._block = block
        self._forward = block.forward
        self._selective = selective
        self._changing: list[_Buffer] | None = None  # buffers that a forward changes; None: no forward has run yet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self._block.training):
            return self._forward(*args, **kwargs)
        watched = _buffers(self._block) if self._changing is None else self._changing
        before = [(buffer, buffer.get().detach().clone()) for buffer in watched]
        result = self._checkpointed(before, args, kwargs)
        if self._changing is None:
            before[:] = [(buffer, value) for buffer, value in before if not torch.equal(buffer.get(), value)]
            self._changing = [buffer for buffer, _ in before]
        return result

    def _checkpointed(self, before: list[tuple[_Buffer, Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = _Kept()
        runs = kept.modes() if self._selective else (nullcontext(), nullcontext())
        result = checkpoint(
            partial(self._forward, **kwargs),
            *args,
            use_reentrant=False,
            context_fn=lambda: (runs[0], _SecondRun(before, runs[1])),
        )
        kept.let_go_of(result)
        return result


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Where a buffer lives: the module's slot, so that a value can stand in for the buffer itself."""

    slots: dict[str, Tensor | None]
    name: str

    def get(self) -> Tensor:
        tensor = self.slots[self.name]
        assert tensor is not None
        return tensor


def _buffers(block: nn.Module) -> list[_Buffer]:
    return [
        _Buffer(module._buffers, name)  # noqa: SLF001 -- the slot itself; register_buffer would lose persistence
        for module in block.modules()
        for name, tensor in module._buffers.items()  # noqa: SLF001
        if tensor is not None
    ]


class _SecondRun:
    """Around the run in backward: copies of the buffers as the first run met them stand in for the buffers.

    Stand-ins, since writing old values into the buffers would change tensors that the graph has saved. May be entered
    again, as a second backward through the same graph does.
    """

    def __init__(self, before: list[tuple[_Buffer, Tensor]], mode: AbstractContextManager[Any]) -> None:
        self._before = before
        self._mode = mode
        self._now: list[tuple[_Buffer, Tensor]] = []

    def __enter__(self) -> None:
        copies = [(buffer, value.clone()) for buffer, value in self._before]  # all, before any takes its place
        self._now = [(buffer, buffer.get()) for buffer, _ in self._before]
        for buffer, copy in copies:
            buffer.slots[buffer.name] = copy
        self._mode.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, traceback)
        for buffer, tensor in self._now:
            buffer.slots[buffer.name] = tensor


class _Kept:
    """The results of kept operations in the order they ran; None in place of one that has to run again.

    torch's `create_selective_checkpoint_contexts` raises where a kept result is changed in place afterwards and where
    autocast casts a weight in one block and finds it cached in another, and it gives wrong gradients after attention
    with dropout, whose random numbers it does not draw again. This does not.
    """

    def __init__(self) -> None:
        self._results: deque[Any] = deque()

    def modes(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Around the first run, and around the second."""
        return _Through(self._first_run), _Through(self._second_run)

    def let_go_of(self, output: Any) -> None:
        """Forget what left the block, where it may be written to unseen; as the last result, nothing needs it."""
        storages = _storages(output)
        self._results = deque(None if storages & _storages(result) else result for result in self._results)

    def _first_run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.is_mutable:  # noqa: SLF001 -- the only place torch says so
            self._copy_before_write(_written(func, args, kwargs))
        result = func(*args, **kwargs)
        if _is_kept(func, args, kwargs):
            self._results.append(tree_map_only(Tensor, torch.detach, result))
        return result

    def _second_run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._give() if _is_kept(func, args, kwargs) else None
        return func(*args, **kwargs) if result is None else result

    def _give(self) -> Any:
        if not self._results:
            raise WorkloadError(
                "checkpointing 'selective' asked; a block ran other operations in backward than in forward, or was "
                "taken backward twice; make its forward the same each time, or ask for none or full"
            )
        return self._results.popleft()

    def _copy_before_write(self, written: list[Any]) -> None:
        """Part from tensors about to be written in place, as SiLU(inplace=True) after a convolution does."""
        storages = _storages(written)
        self._results = deque(
            tree_map_only(Tensor, torch.clone, result) if storages & _storages(result) else result
            for result in self._results
        )


class _Through(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Runs every operation through a function of (operation, args, kwargs)."""

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._run(func, args, kwargs or {})


def _storages(tree: Any) -> set[int]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {tensor.untyped_storage()._cdata for tensor in tensors}  # noqa: SLF001 -- a storage's identity


def _is_kept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention with dropout runs again: it has to draw its random numbers, so that those after it are the same."""
    return func in KEPT_OPERATIONS and not dict(_named(func, args, kwargs)).get("dropout_p")


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    written = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}  # noqa: SLF001
    return [value for name, value in _named(func, args, kwargs) if name in written]


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from zip((argument.name for argument in func._schema.arguments), args, strict=False)  # noqa: SLF001
    yield from kwargs.items()
