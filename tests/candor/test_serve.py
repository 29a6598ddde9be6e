"""What `candor serve` starts, and what it refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from candor.cli import models
from candor.cli.__main__ import app
from candor.cli.serve import Plan, busy_addresses, services_of

EMBEDDING = "all-minilm-l6-v2"


def plan(tmp_path: Path, embedding: tuple[str, Path] | None) -> Plan:
    return Plan(
        model_path=tmp_path / "m.gguf",
        model_name="m",
        aliases=("n",),
        workers=2,
        slots=3,
        threads=1,
        runner="native",
        max_model_len=1024,
        http="127.0.0.1:0",
        scheduler="127.0.0.1:0",
        tokenizer="127.0.0.1:0",
        engine="127.0.0.1:50100",
        log_dir=tmp_path,
        embedding=embedding,
    )


def flags(command: list[str]) -> dict[str, str]:
    """`python -m module --flag value ...` as a dict."""
    words = command[3:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_an_embedding_model_gets_a_worker_behind_the_others_and_none_of_their_settings(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "encoder"
    services = {s.name: flags(list(s.command)) for s in services_of(plan(tmp_path, ("e", folder)))}
    order = ["tokenizer", "scheduler", "engine-0", "engine-1", "embedder", "gateway"]
    assert list(services) == order
    assert services["tokenizer"]["--models"] == f"m={tmp_path}/m.gguf,e={folder}"
    assert services["engine-1"]["--engine"] == "127.0.0.1:50101"
    assert services["engine-1"]["--runner"] == "native"
    own = services["embedder"]
    assert (own["--model"], own["--model-name"]) == (str(folder), "e")
    assert (own["--engine"], own["--slots"], own["--threads"]) == ("127.0.0.1:50102", "3", "1")
    assert (own["--model-kind"], own["--runner"]) == ("embedding", "auto")
    assert own["--served-aliases"] == own["--max-model-len"] == ""


def test_without_one_nothing_is_added(tmp_path: Path) -> None:
    services = [s.name for s in services_of(plan(tmp_path, None))]
    assert services == ["tokenizer", "scheduler", "engine-0", "engine-1", "gateway"]


def test_its_port_is_looked_at_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("candor.cli.serve._can_bind", lambda address: address[-3:] != "102")
    assert busy_addresses(plan(tmp_path, None)) == {}
    busy = busy_addresses(plan(tmp_path, ("e", tmp_path)))
    assert busy == {"127.0.0.1:50102": "--engine"}


def test_one_model_is_not_served_twice() -> None:
    models.ensure(EMBEDDING)
    result = CliRunner().invoke(
        app, ["serve", "--model", EMBEDDING, "--embedding-model", EMBEDDING]
    )
    assert result.exit_code == 2
    assert "--embedding-model: 'all-minilm-l6-v2' is served" in " ".join(result.output.split())


def test_an_embedding_model_that_is_nowhere_is_named(model_path: Path) -> None:
    wanted = ["--model", str(model_path), "--embedding-model", "/no/such/folder"]
    result = CliRunner().invoke(app, ["serve", *wanted])
    assert result.exit_code == 1
    assert "'/no/such/folder' is neither a file nor one of" in " ".join(result.output.split())
