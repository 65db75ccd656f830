"""CRC-32 of large tensors, from the faster of the installed libraries. All of them return the same value."""

from __future__ import annotations

# With `isal` (the extra `fast`), checksums take a third of the time or less, because ISA-L uses the
# processor's instruction for polynomial multiplication.
try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
