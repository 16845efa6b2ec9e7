"""The rules by which other tools find the largest batch that fits, on a plain `fits(micro_batch) -> bool`.

Written anew from reading their sources (the versions are named), and only the rule: what they do to the model, and
what they leave behind after an out-of-memory, is another matter. Each returns its answer and what it tried, in order.
Lightning's `batch_size >= len(dataset)` check is left out: it has a data set large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Fits = Callable[[int], bool]

LIGHTNING_FIRST = 2
LIGHTNING_MAX_TRIALS = 25
LIGHTNING_MARGIN = 0.05
LIGHTNING_MAX_SIZE = 8192
ACCELERATE_FIRST = 128
TRAINER_FIRST = 8  # TrainingArguments.per_device_train_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a finder answers, and what it tried for it."""

    answer: int  # 0: it gave up
    tried: tuple[tuple[int, bool], ...]  # (micro-batch, whether it fitted), in order

    @property
    def num_attempts(self) -> int:
        return len(self.tried)

    @property
    def num_out_of_memory(self) -> int:
        return sum(not fitted for _, fitted in self.tried)


@dataclass(slots=True)
class _Log:
    fits: Fits
    tried: list[tuple[int, bool]] = field(default_factory=list)

    def __call__(self, micro_batch: int) -> bool:
        fitted = self.fits(micro_batch)
        self.tried.append((micro_batch, fitted))
        return fitted

    def finding(self, answer: int) -> Finding:
        return Finding(answer=answer, tried=tuple(self.tried))


def lightning_power(fits: Fits) -> Finding:
    """`Tuner.scale_batch_size(mode="power")`, pytorch-lightning 2.6.6, tuner/batch_size_scaling.py.

    Doubles from 2 until a size fails, then halves once; before the first success a failure halves and goes on. A size
    of 0 it would hand to the data loader, which raises: counted as giving up.
    """
    log = _Log(fits)
    size, any_success = LIGHTNING_FIRST, False
    for trial in range(LIGHTNING_MAX_TRIALS):
        if size >= LIGHTNING_MAX_SIZE or size == 0:
            break
        if log(size):
            any_success = True
            if trial + 1 < LIGHTNING_MAX_TRIALS:
                size = min(2 * size, LIGHTNING_MAX_SIZE)
        else:
            size //= 2
            if any_success:
                break
    return log.finding(size)


def lightning_binsearch(fits: Fits) -> Finding:
    """`Tuner.scale_batch_size(mode="binsearch")`, same file: doubling, bisection, then 5 % off the answer.

    Where 2 fails it answers 1, which it has not tried.
    """
    return _binsearch(_Log(fits), margin=LIGHTNING_MARGIN, max_size=LIGHTNING_MAX_SIZE, try_max_size=False)


def binsearch_told_the_bound(fits: Fits, bound: int) -> Finding:
    """The same rule as its authors would want it here: told the bound, which it tries, and with no margin.

    As shipped, Lightning stops before it tries its `max_val`, and so returns a size that never ran.
    """
    return _binsearch(_Log(fits), margin=0.0, max_size=bound, try_max_size=True)


def _binsearch(log: _Log, *, margin: float, max_size: int, try_max_size: bool) -> Finding:
    size, low, high, num_fitted = min(LIGHTNING_FIRST, max_size), 1, 0, 0
    while size < max_size or try_max_size:
        if log(size):
            num_fitted += 1
            low = size
            if num_fitted >= LIGHTNING_MAX_TRIALS or size == max_size or (high and high - low <= 1):
                break
            size = (high + low) // 2 if high else min(2 * size, max_size)
        else:
            high = size
            size = (high + low) // 2
            if high - low <= 1:
                break
    return log.finding(max(1, int(size * (1 - margin))))


def accelerate(fits: Fits, first: int = ACCELERATE_FIRST) -> Finding:
    """`find_executable_batch_size`, accelerate 1.15.0, utils/memory.py: int(0.9 * size) until one fits, never up."""
    log = _Log(fits)
    size = first
    while size and not log(size):
        size = int(size * 0.9)
    return log.finding(size)


def trainer(fits: Fits) -> Finding:
    """Hugging Face's `TrainingArguments(auto_find_batch_size=True)`, transformers 5.24.0: Accelerate's rule from 8."""
    return accelerate(fits, TRAINER_FIRST)
