"""What the README says is what the code declares."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gateway.dialects import reference

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_support_table_is_the_declaration() -> None:
    assert reference.with_support_table(README) == README
    assert reference.support_table() in README


def test_every_make_target_and_file_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`?make ([a-z-]+)", README)) <= targets
    for path in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / path).exists(), path


def test_every_command_it_names_has_help() -> None:
    for command in set(re.findall(r"`(?:\.venv/bin/)?candor ([a-z]+)", README)):
        done = subprocess.run(
            [sys.executable, "-m", "candor.cli", command, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
