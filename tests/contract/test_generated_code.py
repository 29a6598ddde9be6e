"""The committed contract code belongs to the committed contract and runs on the declared floors."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import google.rpc

ROOT = Path(__file__).parents[2]


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    include = Path(next(iter(google.rpc.__path__))).parents[1]
    sources = sorted(
        str(p.relative_to(ROOT / "proto")) for p in ROOT.glob("proto/candor/v1/*.proto")
    )
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", "-I", str(include)]
    subprocess.run([*command, f"--python_out={tmp_path}", *sources], cwd=ROOT, check=True)
    services = [source for source in sources if "inference" not in source]
    subprocess.run([*command, f"--grpc_python_out={tmp_path}", *services], cwd=ROOT, check=True)
    made = sorted(tmp_path.rglob("*.py"))
    assert made
    for path in made:
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path.name


def test_generated_code_asks_for_no_more_than_the_declared_floors() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = {}
    for dependency in project["dependencies"]:
        if found := re.fullmatch(r"(grpcio|protobuf)>=([\d.]+)", dependency):
            floors[found[1]] = found[2]

    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    for path in (ROOT / "candor/v1").glob("*_pb2.py"):
        version = re.search(r"# Protobuf Python Version: ([\d.]+)", path.read_text())
        assert version and number(version[1]) <= number(floors["protobuf"]), path.name
    for path in (ROOT / "candor/v1").glob("*_pb2_grpc.py"):
        version = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", path.read_text())
        assert version and number(version[1]) <= (*number(floors["grpcio"]), 0), path.name
