"""What whole-stack tests ask of a running stack: its log records, and its processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bench.stack import Running

MODULES = ("tokenizer_svc", "scheduler", "engine", "gateway")


def records(stack: Running) -> Iterator[tuple[str, dict[str, Any]]]:
    """(service, record) of everything the services have logged; a line that is no JSON is all message."""
    assert stack.log_dir is not None
    for path in sorted(stack.log_dir.glob("*.log*")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                record = {"level": "bare", "message": line}
            yield path.name.partition(".")[0], record


def complaints(stack: Running) -> list[str]:
    """Records of the level error or above, records with an exception, and lines that no logger wrote."""
    return [
        f"{service}: {json.dumps(record)[:2000]}"
        for service, record in records(stack)
        if record["level"] not in ("debug", "info", "warning") or "exception" in record
    ]


def processes(stack: Running) -> dict[str, list[int]]:
    """The pids of every service."""
    return {module: stack.pids_of(module) for module in MODULES}
