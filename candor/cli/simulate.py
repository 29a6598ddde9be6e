"""`candor simulate`: the scheduler's digital twin, run as its own process like every service."""

from __future__ import annotations

import os
import sys


def run(arguments: list[str]) -> None:
    """Become the twin; it parses the flags and prints."""
    os.execv(sys.executable, [sys.executable, "-m", "scheduler.simulate", *arguments])
