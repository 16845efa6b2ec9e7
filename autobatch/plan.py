"""choose(profile) -> Plan: a pure decision. Within 1 % of the best the least memory wins."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from autobatch.errors import NothingFits
from autobatch.records import Candidate, Gain, Plan, RatedCandidate
from autobatch.sizes import format_size
from autobatch.splits import splits_of
from autobatch.timing import (
    INDIFFERENCE,
    STARTUP_BLOCKS,
    location,
    log_interval,
    log_ratios,
    num_blocks,
    standard_error,
    step_time_models,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autobatch.records import Confirmation, Measurement, Profile


def choose(profile: Profile) -> Plan:
    """Draw the decision from the facts.

    Raises NothingFits when no candidate was measured, naming the smallest that was tried.
    """
    raced = [m for m in profile.measurements if m.step_seconds]
    if not raced:
        raise nothing_fits(profile)
    chosen = decide(raced, profile.noise)
    confirmation = profile.confirmation
    if confirmation and confirmation.chosen == chosen.candidate and _refuted(confirmation, profile.noise):
        chosen = confirmation.rival
    gain = _gain(confirmation, chosen.candidate, profile.noise)
    confirmed = [confirmation.rival] if confirmation else []
    rated = {m.candidate: _rate(m, profile) for m in (*confirmed, *profile.measurements)}
    return Plan(
        target=profile.settings.target,
        chosen=rated[chosen.candidate],
        candidates=tuple(sorted(rated.values(), key=lambda r: r.step_seconds or math.inf)),
        why=tuple(_reasons(profile, chosen, raced, gain)),
        gain=gain,
        reached=_reached(profile, chosen),
        profile=profile,
    )


def nothing_fits(profile: Profile) -> NothingFits:
    """The error for a profile in which no size ran, with the smallest that was tried and why it did not."""
    tried = [(a.micro_batch, p.checkpointing, a.why_not) for p in profile.probe for a in p.attempts]
    budget = format_size(profile.settings.budget_bytes)
    if not tried:
        refused = "; ".join(f"{p.checkpointing}: {p.refused}" for p in profile.probe if p.refused)
        return NothingFits(f"no checkpointing mode could be tried ({refused}); ask for --checkpointing none")
    size, mode, reason = min(tried)
    return NothingFits(
        f"nothing fits {budget} on {profile.device.name}: the smallest tried was a micro-batch of {size} "
        f"with checkpointing {mode} ({reason}); use a smaller model, a cheaper optimizer or a larger limit"
    )


def decide(raced: Sequence[Measurement], noise: float) -> Measurement:
    """The measurement with the least memory among those surely within 1 % of the fastest.

    Candidates are compared block by block, so that drift cancels; *surely*: one standard error included. `raced`
    have at least one block each, the control of the race first.
    """
    control = raced[0]
    leader = min(raced, key=lambda m: location(_paired(m, control)))

    def indifferent(measurement: Measurement) -> bool:
        ratios = _paired(measurement, leader)
        return location(ratios) + 2 * standard_error(ratios, noise * math.sqrt(2)) <= INDIFFERENCE

    equals = [m for m in raced if m is leader or indifferent(m)]
    return min(equals, key=lambda m: m.peak_allocated_bytes or math.inf)


def _paired(measurement: Measurement, other: Measurement) -> list[float]:
    return log_ratios(measurement.step_seconds, other.step_seconds)


def rival_of(profile: Profile, chosen: Candidate) -> Candidate | None:
    """What the gain is measured against: the largest that fits, without checkpointing where that fits.

    It is what other finders return. None when it was chosen itself.
    """
    settings = profile.settings
    for probe in profile.probe:
        splits = splits_of(settings.target, settings.replicas, ceiling=probe.ceiling, uneven=settings.uneven)
        if splits:
            largest = Candidate(split=splits[0], checkpointing=probe.checkpointing)
            return None if largest == chosen else largest
    return None


def _refuted(confirmation: Confirmation, noise: float) -> bool:
    """Whole steps show the chosen one to be surely more than 1 % slower than its rival."""
    _, high = log_interval(_confirmed_ratios(confirmation), noise)
    return high < -INDIFFERENCE


def _confirmed_ratios(confirmation: Confirmation) -> list[float]:
    return log_ratios(confirmation.rival.step_seconds, confirmation.chosen_seconds)


def _gain(confirmation: Confirmation | None, chosen: Candidate, noise: float) -> Gain | None:
    if confirmation is None or confirmation.chosen != chosen:
        return None
    ratios = _confirmed_ratios(confirmation)
    low, high = log_interval(ratios, noise * math.sqrt(2))
    return Gain(
        over=confirmation.rival.candidate,
        ratio=math.exp(location(ratios)),
        interval=(math.exp(low), math.exp(high)),
    )


def _rate(measurement: Measurement, profile: Profile) -> RatedCandidate:
    logs = [math.log(seconds) for seconds in measurement.step_seconds]
    common: dict[str, Any] = {
        "candidate": measurement.candidate,
        "peak_allocated_bytes": measurement.peak_allocated_bytes,
        "peak_reserved_bytes": measurement.peak_reserved_bytes,
        "why_not": measurement.why_not,
    }
    if not logs:
        return RatedCandidate(**common)
    units = measurement.candidate.split.target * profile.workload.units_per_sample
    low, high = log_interval(logs, profile.noise)
    return RatedCandidate(
        **common,
        units_per_second=units / math.exp(location(logs)),
        interval=(units / math.exp(high), units / math.exp(low)),
        step_seconds=math.exp(location(logs)),
        num_blocks=len(logs),
    )


def _reached(profile: Profile, chosen: Measurement) -> float:
    """Share of the infinite-memory bound N * beta + gamma; the bound is never above what was measured."""
    models = step_time_models(profile.probe, profile.timings)
    seconds = math.exp(location([math.log(s) for s in chosen.step_seconds]))
    bound = min(model.bound_seconds(chosen.candidate.split) for model in models.values())
    return min(bound / seconds, 1.0)


def _reasons(profile: Profile, chosen: Measurement, raced: Sequence[Measurement], gain: Gain | None) -> Iterator[str]:
    yield _why_chosen(profile, chosen, raced)
    yield _gain_reason(profile, chosen, gain)
    if reason := _uniformity_reason(profile, chosen):
        yield reason
    if reason := _evidence_reason(profile, chosen, raced):
        yield reason
    for probe in profile.probe:
        if probe.ceiling and probe.bounded_by in ("time", "attempts"):
            yield f"checkpointing {probe.checkpointing} may fit more than {probe.ceiling}: {_ran_out(profile)} there"
    if profile.settings.replicas > 1:
        yield "one replica was measured: the exchange of gradients between replicas is not in these figures"


def _why_chosen(profile: Profile, chosen: Measurement, raced: Sequence[Measurement]) -> str:
    leader = min(raced, key=lambda m: location(_paired(m, raced[0])))
    if profile.confirmation and profile.confirmation.rival is chosen:
        return "whole optimizer steps showed it faster than the winner of the race"
    if len(raced) == 1:
        return "the only candidate that could be the best"
    if leader is chosen:
        return f"the fastest of {len(raced)} raced"
    percent = 100 * (math.exp(location(_paired(chosen, leader))) - 1)
    return f"within 1 % of the fastest raced ({described(leader.candidate)}; {percent:+.1f} % time), with less memory"


def _gain_reason(profile: Profile, chosen: Measurement, gain: Gain | None) -> str:
    if gain is None:
        if profile.confirmation or rival_of(profile, chosen.candidate) is None:
            return "no gain over the largest that fits: it is the choice"
        return f"the gain over the largest that fits was not confirmed: {_ran_out(profile)}"
    pairs = len(profile.confirmation.chosen_seconds) if profile.confirmation else 1
    detectable = 2 * 1.05 * profile.noise * math.sqrt(2 / pairs)
    if abs(math.log(gain.ratio)) < detectable:
        return (
            f"no gain in speed over the largest that fits ({described(gain.over)}) is claimed: "
            f"the measured ratio {gain.ratio:.3f} is below the detectable difference of {100 * detectable:.1f} %"
        )
    low, high = gain.interval
    return f"{gain.ratio:.2f} x [{low:.2f}, {high:.2f}] the speed of the largest that fits, {described(gain.over)}"


def _uniformity_reason(profile: Profile, chosen: Measurement) -> str | None:
    """What staying uniform costs (or would cost), predicted from the step-time models, when more than 1 %."""
    best_uniform, best_uneven = (_best_predicted(profile, uneven=uneven) for uneven in (False, True))
    if best_uniform is None or best_uneven is None:
        return None
    (uniform, uniform_seconds), (uneven, uneven_seconds) = best_uniform, best_uneven
    seconds = math.exp(location([math.log(s) for s in chosen.step_seconds]))
    stays_uniform = chosen.candidate.split.uniform and not profile.settings.uneven
    cost = seconds / uneven_seconds - 1 if stays_uniform else uniform_seconds / seconds - 1
    if uneven.split.uniform or cost <= 0.01:
        return None
    if stays_uniform:
        return f"staying uniform costs {100 * cost:.0f} % (predicted): --uneven would allow {described(uneven)}"
    return f"a uniform split ({described(uniform)}) would cost {100 * cost:.0f} % (predicted)"


def _best_predicted(profile: Profile, *, uneven: bool) -> tuple[Candidate, float] | None:
    settings = profile.settings
    models = step_time_models(profile.probe, profile.timings)
    predicted = [
        (Candidate(split=split, checkpointing=probe.checkpointing), models[probe.checkpointing].step_seconds(split))
        for probe in profile.probe
        if probe.checkpointing in models
        for split in splits_of(settings.target, settings.replicas, ceiling=probe.ceiling, uneven=uneven)
    ]
    return min(predicted, key=lambda pair: pair[1], default=None)


def _evidence_reason(profile: Profile, chosen: Measurement, raced: Sequence[Measurement]) -> str | None:
    blocks = len(chosen.step_seconds)
    if len(raced) > 1 and blocks < STARTUP_BLOCKS:
        return (
            f"decided on {blocks} of {num_blocks(profile.noise)} blocks, since {_ran_out(profile)}: the intervals are "
            "wide for it, and more time makes the pick surer"
        )
    return None


def _ran_out(profile: Profile) -> str:
    return "the time budget was spent" if profile.complete else "the run was stopped"


def described(candidate: Candidate) -> str:
    """A candidate in a few words: "32 x 8, checkpointing none"."""
    split = candidate.split
    smallest = min(split.micro_batches)
    sizes = f"{split.micro_batch}" if split.uniform else f"{split.micro_batch}/{smallest}"
    return f"{sizes} x {split.accumulation}, checkpointing {candidate.checkpointing}"
