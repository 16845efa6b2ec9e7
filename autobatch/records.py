"""The nouns, frozen, in the order a run makes them. No behaviour beyond derived properties."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING_MODES: tuple[Checkpointing, ...] = get_args(Checkpointing)

RejectionKind = Literal["out of memory", "host memory", "size limit", "crash", "hang"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a device is, and what it has to give."""

    kind: str  # "cpu", "cuda", "virtual", ...
    name: str
    capacity_bytes: int
    available_bytes: int  # capacity less what others hold
    predicted: bool = False  # True: a virtual device; everything drawn from it is a prediction
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str | int | float] = field(default_factory=dict)  # threads, clocks, allocator settings, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFacts:
    """What a device learned of a workload by opening it."""

    name: str
    reference: str | None  # how to load it again; None for live objects
    num_parameters: int
    precision: str
    unit: Literal["tokens", "samples"]
    units_per_sample: float  # tokens in one sample, as timed; 1.0 when the unit is samples
    clip_norm: float | None
    dataset_size: int | None
    refused: dict[str, str] = field(default_factory=dict)  # checkpointing mode -> why it cannot be applied


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What a session is asked to run from a warm state.

    `micro_batches` are the sizes of the timed micro-steps, run after one discarded micro-step of the first size
    and followed by one timed optimizer step. With `memory_accumulation` = k > 0 the visit starts with two whole
    optimizer steps of k micro-steps of the first size each, run against the memory budget.
    """

    checkpointing: Checkpointing
    micro_batches: tuple[int, ...]
    memory_accumulation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a visit measured, raw."""

    micro_step_seconds: tuple[float, ...]  # one for each of the visit's micro_batches
    optimizer_step_seconds: float  # clip, step, zero_grad
    seconds: float  # the whole visit, warm-up included
    peak_allocated_bytes: int | None = None  # None: this visit did not read memory
    peak_reserved_bytes: int | None = None  # None: the device has no caching allocator
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a visit could not be run. The session stays usable."""

    kind: RejectionKind
    message: str
    seconds: float


Outcome = Reading | Rejection


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedVisit:
    """A visit and what came of it: what a replay device plays back and a stopped run resumes from."""

    visit: Visit
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One micro-batch tried against the memory budget, with the times it took."""

    micro_batch: int
    why_not: str | None = None  # None: it fits
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    micro_step_seconds: tuple[float, ...] = ()
    optimizer_step_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        return self.why_not is None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Peak allocated bytes of a micro-batch of m samples: fixed_bytes + per_sample_bytes * m."""

    fixed_bytes: float
    per_sample_bytes: float
    largest_residual: float  # relative, over the attempts it was fitted on


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The ceiling of one checkpointing mode, and the attempts that show it."""

    checkpointing: Checkpointing
    ceiling: int  # the largest micro-batch that ran inside the budget; 0: none did
    bounded_by: str  # "memory", "target", "dataset", "max-micro-batch", "size limit", "attempts", "time", "refused"
    budget_bytes: int
    attempts: tuple[Attempt, ...] = ()
    memory: MemoryModel | None = None
    refused: str | None = None

    @property
    def num_out_of_memory(self) -> int:
        return sum(not attempt.fits for attempt in self.attempts)

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of a micro-batch below the ceiling, taken to bracket the fastest size."""

    checkpointing: Checkpointing
    micro_batch: int
    micro_step_seconds: tuple[float, ...]
    optimizer_step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a target is cut: replicas, and the micro-batch sizes of one optimizer step on one replica."""

    replicas: int
    micro_batches: tuple[int, ...]

    @property
    def target(self) -> int:
        return self.replicas * sum(self.micro_batches)

    @property
    def samples_per_replica(self) -> int:
        return sum(self.micro_batches)

    @property
    def micro_batch(self) -> int:
        return max(self.micro_batches)

    @property
    def accumulation(self) -> int:
        return len(self.micro_batches)

    @property
    def uniform(self) -> bool:
        return len(set(self.micro_batches)) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What can be raced: a split with a checkpointing mode."""

    split: Split
    checkpointing: Checkpointing


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A candidate's projected whole optimizer steps, one a block of the race, and its peak."""

    candidate: Candidate
    step_seconds: tuple[float, ...] = ()  # index = block; shorter where it was pruned
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    why_not: str | None = None  # set: it could not be raced


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Whole optimizer steps of the winner against a rival, in ABBA order."""

    chosen: Candidate
    chosen_seconds: tuple[float, ...]
    rival: Measurement  # its step_seconds are whole steps, run in turn with the chosen one's


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the run was asked to do; with the device and workload, a profile's identity."""

    target: int
    replicas: int
    uneven: bool
    checkpointing: tuple[Checkpointing, ...]
    budget_bytes: int
    memory_limit_bytes: int | None
    headroom_percent: float
    max_micro_batch: int | None
    time_budget_seconds: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Facts found on one device with one workload."""

    device: DeviceInfo
    workload: WorkloadFacts
    settings: Settings
    created: str  # ISO 8601, UTC
    versions: dict[str, str]
    predicted: bool = False
    complete: bool = False  # False: the run was stopped before its decision
    probe: tuple[Probe, ...] = ()
    timings: tuple[Timing, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    confirmation: Confirmation | None = None
    noise: float = 0.0  # relative standard deviation of one micro-step's time
    visits: tuple[RecordedVisit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The chosen candidate's speed over a rival's, from the confirmation."""

    over: Candidate
    ratio: float  # chosen tokens/s over the rival's
    interval: tuple[float, float]  # 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedCandidate:
    """A candidate as the plan reports it: measured, or why not."""

    candidate: Candidate
    units_per_second: float | None = None
    interval: tuple[float, float] | None = None  # 95 %, same unit
    step_seconds: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    num_blocks: int = 0
    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decision drawn from a profile."""

    target: int
    chosen: RatedCandidate
    candidates: tuple[RatedCandidate, ...]  # all that were raced or named, fastest first
    why: tuple[str, ...]  # the reason, the honest "no gain", what uniformity costs, how sure
    gain: Gain | None
    reached: float | None  # share of the infinite-memory bound N * beta + gamma
    profile: Profile

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The sizes of one optimizer step on one replica."""
        return self.chosen.candidate.split.micro_batches

    @property
    def accumulation(self) -> int:
        """Micro-steps of one optimizer step."""
        return self.chosen.candidate.split.accumulation

    @property
    def checkpointing(self) -> Checkpointing:
        """The chosen activation-checkpointing mode."""
        return self.chosen.candidate.checkpointing


# ------------------------------------------------------------------ a plan as its file holds it


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCandidate:
    """A candidate as a plan file lists it."""

    micro_batch: int
    accumulation: int
    micro_batches: tuple[int, ...]
    uniform: bool
    checkpointing: Checkpointing
    tokens_per_second: float | None = None  # samples per second where the unit is samples
    samples_per_second: float | None = None
    interval: tuple[float, float] | None = None
    step_seconds: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    blocks: int = 0
    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGain:
    """The chosen candidate's speed over a rival's."""

    over: SavedCandidate
    ratio: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDevice:
    """The device of a plan."""

    kind: str
    name: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedProbe:
    """A checkpointing mode's ceiling and what finding it cost."""

    ceiling: int
    attempts: int
    out_of_memory: int
    seconds: float
    bounded_by: str
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSearch:
    """What the search cost, and the noise it worked against."""

    visits: int
    seconds: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """A plan as its file holds it: all that emitting and reporting need, with no device and no profile."""

    target: int
    replicas: int
    micro_batch: int  # the largest in the split
    accumulation: int
    micro_batches: tuple[int, ...]
    uniform: bool
    checkpointing: Checkpointing
    precision: str
    compile: bool
    tokens_per_second: float
    samples_per_second: float
    interval: tuple[float, float]
    unit: Literal["tokens", "samples"]
    step_seconds: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    budget_bytes: int
    predicted: bool
    device: SavedDevice
    workload: str
    workload_reference: str | None
    num_parameters: int
    units_per_sample: float
    clip_norm: float | None
    reached: float | None
    gain: SavedGain | None
    candidates: tuple[SavedCandidate, ...]
    probe: dict[str, SavedProbe]
    search: SavedSearch
    why: tuple[str, ...]
    created: str
    versions: dict[str, str]
