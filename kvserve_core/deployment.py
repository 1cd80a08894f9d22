"""Settings turned into the objects that an engine adapter drives: library, controller, pipelines, sessions."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self, cast

import torch
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.component import ComponentSpec, Kind
from kvserve_core.controller import Controller
from kvserve_core.errors import ConfigError, KVServeError, UnavailableComponentError, did_you_mean
from kvserve_core.feasible import known_profiles
from kvserve_core.handshake import negotiate
from kvserve_core.host_codec import runs_on
from kvserve_core.library import Profile, ProfileLibrary
from kvserve_core.metrics import Counters
from kvserve_core.peer import PeerInfo
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import RAW, ServiceContext
from kvserve_core.registry import Registry, default_registry
from kvserve_core.requests import RequestOptions
from kvserve_core.self_test import measure_exact
from kvserve_core.session import Consumer, Gather, Producer, Scatter
from kvserve_core.settings import Settings
from kvserve_core.spec import KVSpec, Region, Shard, whole
from kvserve_core.transport import Store, Transport
from kvserve_core.workload import WorkloadClassifier, workload_of

CPU = torch.device("cpu")
PORTABLE = ("cpu", "cuda")
FAULT_ENV = "KVSERVE_FAULT"
FAULTS = ("", "zero")
"""Failures that a consumer can be told to inject; none where it is empty."""
log = logging.getLogger(__name__)


class Deployment:
    """One per engine process. The scheduler side uses ``controller`` and ``context``, a worker rank the sessions.

    refused: profiles that cannot run here, with the reason; filled by :meth:`pipelines`.
    """

    def __init__(
        self,
        settings: Settings,
        kv: KVSpec,
        library: ProfileLibrary | None = None,
        registry: Registry | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.settings, self.kv, self.library = settings, kv, library
        self.registry = registry or default_registry()
        self.counters = counters or Counters()
        self.refused: dict[str, str] = {}
        self._transports: dict[str, Transport] = {}
        self._anywhere: dict[str, bool] = {}

    @classmethod
    def load(cls, settings: Settings, kv: KVSpec, registry: Registry | None = None) -> Self:
        """Read the library that the settings name and check it against the installed components.

        Raises:
            ConfigError: it cannot be read, or names what is not installed; the path names the field.
        """
        made = cls(settings, kv, registry=registry)
        if settings.library is not None:
            made.library = ProfileLibrary.load(settings.library)
            made.library.check(made._can_create)
            if made.library.fingerprint != kv.fingerprint:
                log.warning(
                    "the library %r was measured on model %s (%s), this engine serves %s (%s): its lossy profiles are"
                    " not used",
                    str(settings.library),
                    made.library.model_id,
                    made.library.fingerprint[:12],
                    kv.model_id,
                    kv.fingerprint[:12],
                )
        return made

    def _can_create(self, kind: Kind, spec: ComponentSpec, path: str) -> None:
        """A wrong field is an error at start-up; a component that is not usable here only costs its profiles."""
        with contextlib.suppress(UnavailableComponentError):
            self.registry.create(kind, spec, path)

    @property
    def artefacts(self) -> Artefacts:
        """The calibrated files that came with the library."""
        return self.library.artefacts if self.library else NONE

    @cached_property
    def controller(self) -> Controller:
        """The one that decides; for the scheduler side. Without a library it measures the exact profiles first."""
        s = self.settings
        return Controller(
            self.library,
            self.registry.create("policy", s.policy, "policy"),
            min_quality=s.min_quality,
            prior_bandwidth=s.bandwidth,
            priors=s.priors,
            chunk_bytes=s.chunk_bytes,
            fingerprint=self.kv.fingerprint,
            allow_unprofiled=s.allow_unprofiled,
            self_test=self._self_test,
        )

    @cached_property
    def classifier(self) -> WorkloadClassifier | None:
        """What names the workload of a prompt, if the settings choose one."""
        spec = self.settings.classifier
        return None if spec is None else self.registry.create("workload", spec, "classifier")

    def _self_test(self) -> list[Profile]:
        try:
            return list(measure_exact(self.kv, whole(self.kv), CPU))
        except KVServeError as error:
            log.warning("the self-test failed, cautious speeds are assumed: %s", error)
            return []

    def pipelines(self, shard: Shard, device: torch.device = CPU, *, store: bool = False) -> dict[str, Pipeline]:
        """Every profile that can encode here; the others go to ``refused`` and the log. store: cells are keys there.

        Raises:
            KVServeError: not even ``raw`` can.
        """
        built: dict[str, Pipeline] = {}
        for profile in known_profiles(self.library):  # not the controller's: a worker has no use for one
            try:
                built[profile.name] = self.pipeline(profile if store else profile.on(device.type), shard, device)
            except KVServeError as error:
                if profile.name == RAW:
                    raise
                self.refused[profile.name] = str(error)
                log.warning("profile %r cannot be used here: %s", profile.name, error)
        return built

    def pipeline(self, profile: Profile, shard: Shard, device: torch.device) -> Pipeline:
        """One profile for a rank; for adapters to override whose cut is another.

        Raises:
            ConfigError, UnsupportedSpecError: it cannot run here; the path names the field.
        """
        path = f"profiles.{profile.name}"
        pipeline = Pipeline.build(
            profile.pipeline, self.kv, shard, device, self.registry, artefacts=self.artefacts, path=path
        )
        if absent := self.library.missing(profile) if self.library else ():
            raise ConfigError(f"the library lacks the artefacts {', '.join(a[:12] for a in absent)}", path)
        return pipeline

    def acceptable(self, pipelines: Mapping[str, Pipeline], peer: PeerInfo | None) -> frozenset[str]:
        """The profiles a consumer can decode: as it says itself, or as ``peers.accept`` assumes of an unknown one."""
        if peer is not None:
            return frozenset(name for name, refusal in negotiate(pipelines, peer).items() if refusal is None)
        if self.settings.peers.accept == "any":
            return frozenset(pipelines)
        return frozenset(name for name, pipeline in pipelines.items() if self._portable(pipeline))

    def _portable(self, pipeline: Pipeline) -> bool:
        return all(self._decodes_anywhere(stage) for chain in pipeline.chains for stage in chain)

    def _decodes_anywhere(self, stage: str) -> bool:
        """Of a stage such as ``codec:zstd@1``. Asked for every request, so it is remembered."""
        if stage not in self._anywhere:
            text, _, name = stage.rpartition("@")[0].partition(":")
            kind = cast(Kind, text)  # the pipeline made it from one
            decode_on = self.registry.load(kind, name).caps.decode_on
            self._anywhere[stage] = all(runs_on(kind, decode_on, device) for device in PORTABLE)
        return self._anywhere[stage]

    def context(
        self,
        num_tokens: int,
        options: RequestOptions = RequestOptions(),  # noqa: B008  # frozen
        *,
        link: str = "default",
        elapsed_s: float = 0.0,
        active: int | None = None,
        acceptable: frozenset[str] | None = None,
        store: bool = False,
        prompt: str = "",
    ) -> ServiceContext:
        """What the controller decides on, for a request of ``num_tokens`` prompt tokens.

        prompt: its text where it is known, for the classifier to name the workload that the request does not.
        """
        s = self.settings
        return ServiceContext(
            nbytes=num_tokens * self.kv.token_bytes(),
            workload=workload_of(prompt, options.workload, self.classifier, s.workload),
            slo_s=options.slo_s or s.slo,
            min_quality=options.min_quality,
            link=link,
            intent="store" if store else "transfer",
            acceptable=acceptable,
            tokens=num_tokens,
            output_tokens=options.output_tokens,
            elapsed_s=elapsed_s,
            slo_kind=options.slo_kind,
            active=active,
        )

    def transport(self, name: str = "") -> Transport:
        """The transport that the settings choose, or another one that they configure; one object each.

        Raises:
            ConfigError: no such transport, or a wrong field of its table.
        """
        name = name or self.settings.transport.name
        if name not in self._transports:
            self._transports[name] = self.registry.create(
                "transport", self.settings.transport.spec(name), f"transport.{name}"
            )
        return self._transports[name]

    def transport_for(self, address: str) -> Transport:
        """The transport that serves an address: the one named like its scheme."""
        return self.transport(address.partition("://")[0])

    def store(self, name: str = "") -> Store:
        """The chosen transport as a store.

        Raises:
            ConfigError: it does not persist what it is given.
        """
        found = self.transport(name)
        if not isinstance(found, Store):
            raise ConfigError(f"{name or self.settings.transport.name!r} keeps nothing; choose a store, e.g. 'file'")
        return found

    def producer(self, pipelines: Mapping[str, Pipeline], gather: Gather, transport: str = "") -> Producer:
        """The producing session of a rank."""
        s = self.settings
        return Producer(
            pipelines,
            self.transport(transport),
            gather,
            lease_s=s.lease,
            published_bytes_max=s.published_bytes_max,
            counters=self.counters,
            **self._on(next((p.device for p in pipelines.values()), CPU)),
        )

    def consumer(
        self,
        shard: Shard,
        scatter: Scatter,
        device: torch.device = CPU,
        *,
        everyone: Sequence[Shard] | None = None,
        link: str = "default",
    ) -> Consumer:
        """The consuming session of a rank. With ``KVSERVE_FAULT=zero`` it writes zeros: a test's negative control.

        Raises:
            ConfigError: ``KVSERVE_FAULT`` names another fault, so that a control would not control.
        """
        fault = os.environ.get(FAULT_ENV, "")
        if fault not in FAULTS:
            raise ConfigError(did_you_mean(fault, FAULTS, "fault"), FAULT_ENV)
        if fault == "zero":
            log.warning("%s=zero: every KV cache that is loaded is replaced by zeros", FAULT_ENV)
            scatter = _zeroing(scatter, self.kv)
        return Consumer(
            self.kv,
            shard,
            self.transport_for,
            scatter,
            registry=self.registry,
            artefacts=self.artefacts,
            device=device,
            everyone=everyone,
            link=link,
            counters=self.counters,
            **(self.settings.cpu.model_dump() if device.type == "cpu" else self._on(device)),
        )

    def _on(self, device: torch.device) -> dict[str, Any]:
        return self.settings.gpu.model_dump() if device.type == "cuda" else {}

    def close(self) -> None:
        """Close the transports; sessions are closed by who made them, before."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()


def _zeroing(scatter: Scatter, kv: KVSpec) -> Scatter:
    def zeros(transfer_id: str, at: Region, x: Tensor) -> None:
        cache = kv.group(at.group).unit == "token"  # an engine waits for ever on an empty auxiliary row
        scatter(transfer_id, at, torch.zeros_like(x) if cache else x)

    return zeros
