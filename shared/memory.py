"""How this process's memory is looked after: two defaults that cost a busy relay half of its time an event.

Both were measured (docs/performance.md): the collector walked over some 300,000 objects of libraries again and again,
and the C library gave the pages of every large buffer back to the system, only to fault them in again.
"""

from __future__ import annotations

import ctypes
import gc

# glibc's <malloc.h>. Other C libraries have no mallopt, or ignore it.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
_TRIM_THRESHOLD_BYTES = 128 * 1024 * 1024


def settle() -> None:
    """Call once, when everything is imported and built and the work begins."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
