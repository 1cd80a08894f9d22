"""``kvserve calibrate tables``: a model's own tables for an entropy coder, from the codes that pipelines give it.

The codes are those of the pipelines' own transforms and quantizers on the calibration texts. Which codec fits tables to
them, and what a file of tables is, is the codec's affair: :class:`~kvserve_core.stages.FitsTables` can (``rans`` does).
"""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from kvserve_core.errors import ArtefactError, ConfigError
from kvserve_core.evaluation.bench import PROMPT_TOKENS
from kvserve_core.profile import PipelineSpec
from kvserve_core.registry import default_registry
from kvserve_core.stages import FitsTables
from kvserve_hf.bench.pipelines import Calibrated, Candidate, candidates, named_families, read_families, shipped
from kvserve_hf.calibrate.codes import Source, Store
from kvserve_hf.calibrate.request import TEXT, Request
from kvserve_hf.calibrate.work import Work, write_whole
from kvserve_hf.texts import tokens

DEFAULT_FAMILY = "free"
"""Of the shipped families: it needs no calibrated file itself."""


def calibrate_tables(request: Request) -> dict[str, Any]:
    """Collect codes, fit tables to them, write ``request.out``, and say what is in it.

    Raises:
        ConfigError: no text, no pipeline, or none whose codec fits tables. ArtefactError: a file that a pipeline reads
        is missing, or the work folder is another run's.
    """
    request.require_texts()
    calibrated = Calibrated(request.tables.calibrated)
    chosen = _chosen(request, calibrated)
    codec, fits = _codec(chosen)
    about = request.provenance("calibrate tables") | {
        "codec": codec,
        "pipelines": {c.name: spec.model_dump(mode="json") for c, spec in chosen},
    }
    sources = [Source(request.engine, spec, calibrated.artefacts, codec) for _, spec in chosen]
    with Work(request.work, about) as work:
        store = Store(work)
        _collect(request, store, sources)
        data = fits.fitted(store.parts, about, lambda done, of: request.progress("tables", done, of))
        count = sum(part.codes.numel() for part in store.parts())
        write_whole(request.out, data)
        store.remove()
    digest, names = blake3(data).hexdigest(), ", ".join(c.name for c, _ in chosen)
    return {"file": str(request.out), "blake3": digest, "bytes": len(data), "codes": count, "pipelines": names}


def _chosen(request: Request, calibrated: Calibrated) -> list[tuple[Candidate, PipelineSpec]]:
    """The pipelines to take codes from, all of which must be buildable."""
    options = request.tables
    every = read_families(options.pipelines) if options.pipelines else shipped(request.engine.model.config.model_type)
    names = options.families or (() if options.pipelines else (DEFAULT_FAMILY,))
    found = []
    for candidate in candidates(named_families(every, names), calibrated, default_registry()):
        if candidate.spec is None:
            raise ArtefactError(
                f"pipeline {candidate.name!r}: {candidate.problem}; name other pipelines or --calibrated"
            )
        found.append((candidate, candidate.spec))
    return found


def _codec(chosen: list[tuple[Candidate, PipelineSpec]]) -> tuple[str, FitsTables]:
    """The codec whose tables are fitted, by name and class."""
    names = sorted({chain.codec.name for _, spec in chosen for chain in spec.planes.values()})
    loaded: dict[str, object] = {name: default_registry().load("codec", name) for name in names}
    able = {name: cls for name, cls in loaded.items() if isinstance(cls, FitsTables)}
    if len(able) != 1:
        raise ConfigError(
            f"the pipelines use codecs {names}, of which {sorted(able) or 'none'} fit tables; name pipelines with one"
            " such codec, e.g. 'rans'",
            "pipelines",
        )
    return next(iter(able.items()))


def _collect(request: Request, store: Store, sources: list[Source]) -> None:
    texts = tokens(request.texts, request.engine.tokenize)
    for i, text in enumerate(texts):
        if not store.has(i):
            request.engine.prefill(TEXT, text.ids[:PROMPT_TOKENS])
            try:
                store.save(i, [part for source in sources for part in source.parts(PROMPT_TOKENS)])
            finally:
                request.engine.release(TEXT)
        request.progress(text.name, i + 1, len(texts))
