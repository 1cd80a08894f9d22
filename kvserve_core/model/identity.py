"""An engine-neutral identity of a model's weights, from its safetensors files alone. Imports no torch, no engine.

Definition (version 1), so that any engine computes the same from the same folder::

    names   = tensor names over all shards, sorted, without those that start with "lm_head." (no influence on KV)
    table   = [1, model_type, [[name, dtype, [shape...]], ...]] as JSON, separators "," and ":"
    sampled = names[i * len(names) // k] for i < k,  k = min(512, len(names))
    id      = model_type + "-" + hex(blake3(table + samples))[:32]

A sample is the 4096 bytes in the middle of the tensor's data (all of it when shorter). At most 2 MiB are read, however
large the model. A fine-tune changes whole matrices, so it changes a sample; a re-sharded copy does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from kvserve_core.errors import ArtefactError
from kvserve_core.json_text import parsed

SAMPLE_BYTES = 4096
MAX_SAMPLES = 512
MAX_HEADER_BYTES = 100 * 2**20


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: list[int]
    file: Path
    begin: int
    end: int


def model_id(folder: Path) -> str:
    """The identity of the weights in a Hugging Face folder; a few milliseconds from a local disk.

    Raises:
        ArtefactError: no config, no safetensors files, or a file that is not what its header says.
    """
    model_type = _model_type(folder)
    found = {t.name: t for file in weight_files(folder) for t in _header(file)}
    tensors = [found[name] for name in sorted(found) if not name.startswith("lm_head.")]
    if not tensors:
        raise ArtefactError(f"the safetensors files in {str(folder)!r} hold no weights; download the model again")
    table = [1, model_type, [[t.name, t.dtype, t.shape] for t in tensors]]
    digest = blake3(json.dumps(table, separators=(",", ":")).encode())
    count = min(MAX_SAMPLES, len(tensors))
    for i in range(count):
        digest.update(_sample(tensors[i * len(tensors) // count]))
    return f"{model_type}-{digest.hexdigest()[:32]}"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of the index, else ``model.safetensors``, else all there are."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(parsed(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ArtefactError(
            f"{str(folder)!r} has no safetensors files; give a Hugging Face folder with safetensors weights"
        )
    return files


def _model_type(folder: Path) -> str:
    path = folder / "config.json"
    if not path.exists():
        raise ArtefactError(f"{str(folder)!r} has no 'config.json'; give a Hugging Face model folder")
    config = parsed(path.read_text())
    return str(config.get("text_config", config).get("model_type", "unknown"))


def _header(file: Path) -> Iterator[_Tensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ArtefactError(f"{str(file)!r} is not a safetensors file; download or convert the model again")
        header = parsed(stream.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            yield _Tensor(name, entry["dtype"], entry["shape"], file, begin, end)


def _sample(tensor: _Tensor) -> bytes:
    size = min(SAMPLE_BYTES, tensor.end - tensor.begin)
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin + (tensor.end - tensor.begin - size) // 2)
        data = stream.read(size)
    if len(data) < size:
        raise ArtefactError(f"{str(tensor.file)!r} is truncated at tensor {tensor.name!r}; download the model again")
    return data
