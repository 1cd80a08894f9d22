"""The prefill process: prefill, choose, encode, publish; learn from the consumer's report."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvserve_core.artefacts import NONE
from kvserve_core.component import ComponentSpec
from kvserve_core.controller import Controller
from kvserve_core.errors import KVServeError, TransferTimeout
from kvserve_core.library import ProfileLibrary
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Decision, Outcome, ServiceContext
from kvserve_core.registry import default_registry
from kvserve_core.session import Failed, Producer
from kvserve_core.spec import Region, whole
from kvserve_core.transport import Locator, Transport
from kvserve_core.units import format_bandwidth
from kvserve_hf.demo.messages import (
    Answer,
    Failure,
    Prefill,
    Prefilled,
    Publish,
    Published,
    Request,
    SetLink,
    Settle,
)
from kvserve_hf.engine import Engine

SETTLE_S = 60.0
CHUNK = 256


@dataclass(frozen=True)
class Setup:
    """What the process is started with."""

    model: Path
    library: Path | None
    min_quality: float
    policy: ComponentSpec


def main(connection: Connection, setup: Setup) -> None:
    """Answer requests until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process, which then ends this one
    torch.set_num_threads(1)
    with connection:
        try:
            side = PrefillSide(setup)
            connection.send(None)
        except KVServeError as error:
            connection.send(Failure(str(error)))
            return
        while True:
            try:
                request = connection.recv()
            except EOFError:
                side.close()
                return
            try:
                connection.send(side.answer(request))
            except KVServeError as error:
                connection.send(Failure(str(error)))


class PrefillSide:
    """Engine, pipelines, and per link a transport, a producer and a controller."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._engine = Engine.load(setup.model)
        self._library = ProfileLibrary.load(setup.library) if setup.library else None
        self._registry = default_registry()
        if self._library is not None:
            self._library.check(self._registry.create)
        self._pipelines = self._build()
        self._prompts: dict[str, str] = {}
        self._decisions: dict[str, Decision] = {}
        self._lengths: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._outcomes: dict[str, Outcome | Failed] = {}
        self._transport: Transport | None = None
        self._producer: Producer | None = None
        self._controller = self._new_controller(1e9)

    def _build(self) -> Mapping[str, Pipeline]:
        spec = self._engine.spec
        artefacts = self._library.artefacts if self._library else NONE
        return {
            p.name: Pipeline.build(p.pipeline, spec, whole(spec), artefacts=artefacts, path=f"profiles.{p.name}")
            for p in self._new_controller(1e9).profiles
        }

    def _new_controller(self, prior: float) -> Controller:
        return Controller(
            self._library,
            self._registry.create("policy", self._setup.policy),
            min_quality=self._setup.min_quality,
            prior_bandwidth=prior,
            fingerprint=self._engine.spec.fingerprint,
        )

    def answer(self, request: Request) -> Answer:
        """Do one thing that the other process asks for."""
        match request:
            case SetLink():
                return self._set_link(request)
            case Prefill():
                return self._prefill(request)
            case Publish():
                return self._publish(request)
            case Settle():
                return self._settle(request.transfer_id)

    def _set_link(self, request: SetLink) -> None:
        self.close()
        limit = {} if request.max_bytes_per_s is None else {"max_bandwidth": request.max_bytes_per_s}
        self._transport = self._registry.create("transport", {"name": "tcp", "configuration": limit})
        self._producer = Producer(self._pipelines, self._transport, self._gather)
        self._controller = self._new_controller(request.prior_bytes_per_s)

    def _gather(self, transfer_id: str, at: Region) -> torch.Tensor:
        return self._engine.gather(self._prompts[transfer_id], at)

    def _prefill(self, request: Prefill) -> Prefilled:
        done = self._engine.prefill(request.prompt, request.ids, chunk=CHUNK)
        self._lengths[request.prompt], self._seconds[request.prompt] = done.num_tokens, done.seconds
        return Prefilled(done.seconds)

    def _publish(self, request: Publish) -> Published:
        total = self._lengths[request.prompt]
        context = ServiceContext(
            nbytes=total * self._engine.spec.token_bytes(), model_s=self._seconds[request.prompt], link="decode"
        )
        decision = self._controller.choose(context)
        if request.forced is not None:
            decision = Decision(request.forced, "forced: the baseline of this table", context, decision.bandwidth)
        else:
            self._decisions[request.transfer_id] = decision
        self._prompts[request.transfer_id] = request.prompt
        producer = self._session()
        endpoint = producer.open(request.transfer_id, total, decision)
        producer.ready(request.transfer_id, range(total))
        locator = Locator(request.transfer_id, total, (endpoint,), decision.profile)
        reason = f"{decision.reason} at {format_bandwidth(decision.bandwidth)}"
        return Published(locator, reason, decision.explain())

    def _settle(self, transfer_id: str) -> Outcome:
        until = time.monotonic() + SETTLE_S
        while transfer_id not in self._outcomes:
            if time.monotonic() > until:
                raise TransferTimeout(f"no report for transfer {transfer_id!r} within {SETTLE_S:g} s")
            for event in self._session().poll():
                if isinstance(event, Outcome | Failed):
                    self._outcomes[event.transfer_id] = event
            time.sleep(0.001)
        outcome = self._outcomes.pop(transfer_id)
        if isinstance(outcome, Failed):
            raise KVServeError(f"transfer {transfer_id!r} failed: {outcome.reason}")
        decision = self._decisions.pop(transfer_id, None)
        if decision is not None:
            self._controller.observe(decision, outcome)
        return outcome

    def _session(self) -> Producer:
        if self._producer is None:
            raise KVServeError("no link was set; send SetLink first")
        return self._producer

    def close(self) -> None:
        """Stop serving the current link."""
        if self._producer is not None and self._transport is not None:
            self._producer.close()
            self._transport.close()
        self._producer = self._transport = None
