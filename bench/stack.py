"""Starts what is compared: our whole stack, or llama.cpp's server; each ends with the `with` block."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 120.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Running:
    """A server that answers: where, and the process that holds its tree."""

    url: str
    pid: int
    scheduler: str = ""
    output: deque[str] | None = None
    log_dir: Path | None = None
    """One file of JSON lines per service, as long as the stack runs."""

    def pid_of(self, module: str) -> int:
        """The child that runs `python -m module`. Raises LookupError."""
        return self.pids_of(module)[0]

    def pids_of(self, module: str) -> list[int]:
        """Every descendant that runs `python -m module`, oldest first. Raises LookupError."""
        found = []
        for pid in _tree(self.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if words[1:3] == ["-m", module]:
                    found.append(pid)
        if not found:
            raise LookupError(f"no process runs {module}")
        return sorted(found)


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def free_port_run(length: int) -> int:
    """The first of `length` neighbouring free ports."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + length):
                s = held.enter_context(socket.socket())
                s.bind(("127.0.0.1", port))
            return first


@contextlib.contextmanager
def candor_stack(
    model: Path | str,
    *,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    workers: int = 1,
) -> Iterator[Running]:
    """`candor serve` on free ports, ready. Raises RuntimeError with its last output when it is not."""
    http, scheduler = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "candor.cli", "serve", "--model", str(model)]
        command += ["--http", http, "--scheduler", scheduler, "--log-dir", logs]
        command += ["--tokenizer", f"127.0.0.1:{free_port()}", "--workers", str(workers)]
        # One port more: an embedding model that the arguments add has a worker behind the others.
        command += ["--engine", f"127.0.0.1:{free_port_run(workers + 1)}", *arguments]
        with _process(command, environ, until="curl ") as (pid, output):
            yield Running(f"http://{http}", pid, scheduler, output, Path(logs))


@contextlib.contextmanager
def llamacpp_server(model: Path, *, slots: int, threads: int, context: int) -> Iterator[Running]:
    """llama.cpp's own server, ready. Raises RuntimeError with its last output when it is not."""
    port = free_port()
    command = [sys.executable, "-m", "bench.peer_llamacpp", "--model", str(model)]
    for name, value in (
        ("port", port),
        ("slots", slots),
        ("threads", threads),
        ("context", context),
    ):
        command += [f"--{name}", str(value)]
    # Endless spinning would fight with every other process; the peer waits just as our own runner does.
    environ = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "500"}
    with _process(command, environ, until="listening on") as (pid, output):
        yield Running(f"http://127.0.0.1:{port}", pid, output=output)


@contextlib.contextmanager
def _process(
    command: Sequence[str], environ: Mapping[str, str] | None, until: str
) -> Iterator[tuple[int, deque[str]]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environ or {})},
    )
    output: deque[str] = deque(maxlen=200)
    seen, ended = threading.Event(), threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line.rstrip("\n"))
            if line.startswith(until):
                seen.set()
        ended.set()
        seen.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not seen.wait(START_TIMEOUT_S) or ended.is_set():
            raise RuntimeError("did not start:\n" + "\n".join(output))
        yield process.pid, output
    finally:
        process.send_signal(signal.SIGINT)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)
        if process.stdout is not None:
            process.stdout.close()


def cpu_seconds(pid: int) -> float:
    """User and system time of one process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def wait_quiet(pids: Sequence[int], timeout_s: float = 10.0) -> None:
    """Return when the processes have used no CPU for a fifth of a second, or after the timeout."""
    deadline = time.monotonic() + timeout_s
    before = [cpu_seconds(pid) for pid in pids]
    while time.monotonic() < deadline:
        time.sleep(0.2)
        after = [cpu_seconds(pid) for pid in pids]
        if after == before:
            return
        before = after


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    todo, found = [root], []
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found
