"""How many threads numpy's matrix products use: a setting of the BLAS library inside numpy's wheel.

numpy has no call for it, and the library's own environment variables are read before any setting of ours.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("engine.blas")

_PREFIXES, _SUFFIXES = ("scipy_openblas", "openblas"), ("64_", "")


def set_threads(count: int) -> bool:
    """Use `count` threads from now on. False, and a warning, for a library that is not OpenBLAS."""
    setter = _find("set_num_threads")
    if setter is None:
        log.warning("numpy's BLAS library decides on its threads itself", extra={"wanted": count})
        return False
    setter(count)
    return True


def get_threads() -> int | None:
    """How many are used; None for a library that is not OpenBLAS."""
    getter = _find("get_num_threads")
    return None if getter is None else int(getter())


def _find(what: str) -> Callable[..., Any] | None:
    for path in _loaded():
        library = ctypes.CDLL(path)
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                found: Callable[..., Any] | None = getattr(
                    library, f"{prefix}_{what}{suffix}", None
                )
                if found is not None:
                    return found
    return None


def _loaded() -> list[str]:
    """OpenBLAS libraries that are in this process."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}
    return sorted(path for path in paths if ".so" in path)
