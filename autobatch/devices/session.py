"""A workload open in this process: builds it once, keeps it warm, and runs visits on a backend."""

from __future__ import annotations

import gc
import math
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from autobatch.checkpointing import checkpointed, refusal
from autobatch.devices.failures import rejection_kind
from autobatch.devices.preserve import objects_preserved, rng_preserved
from autobatch.devices.step import Trainee, micro_step, optimizer_step
from autobatch.errors import WorkloadError
from autobatch.records import CHECKPOINTING_MODES, Reading, Rejection, WorkloadFacts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from autobatch.records import Outcome, Visit
    from autobatch.workload import Workload


@dataclass(slots=True)
class Peaks:
    """What a backend's memory wall saw; filled when its context ends."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    counters: dict[str, int] = field(default_factory=dict)


class Backend(Protocol):
    """What differs between kinds of hardware when a visit is run in this process."""

    @property
    def torch_device(self) -> torch.device: ...

    def wall(self, held: list[Tensor]) -> AbstractContextManager[Peaks]:
        """Enforce the budget on what is allocated inside, `held` included; torch.OutOfMemoryError beyond it."""
        ...

    def seconds_now(self) -> float:
        """A clock that has waited for all work queued on the device."""
        ...


class TorchSession:
    """Implements Session on a backend. The model and optimizer are built once; checkpointing is put on and off."""

    def __init__(self, workload: Workload, backend: Backend, *, reference: str | None) -> None:
        self._workload = workload
        self._backend = backend
        model = workload.model().to(backend.torch_device)
        self._trainee = Trainee(
            model=model,
            optimizer=workload.optimizer(model.parameters()),
            loss=workload.loss,
            precision=workload.precision,
            clip_norm=workload.clip_norm,
            scaler=workload.scaler,
            device_type=backend.torch_device.type,
        )
        self._blocks = workload.blocks(model) if workload.blocks else None
        self._checked = False
        self.facts = _facts(workload, model, self._blocks, reference)

    def preserved(self) -> AbstractContextManager[None]:
        """Keep the live objects as they are now for as long as the context lasts."""
        return objects_preserved(self._trainee.model, self._trainee.optimizer, self._trainee.scaler)

    def visit(self, visit: Visit, /) -> Outcome:
        """Run the visit; the user's own exceptions come through as they are."""
        start = perf_counter()
        try:
            return self._run(visit, start)
        except (RuntimeError, MemoryError, ValueError) as error:
            kind = rejection_kind(error)
            if kind is None:
                raise
            message = str(error).splitlines()[0]
        # Outside the except block: inside it the traceback keeps the tensors of the failed step alive.
        self._recover()
        return Rejection(kind=kind, message=message, seconds=perf_counter() - start)

    def _run(self, visit: Visit, start: float) -> Reading:
        self._trainee.model.train()
        with checkpointed(self._trainee.model, visit.checkpointing, self._blocks):
            if not self._checked:
                self._check_batches()
            peaks = self._memory_pass(visit) if visit.memory_accumulation else Peaks()
            micro_step_seconds, optimizer_step_seconds = self._timed_pass(visit)
        return Reading(
            micro_step_seconds=micro_step_seconds,
            optimizer_step_seconds=optimizer_step_seconds,
            seconds=perf_counter() - start,
            peak_allocated_bytes=peaks.allocated_bytes,
            peak_reserved_bytes=peaks.reserved_bytes,
            counters=peaks.counters,
        )

    def _memory_pass(self, visit: Visit) -> Peaks:
        """Two optimizer steps: the optimizer's state appears in the first, and is there in the second."""
        size, accumulation = visit.micro_batches[0], visit.memory_accumulation
        batch = self._batch(size)
        with self._backend.wall(self._held(batch)) as peaks:
            for _ in range(2):
                for _ in range(accumulation):
                    loss = micro_step(self._trainee, batch, share=1 / accumulation)
                self._check_finite(loss)
                optimizer_step(self._trainee)
        return peaks

    def _timed_pass(self, visit: Visit) -> tuple[tuple[float, ...], float]:
        make = self._workload.typical_batch or self._workload.batch
        batches = {size: self._on_device(make(size)) for size in set(visit.micro_batches)}
        now = self._backend.seconds_now
        share = 1 / (1 + len(visit.micro_batches))
        loss = micro_step(self._trainee, batches[visit.micro_batches[0]], share=share)
        marks = [now()]
        for size in visit.micro_batches:
            loss = micro_step(self._trainee, batches[size], share=share)
            marks.append(now())
        optimizer_step(self._trainee)
        marks.append(now())
        self._check_finite(loss)
        durations = [later - earlier for earlier, later in pairwise(marks)]
        return tuple(durations[:-1]), durations[-1]

    def _batch(self, samples: int) -> Any:
        return self._on_device(self._workload.batch(samples))

    def _on_device(self, batch: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.to(self._backend.torch_device), batch)

    def _held(self, batch: Any) -> list[Tensor]:
        """The tensors that are there before a step begins: weights, gradients, optimizer state, the batch."""
        model, optimizer = self._trainee.model, self._trainee.optimizer
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        leaves = tree_leaves([list(optimizer.state.values()), batch])
        state = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return [*parameters, *model.buffers(), *gradients, *state]

    def _check_batches(self) -> None:
        """A batch maker that ignores how many samples it is asked for would make every answer wrong."""
        one, two = (_num_elements(self._workload.batch(samples)) for samples in (1, 2))
        if two <= one:
            raise WorkloadError(
                f"the workload's batch(1) and batch(2) hold {one} and {two} tensor elements; a batch has to grow with "
                "the samples asked for; make batch(samples) return that many samples"
            )
        self._checked = True

    def _check_finite(self, loss: Tensor) -> None:
        if not math.isfinite(loss.item()) and self._trainee.scaler is None:
            raise WorkloadError(
                f"the workload's loss is {loss.item()} in precision {self._workload.precision}; it has to be finite; "
                "check the data, the learning rate and the precision"
            )

    def _recover(self) -> None:
        """Leave nothing of a failed step behind."""
        self._trainee.optimizer.zero_grad(set_to_none=True)
        gc.collect()


def _num_elements(batch: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _facts(
    workload: Workload, model: nn.Module, blocks: list[nn.Module] | None, reference: str | None
) -> WorkloadFacts:
    refused: dict[str, str] = {mode: reason for mode in CHECKPOINTING_MODES if (reason := refusal(model, mode, blocks))}
    return WorkloadFacts(
        name=workload.name,
        reference=reference,
        num_parameters=sum(p.numel() for p in model.parameters()),
        precision=workload.precision,
        unit="samples" if workload.tokens_per_sample is None else "tokens",
        units_per_sample=_units_per_sample(workload),
        clip_norm=workload.clip_norm,
        dataset_size=workload.dataset_size,
        refused=refused,
    )


def _units_per_sample(workload: Workload) -> float:
    if workload.tokens_per_sample is None:
        return 1.0
    if isinstance(workload.tokens_per_sample, int):
        return float(workload.tokens_per_sample)
    samples = 32
    make = workload.typical_batch or workload.batch
    return workload.tokens_per_sample(make(samples)) / samples


@contextmanager
def opened(workload: Workload, backend: Backend, *, seed: int, reference: str | None = None) -> Iterator[TorchSession]:
    """Open a workload in this process, seeded; RNG streams and live objects are given back as they were."""
    with ExitStack() as stack:
        stack.enter_context(rng_preserved())
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 -- the legacy stream is what users' code draws from
        torch.manual_seed(seed)
        session = TorchSession(workload, backend, reference=reference)
        if workload.live:
            stack.enter_context(session.preserved())
        yield session
