"""Bytes as people write and read them."""

from __future__ import annotations

import re

from autobatch.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500MB", "1.5G" or "1073741824"; Ki, Mi, Gi, Ti are powers of 1024, the others of 1000.

    Raises UsageError when it is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise UsageError(f"size {text!r} asked; it is not a size; write it like 2GiB, 500MB or 1073741824")
    number, prefix, binary = found[1], found[2].lower(), bool(found[3])
    unit = 1024 ** "kmgt".index(prefix) * 1024 if binary else _UNITS[prefix]
    return int(float(number) * unit)


def format_size(size_bytes: float) -> str:
    """ "1.50 GiB": two decimals in the largest binary unit that is at least one; whole bytes below a KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.2f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} TiB"
