"""The embedded workloads: what is tuned when none is named, by name. Reading the names does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autobatch.errors import UsageError

if TYPE_CHECKING:
    from autobatch.workload import Workload

EMBEDDED: dict[str, str] = {
    "gpt": "gpt-nano on a CPU, gpt-small on anything else",
    "gpt-nano": "byte-level transformer, 0.8 M parameters, 64 tokens a sample, fp32",
    "gpt-mini": "byte-level transformer, 11 M parameters, 256 tokens a sample, fp32",
    "gpt-small": "GPT-2-small's shape, 124 M parameters, 1024 tokens a sample, bf16",
    "gpt-medium": "GPT-2-medium's shape, 354 M parameters, 1024 tokens a sample, bf16",
    "cnn": "residual network with BatchNorm, 0.3 M parameters, 32x32 images, fp32",
}
"""Name -> what it is, in one line."""


def embedded_names() -> tuple[str, ...]:
    """The names `load_embedded` knows."""
    return tuple(EMBEDDED)


def load_embedded(name: str, device_kind: str) -> Workload:
    """Make the embedded workload of that name; "gpt" is the size that suits the kind of device.

    Raises UsageError when there is no such name.
    """
    if name not in EMBEDDED:
        raise UsageError(
            f"workload {name!r} asked; the embedded ones are {', '.join(EMBEDDED)}; "
            "name one of them, or your own as FILE.py:NAME or module:NAME"
        )
    if name == "cnn":
        from autobatch.workloads.cnn import cnn_workload

        return cnn_workload()
    from autobatch.workloads.gpt import gpt_workload

    suited = "gpt-nano" if device_kind == "cpu" else "gpt-small"
    return gpt_workload(suited if name == "gpt" else name)
