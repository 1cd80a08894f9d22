"""Pinned texts for quality: passages of installed packages, named by file and checked by hash; and the demo's prompts.

Every text comes from a package of its own, so no two share a source. A passage is looked up at its offset, then by its
first words, so a release that leaves it unchanged still serves it; its hash decides.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import pydantic.dataclasses
from blake3 import blake3
from pydantic import Field, TypeAdapter, ValidationError

from kvserve_core.errors import ArtefactError, did_you_mean
from kvserve_core.evaluation.bench import CONTINUATION_TOKENS, PROMPT_TOKENS
from kvserve_core.evaluation.engine import TokenText
from kvserve_core.library import DEFAULT_WORKLOAD

ANCHOR_CHARS = 60
TEXT_CHARS = 6000
"""Enough for 960 tokens of English or Python with any usual vocabulary."""
PROMPTS = ("document", "code", "question")
Kind = Literal["prose", "code", "humaneval", "manual", "licence", "german", "spanish"]


class PinnedTextError(ArtefactError):
    """A pinned text is not installed here, or is not the text that was pinned."""


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(strict=True, extra="forbid"))
class PinnedText:
    """``length`` characters from ``offset`` of ``file``, a path relative to where ``package`` is installed.

    kind: one of :data:`Kind`, or a word of one's own. anchor: the first characters, to find the passage again when it
    moved. blake3: of the passage in UTF-8.
    """

    name: str
    kind: str
    package: str
    version: str
    file: str
    offset: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(ge=1)]
    anchor: str
    blake3: str


_LIST = TypeAdapter(list[PinnedText])


@dataclass(frozen=True)
class LoadedText:
    """A passage, and whether it is the pinned one."""

    pin: PinnedText
    text: str
    pinned: bool


@dataclass(frozen=True)
class Prompt:
    """A user message of the demo, put into the model's chat template."""

    name: str
    text: str


def pinned_texts() -> list[PinnedText]:
    """The list that ships with this package."""
    return _pins(files("kvserve_hf").joinpath("pinned_texts.json").read_text("utf-8"))


def calibration_texts() -> list[PinnedText]:
    """The list for calibration that ships with this package; none of its packages has a text in the other list."""
    return _pins(files("kvserve_hf").joinpath("calibration_texts.json").read_text("utf-8"))


def domain_texts(domain: str) -> list[PinnedText]:
    """Passages of one domain of ``bench/domain_texts.json``; ``prose`` and ``code`` are those of :func:`pinned_texts`.

    Raises:
        PinnedTextError: there is no such domain; the message names those there are.
    """
    other = _pins(files("kvserve_hf").joinpath("bench", "domain_texts.json").read_text("utf-8"))
    every = [*pinned_texts(), *other]
    found = [p for p in every if p.kind == domain]
    if not found:
        raise PinnedTextError(did_you_mean(domain, dict.fromkeys(p.kind for p in every), "domain"))
    return found


def workload_texts(workload: str) -> list[PinnedText]:
    """The texts that quality on a workload is measured by: ``default`` is prose and code, else a kind of text.

    Raises:
        PinnedTextError: there are no texts of that kind; the message names those there are.
    """
    return pinned_texts() if workload == DEFAULT_WORKLOAD else domain_texts(workload)


def read_pins(path: Path) -> list[PinnedText]:
    """A list of one's own, in the form of ``pinned_texts.json``.

    Raises:
        PinnedTextError: it cannot be read, or is not such a list; the message names the entry and the field.
    """
    try:
        return _pins(path.read_text("utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"])) or "the whole"
        problem = f"{at}: {first['msg']}, got {first['input']!r:.100}"
        raise PinnedTextError(f"{str(path)!r} is not a list of pinned texts: {problem}") from None
    except (OSError, ValueError) as error:
        raise PinnedTextError(f"{str(path)!r} is not a list of pinned texts: {error}") from error


def _pins(text: str) -> list[PinnedText]:
    return _LIST.validate_json(text)


def load_text(pin: PinnedText, allow_unpinned: bool = False) -> LoadedText:
    """The passage, checked against its hash.

    Raises:
        PinnedTextError: the package is missing; or the passage differs and ``allow_unpinned`` is false.
    """
    content, version = _read(pin.package, pin.file)
    for offset in (pin.offset, content.find(pin.anchor)):
        passage = content[offset : offset + pin.length] if offset >= 0 else ""
        if _hash(passage) == pin.blake3:
            return LoadedText(pin, passage, True)
    passage = content[pin.offset : pin.offset + pin.length]
    if not allow_unpinned or len(passage) < pin.length:
        raise PinnedTextError(
            f"pinned text {pin.name!r} is not in the installed {pin.package!r} {version} (it was pinned from version"
            f" {pin.version}, file {pin.file!r}); pip install '{pin.package}=={pin.version}', or pass --allow-unpinned"
            " to measure on what is installed (such figures do not compare with others)"
        )
    return LoadedText(pin, passage, False)


def load_texts(pins: Iterable[PinnedText], allow_unpinned: bool = False) -> list[LoadedText]:
    """All passages; every one that fails is named in a single error."""
    loaded, problems = [], []
    for pin in pins:
        try:
            loaded.append(load_text(pin, allow_unpinned))
        except PinnedTextError as error:
            problems.append(str(error))
    if problems:
        raise PinnedTextError("; ".join(problems))
    return loaded


def tokens(
    texts: Sequence[LoadedText],
    tokenize: Callable[[str], Sequence[int]],
    length: int = PROMPT_TOKENS + CONTINUATION_TOKENS,
) -> list[TokenText]:
    """The first ``length`` tokens of each text.

    Raises:
        PinnedTextError: a text is shorter than that under this tokenizer.
    """
    out = []
    for text in texts:
        ids = tuple(tokenize(text.text)[:length])
        if len(ids) < length:
            raise PinnedTextError(
                f"text {text.pin.name!r} has {len(ids)} tokens, {length} are needed; use shorter parts"
            )
        out.append(TokenText(text.pin.name, ids))
    return out


def pin(name: str, kind: str, package: str, file: str, offset: int, length: int = TEXT_CHARS) -> PinnedText:
    """A new pin of ``length`` characters of an installed file."""
    content, version = _read(package, file)
    passage = content[offset : offset + length]
    if len(passage) < length:
        raise PinnedTextError(f"{file!r} of {package!r} ends before {offset} + {length} characters")
    anchor = passage[:ANCHOR_CHARS]
    return PinnedText(name, kind, package, version, file, offset, length, anchor, _hash(passage))


def repin(pins: Iterable[PinnedText]) -> list[PinnedText]:
    """The same places pinned again from what is installed: for a new release of the list, never at run time."""
    return [pin(p.name, p.kind, p.package, p.file, p.offset, p.length) for p in pins]


def as_json(pins: Iterable[PinnedText]) -> str:
    """The text of ``pinned_texts.json``."""
    return json.dumps([asdict(p) for p in pins], indent=1) + "\n"


def demo_prompts() -> list[Prompt]:
    """A document of about 1500 tokens, code, and a short question. They are part of this package."""
    folder = files("kvserve_hf").joinpath("prompts")
    return [Prompt(name, folder.joinpath(f"{name}.txt").read_text("utf-8").strip()) for name in PROMPTS]


def _read(package: str, file: str) -> tuple[str, str]:
    try:
        found = importlib.metadata.distribution(package)
        # METADATA and licences lie in a folder that carries the version; the distribution knows which.
        if file == "METADATA" or file.startswith("licenses/"):
            return found.read_text(file) or "", found.version
        data = Path(str(found.locate_file(file))).read_bytes()
        return _problems(data) if file.endswith(".jsonl.gz") else data.decode("utf-8"), found.version
    except (importlib.metadata.PackageNotFoundError, OSError) as error:
        raise PinnedTextError(
            f"the pinned text {file!r} of package {package!r} is not here ({error}); pip install '{package}'"
        ) from error


def _problems(data: bytes) -> str:
    """HumanEval's file as the Python that its prompts and solutions make together."""
    rows = [json.loads(line) for line in gzip.decompress(data).decode("utf-8").splitlines()]
    return "\n\n".join(row["prompt"] + row["canonical_solution"] for row in rows)


def _hash(text: str) -> str:
    return blake3(text.encode()).hexdigest()
