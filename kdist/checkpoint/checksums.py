"""CRC-32 of large tensors: the same number from whichever library is there, at different speeds."""

from __future__ import annotations

# With `isal` installed (the extra `fast`) sums take a third of the time or less: ISA-L multiplies
# polynomials with the processor's instruction for it.
try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
