"""Profile and Plan <-> JSON, with a schema version. Field by field in profiles/README.md."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cattrs
from cattrs.preconf.json import make_converter

from autobatch.errors import FileFormatError, UsageError
from autobatch.records import (
    Profile,
    SavedCandidate,
    SavedDevice,
    SavedGain,
    SavedPlan,
    SavedProbe,
    SavedSearch,
    Split,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autobatch.records import Candidate, DeviceInfo, Plan, RatedCandidate, Settings

PROFILE_SCHEMA = "autobatch.profile/1"
PLAN_SCHEMA = "autobatch.plan/1"
PRECISIONS = ("fp32", "bf16", "fp16")

Record = TypeVar("Record")
_converter = make_converter()


# ------------------------------------------------------------------ profiles


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile, whole or not at all. Raises UsageError when the path cannot be written."""
    _write(path, {"schema": PROFILE_SCHEMA} | _converter.unstructure(profile))


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises FileFormatError, with the file's name and the place, when it is not one."""
    return _read(path, PROFILE_SCHEMA, Profile)


def default_profile_dir() -> Path:
    """`profiles/` where the current directory has one, else autobatch's folder in the user's data directory."""
    here = Path("profiles")
    if here.is_dir():
        return here
    import platformdirs

    return Path(platformdirs.user_data_dir("autobatch")) / "profiles"


def profile_path(directory: Path, device: DeviceInfo, workload: str, settings: Settings) -> Path:
    """Where the profile of such a run belongs: "<device>-<workload>-<identity>.json".

    The identity is a hash of all that changes the answer: the device, the workload's name or reference, and the
    settings but for the seconds spent and the bytes that happened to be free.
    """
    asked = _converter.unstructure(settings)
    for passing in ("time_budget_seconds", "budget_bytes"):
        del asked[passing]
    identity = json.dumps([device.kind, device.name, device.versions, workload, asked], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return directory / f"{_slug(device.name)}-{_slug(Path(workload).name)}-{digest}.json"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].rstrip("-")


# ------------------------------------------------------------------ plans


def write_plan(plan: SavedPlan, path: Path) -> None:
    """Write a plan, whole or not at all. Raises UsageError when the path cannot be written."""
    _write(path, plan_document(plan))


def read_plan(path: Path) -> SavedPlan:
    """Read a plan. Raises FileFormatError, with the file's name and the place, when it is not one."""
    plan = _read(path, PLAN_SCHEMA, SavedPlan)
    for place, reason in _contradictions(plan):
        raise _broken(path, f"{reason} @ $.{place}")
    return plan


def _contradictions(plan: SavedPlan) -> Iterator[tuple[str, str]]:
    """Where a plan that was edited by hand contradicts itself, and how: emitters trust what they are given."""
    if plan.precision not in PRECISIONS:
        yield "precision", f"{plan.precision!r} is none of {', '.join(PRECISIONS)}"
    if plan.replicas < 1 or not plan.micro_batches or min(plan.micro_batches) < 1:
        yield "micro_batches", "a step has at least one micro-batch of at least one sample on at least one replica"
        return
    split = Split(replicas=plan.replicas, micro_batches=plan.micro_batches)
    for key in ("target", "micro_batch", "accumulation", "uniform"):
        said, made = getattr(plan, key), getattr(split, key)
        if said != made:
            yield key, f"{said}, where replicas and micro_batches make it {made}"


def plan_document(plan: SavedPlan) -> dict[str, Any]:
    """The plan as the JSON document that its file holds."""
    document: dict[str, Any] = _converter.unstructure(plan)
    return {"schema": PLAN_SCHEMA} | document


def probe_document(profile: Profile) -> dict[str, Any]:
    """The probes of a profile as one JSON document: {"device": ..., "workload": ..., "probe": {mode: ...}}."""
    document = _converter.unstructure(profile)
    return {
        "schema": PROFILE_SCHEMA,
        **{key: document[key] for key in ("device", "workload", "settings", "predicted", "versions")},
        "probe": {
            found["checkpointing"]: found | {"out_of_memory": probe.num_out_of_memory}
            for found, probe in zip(document["probe"], profile.probe, strict=True)
        },
    }


def saved_plan(plan: Plan) -> SavedPlan:
    """What a plan's file holds of it."""
    profile, chosen = plan.profile, plan.chosen
    settings, workload, device = profile.settings, profile.workload, profile.device
    row = _saved_candidate(chosen, workload.units_per_sample)
    assert row.tokens_per_second is not None
    assert row.samples_per_second is not None
    assert row.interval is not None
    assert row.step_seconds is not None
    return SavedPlan(
        target=plan.target,
        replicas=settings.replicas,
        micro_batch=row.micro_batch,
        accumulation=row.accumulation,
        micro_batches=row.micro_batches,
        uniform=row.uniform,
        checkpointing=row.checkpointing,
        precision=workload.precision,
        compile=False,
        tokens_per_second=row.tokens_per_second,
        samples_per_second=row.samples_per_second,
        interval=row.interval,
        unit=workload.unit,
        step_seconds=row.step_seconds,
        peak_allocated_bytes=row.peak_allocated_bytes,
        peak_reserved_bytes=row.peak_reserved_bytes,
        budget_bytes=settings.budget_bytes,
        predicted=profile.predicted,
        device=SavedDevice(kind=device.kind, name=device.name, capacity_bytes=device.capacity_bytes),
        workload=workload.name,
        workload_reference=workload.reference,
        num_parameters=workload.num_parameters,
        units_per_sample=workload.units_per_sample,
        clip_norm=workload.clip_norm,
        reached=plan.reached,
        gain=_saved_gain(plan),
        candidates=tuple(_saved_candidate(rated, workload.units_per_sample) for rated in plan.candidates),
        probe={
            probe.checkpointing: SavedProbe(
                ceiling=probe.ceiling,
                attempts=len(probe.attempts),
                out_of_memory=probe.num_out_of_memory,
                seconds=probe.seconds,
                bounded_by=probe.bounded_by,
                refused=probe.refused,
            )
            for probe in profile.probe
        },
        search=SavedSearch(
            visits=len(profile.visits),
            seconds=sum(recorded.outcome.seconds for recorded in profile.visits),
            noise=profile.noise,
        ),
        why=plan.why,
        created=profile.created,
        versions=profile.versions,
    )


def _saved_gain(plan: Plan) -> SavedGain | None:
    if plan.gain is None:
        return None
    over = next(rated for rated in plan.candidates if rated.candidate == plan.gain.over)
    return SavedGain(
        over=_saved_candidate(over, plan.profile.workload.units_per_sample),
        ratio=plan.gain.ratio,
        interval=plan.gain.interval,
    )


def _saved_candidate(rated: RatedCandidate, units_per_sample: float) -> SavedCandidate:
    candidate: Candidate = rated.candidate
    split = candidate.split
    return SavedCandidate(
        micro_batch=split.micro_batch,
        accumulation=split.accumulation,
        micro_batches=split.micro_batches,
        uniform=split.uniform,
        checkpointing=candidate.checkpointing,
        tokens_per_second=rated.units_per_second,
        samples_per_second=rated.units_per_second and rated.units_per_second / units_per_sample,
        interval=rated.interval,
        step_seconds=rated.step_seconds,
        peak_allocated_bytes=rated.peak_allocated_bytes,
        peak_reserved_bytes=rated.peak_reserved_bytes,
        blocks=rated.num_blocks,
        why_not=rated.why_not,
    )


# ------------------------------------------------------------------ files


def require_writable(path: Path) -> None:
    """Raise UsageError unless a file can be written at that path, before work is spent on what it is to hold."""
    folder = next(above for above in path.absolute().parents if above.exists())
    try:
        if path.is_dir():
            raise _unwritable(path, "it is a directory")
        trial = _temporary(folder / path.name)  # os.access says yes to root, and for folders no file can be made in
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise _unwritable(path, f"{folder}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it. Raises UsageError when the path cannot be written."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _unwritable(path: Path, reason: str) -> UsageError:
    return UsageError(f"output {path} asked; it cannot be written ({reason}); name another file")


def _write(path: Path, document: dict[str, Any]) -> None:
    write_text(path, json.dumps(document, indent=1) + "\n")


def _read(path: Path, schema: str, record: type[Record]) -> Record:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileFormatError(f"{path} asked; it cannot be read ({error.strerror}); check the name") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} asked; it is not text; give a file that autobatch wrote") from error
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"{path} asked; it is not whole JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            "make it again with autobatch tune"
        ) from error
    _require_schema(path, document, schema)
    try:
        return _converter.structure(document, record)
    except (cattrs.BaseValidationError, TypeError, ValueError) as error:
        place = cattrs.transform_error(error)[0].removeprefix("unknown error ")
        raise _broken(path, place) from error


def _broken(path: Path, place: str) -> FileFormatError:
    return FileFormatError(f"{path} asked; it is broken ({place}); make it again with autobatch tune")


def _require_schema(path: Path, document: object, schema: str) -> None:
    found = document.get("schema") if isinstance(document, dict) else None
    if found == schema:
        return
    kind, _, version = schema.partition("/")
    if isinstance(found, str) and found.startswith(f"{kind}/"):
        raise FileFormatError(
            f"{path} asked; its schema is {found} and this autobatch reads version {version}; "
            "use the autobatch that wrote it, or make it again"
        )
    raise FileFormatError(f"{path} asked; its schema is {found!r} and not {schema!r}; give a file of that kind")
