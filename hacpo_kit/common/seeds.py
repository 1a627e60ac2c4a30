"""Seeds for every random choice."""

import hashlib
from typing import Any


def derive_seed(*parts: Any) -> int:
    """Return a 63-bit seed derived from printable values, so that no random choice depends on earlier draws."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1
