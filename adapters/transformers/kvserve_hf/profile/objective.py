"""Measuring candidates on a model: what the search asks, in this process or in a worker."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ComponentSpec
from kvserve_core.errors import ConfigError, KVServeError
from kvserve_core.evaluation.bench import PROMPT_TOKENS
from kvserve_core.evaluation.engine import Text
from kvserve_core.evaluator import Evaluator, Prepared
from kvserve_core.latency import Speed
from kvserve_core.pipeline import Pipeline
from kvserve_core.profiling.point import Measurement, Point
from kvserve_core.registry import default_registry
from kvserve_core.spec import Region, whole
from kvserve_core.speed import LENGTHS, REPEATS, Timing, fitted, timings
from kvserve_hf.bench.pipelines import Calibrated
from kvserve_hf.engine import Engine
from kvserve_hf.profile.estimate import SAMPLE_TOKENS, RatioEstimator
from kvserve_hf.profile.judge import judged
from kvserve_hf.roundtrip import FrameRoundtrip

HELD = "profile"
CPU_S = "measure.cpu_s"
"""Metric: processor seconds that a measurement took; with other work on the machine its seconds say little."""


@dataclass(frozen=True)
class Setup:
    """What a worker process needs to measure, all of it picklable.

    evaluators: their ``samples`` decide how long a measurement takes. quick: so many samples, for a search. lengths,
    repeats: of the timings, in tokens; without lengths there are none. reuse: what the evaluators send through the
    pipeline counts as timed, too, so that a search need not encode whole prompts for that alone.
    """

    model: Path
    texts: tuple[Text, ...]
    evaluators: tuple[ComponentSpec, ...]
    calibrated: Path | None = None
    quick: int | None = None
    lengths: tuple[int, ...] = LENGTHS
    repeats: int = REPEATS
    reuse: bool = False
    prompt_tokens: int = PROMPT_TOKENS

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.evaluators]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"{twice!r} is named twice; give it once", "evaluators")


class ModelObjective:
    """An :class:`kvserve_core.profiling.point.Objective`. The model is loaded when first asked, in each process."""

    def __init__(self, setup: Setup, load: Callable[[Path], Engine] = Engine.load) -> None:
        self.setup, self.load = setup, load
        self._at: _Loaded | None = None

    def __getstate__(self) -> tuple[Setup, Callable[[Path], Engine]]:
        return self.setup, self.load

    def __setstate__(self, state: tuple[Setup, Callable[[Path], Engine]]) -> None:
        self.setup, self.load = state
        self._at = None

    @property
    def engine(self) -> Engine:
        """The model; loaded now if it was not."""
        return self._loaded.engine

    @property
    def artefacts(self) -> Artefacts:
        """The calibrated files."""
        return self._loaded.artefacts

    def estimate(self, point: Point) -> float:
        """The ratio from a part of one prompt.

        Raises:
            KVServeError: this model refuses the pipeline.
        """
        return self._loaded.estimator.ratio(point.spec)

    def measure(self, points: Sequence[Point]) -> Iterable[Measurement]:
        """Quality by every evaluator, ratio of full frames, speed; one after the other."""
        for point in points:
            yield self._loaded.measure(point)

    def speed(self, point: Point) -> tuple[Speed, Speed]:
        """Encode and decode of one point, at the lengths of the setup.

        Raises:
            KVServeError: this model refuses the pipeline.
        """
        pipeline, artefacts = self._loaded.pipeline(point)
        return fitted(self._loaded.timings(pipeline, artefacts))

    def close(self) -> None:
        """Release what is held."""
        if self._at is not None:
            self._at.close()
            self._at = None
            gc.collect()  # a model refers to itself: without this its memory stays until some later collection

    @property
    def _loaded(self) -> _Loaded:
        if self._at is None:
            torch.set_num_threads(1)
            self._at = _Loaded(self.setup, self.load(self.setup.model), Calibrated(self.setup.calibrated).artefacts)
        return self._at


@dataclass
class _Loaded:
    """A model with one prompt for ratios and speeds, and the evaluators once they are needed."""

    setup: Setup
    engine: Engine
    artefacts: Artefacts
    _prepared: dict[str, Prepared] | None = None

    def __post_init__(self) -> None:
        ids = self.engine.tokenize(self.setup.texts[0].text)[: max(SAMPLE_TOKENS, self.setup.prompt_tokens)]
        self.engine.prefill(HELD, ids)
        self.estimator = RatioEstimator(self.engine.spec, self.read, self.artefacts, len(ids))

    def read(self, at: Region) -> torch.Tensor:
        return self.engine.gather(HELD, at)

    @property
    def evaluators(self) -> dict[str, Prepared]:
        if self._prepared is None:
            self._prepared = self._prepare()
        return self._prepared

    def _prepare(self) -> dict[str, Prepared]:
        found: dict[str, Prepared] = {}
        with ExitStack() as held:  # what one holds is released when a later one refuses
            for spec in self.setup.evaluators:
                found[spec.name] = evaluator_of(spec, self.setup.quick).prepare(self.engine, self.setup.texts)
                held.callback(found[spec.name].close)
            held.pop_all()
        return found

    def measure(self, point: Point) -> Measurement:
        evaluators, began, cpu = self.evaluators, time.monotonic(), time.process_time()
        try:
            made = self._measure(point, evaluators)
        except KVServeError as error:
            made = Measurement(key=point.key, error=str(error))
        metrics = made.metrics | {CPU_S: (time.process_time() - cpu,) * 3}
        return msgspec.structs.replace(made, seconds=time.monotonic() - began, metrics=metrics)

    def _measure(self, point: Point, evaluators: Mapping[str, Prepared]) -> Measurement:
        estimate = self.estimator.ratio(point.spec)
        pipeline, artefacts = self.pipeline(point)
        roundtrip = FrameRoundtrip(pipeline, artefacts)
        found = {name: prepared.run(roundtrip) for name, prepared in evaluators.items()}
        if not roundtrip.raw_bytes:
            message = "sent no prompt through the pipeline; add an evaluator that does"
            raise ConfigError(message, f"evaluators.{', '.join(found)}")
        timed = [*self.timings(pipeline, artefacts), *(roundtrip.timings if self.setup.reuse else ())]
        encode, decode = fitted(timed) if timed else (Speed(), Speed())
        quality, metrics = judged(found)
        return Measurement(
            key=point.key,
            quality=quality.mean,
            quality_low=quality.low,
            quality_high=quality.high,
            cr=roundtrip.cr,
            cr_estimate=estimate,
            encode=encode,
            decode=decode,
            metrics=metrics,
            samples=min(evaluation.samples for evaluation in found.values()),
        )

    def pipeline(self, point: Point) -> tuple[Pipeline, Artefacts]:
        kv, artefacts = self.engine.spec, self.artefacts.fresh()
        built = Pipeline.build(point.spec, kv, whole(kv), artefacts=artefacts, path=f"profiles.{point.name}")
        return built, artefacts

    def timings(self, pipeline: Pipeline, artefacts: Artefacts) -> list[Timing]:
        """In processor time: the engine computes in one thread, and a search shares the machine with others."""
        setup = self.setup
        return timings(pipeline, self.read, artefacts, setup.lengths, setup.repeats, time.process_time)

    def close(self) -> None:
        for prepared in (self._prepared or {}).values():
            prepared.close()
        self.engine.release(HELD)


def evaluator_of(spec: ComponentSpec, quick: int | None) -> Evaluator:
    """The evaluator, or its quick variant of so many samples.

    Raises:
        ConfigError: there is no such evaluator, or it refuses its configuration.
    """
    made: Evaluator = default_registry().create("evaluator", spec, f"evaluators.{spec.name}")
    return made if quick is None else made.quick(quick)
