"""Golden frames: every format version that a component reads, written once and decoded for ever.

``KIND-NAME@VERSION.kv`` is a frame file, ``.bin`` beside it the tensors that it decodes to as bytes, and
``HASH.artefact`` each calibrated file that it reads. Further frames of a version may be added as
``KIND-NAME@VERSION-ANYTHING.kv``. A file is never rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.container import FrameReader, write_frame
from kvserve_core.decoder import Decoder
from kvserve_core.errors import ConfigError
from kvserve_core.library_files import write_bytes
from kvserve_core.payload import as_bytes
from kvserve_core.pipeline import Pipeline
from kvserve_core.spec import KVSpec, Region, whole
from kvserve_core.tensor import TORCH
from kvserve_core.testing.cases import whole_tokens
from kvserve_core.testing.chains import model_for, pipeline_spec
from kvserve_core.testing.check import STAGES, check
from kvserve_core.testing.data import recipe, sparse
from kvserve_core.testing.subject import Subject, require
from kvserve_core.wire import Codebook

NONCE = 0x0123_4567_89AB_CDEF
TOKENS, DIM = 16, 32
TOLERANCE = 2.0**-6
"""Of the largest magnitude in a segment: what other arithmetic (another CPU, a GPU) may change in a lossy chain."""


def has_folder(subject: Subject) -> bool:
    """Whether the author keeps golden frames."""
    return subject.golden is not None


def stem(subject: Subject, version: int) -> str:
    """``codec-acme.rle@1``."""
    return f"{subject.kind}-{subject.name}@{version}"


def command(subject: Subject, folder: Path) -> str:
    """The command that writes the missing frame."""
    config = f" --config '{json.dumps(dict(subject.configuration))}'" if subject.configuration else ""
    return f"kvserve check {subject.name} --kind {subject.kind}{config} --golden {folder} --write-golden"


def folder_of(subject: Subject) -> Path:
    """Where this component's frames are.

    Raises:
        ConfigError: the author named no folder, or a file.
    """
    if subject.golden is None:
        raise ConfigError("no folder of golden frames was given; set 'golden', or pass '--golden FOLDER'")
    if subject.golden.exists() and not subject.golden.is_dir():
        raise ConfigError(f"golden frames are in a folder, and {str(subject.golden)!r} is a file; name its folder")
    return subject.golden


def write(subject: Subject, label: str = "") -> Path | None:
    """Write the frame of the version that this release encodes; None when it is there already.

    label: of a further frame of the version, ``KIND-NAME@VERSION-LABEL.kv``.
    """
    folder = folder_of(subject)
    name = "-".join(filter(None, (stem(subject, subject.stage.format_version), label)))
    path = folder / f"{name}.kv"
    if path.exists():
        return None
    kv = model_for(subject, DIM)
    spec = pipeline_spec(subject).model_copy(update={"sink_tokens": 0})
    pipeline = Pipeline.build(spec, kv, whole(kv), subject.device, subject.registry, subject.artefacts)
    header, planned = pipeline.header("golden", whole_tokens(subject.caps, TOKENS), "golden")
    header = msgspec.structs.replace(header, nonce=NONCE)
    batch = [(p, _input(subject, p.at, kv).to(subject.device)) for p in planned]
    segments = pipeline.encode(batch)
    decoded = Decoder(header, kv, subject.device, subject.registry, subject.artefacts).decode(segments)
    frame = BytesIO()
    write_frame(frame, header, map(Codebook(header).seal, segments))
    used = {f"{h}.artefact": subject.artefacts.read(h) for h in sorted(pipeline.used_artefacts)}
    values = b"".join(as_bytes(x.cpu().contiguous()) for _, x in decoded)
    _keep(folder, {**used, path.with_suffix(".bin").name: values, path.name: frame.getvalue()})
    return path


def _keep(folder: Path, files: Mapping[str, bytes]) -> None:
    """Whole files, the frame last: while it is missing the next call writes them all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_bytes(folder / name, data)
    except OSError as error:
        raise ConfigError(f"golden frames cannot be written to {str(folder)!r}: {error.strerror}") from error


def _input(subject: Subject, at: Region, kv: KVSpec) -> Tensor:
    if subject.sample:
        return subject.sample(at, kv)
    found = kv.group(at.group).plane(at.plane)
    x = recipe(at, found.dim).to(TORCH[found.dtype])
    return sparse(x) if subject.kind == "codec" else x


@check(*STAGES, when=has_folder)
def golden_frames(subject: Subject) -> None:
    """Frames of every format version that it reads decode to what they decoded to when they were written."""
    folder = folder_of(subject)
    for version in sorted(subject.stage.reads):
        first = folder / f"{stem(subject, version)}.kv"
        if version == subject.stage.format_version:
            require(first.exists(), f"{first.name!r} is missing; write it with: {command(subject, folder)}")
        require(first.exists(), f"{first.name!r} is missing; take it from the release that wrote version {version}")
        for path in sorted({first, *folder.glob(f"{stem(subject, version)}-*.kv")}):
            _check_frame(subject, path, version)


def _check_frame(subject: Subject, path: Path, version: int) -> None:
    here = {p.stem: p for p in path.parent.glob("*.artefact")}
    named = f"{subject.kind}:{subject.name}@{version}"
    with FrameReader(path) as reader:
        stages = {stage for info in reader.header.chains for stage in info.stages}
        require(named in stages, f"{path.name} holds no {named!r}, only {sorted(stages)}")
        decoder = Decoder(reader.header, model_for(subject, DIM), subject.device, subject.registry, Artefacts(here))
        segments = list(reader.segments())
        require(any(s.chain for s in segments), f"{path.name} was sent raw and shows nothing")
        found = [x for _, x in decoder.decode(segments)]
    data = path.with_suffix(".bin").read_bytes()
    require(len(data) == sum(x.nbytes for x in found), f"{path.name} decoded to another number of bytes")
    at = 0
    for segment, x in zip(segments, found, strict=True):
        due = torch.frombuffer(bytearray(data[at : at + x.nbytes]), dtype=x.dtype).reshape(x.shape)
        at += x.nbytes
        difference = (x.cpu().double() - due.double()).abs().max()
        allowed = 0.0 if not segment.chain or (subject.caps.exact and subject.kind != "codec") else TOLERANCE
        require(
            float(difference) <= allowed * float(due.double().abs().max()),
            f"{path.name}: {segment.at} decodes to other values than when it was written, by {float(difference):.4g}",
        )
