"""All runs of the demo: for every link two warm-up fetches, then every prompt as chosen and raw."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.errors import KVServeError, PeerLost
from kvserve_core.policy import RAW, Outcome
from kvserve_core.transport import Locator
from kvserve_hf.demo import prefill
from kvserve_hf.demo.decode import Answered, DecodeSide, quality_of
from kvserve_hf.demo.links import Link
from kvserve_hf.demo.messages import Answer, Failure, Prefill, Prefilled, Publish, Published, Request, SetLink, Settle
from kvserve_hf.engine import Engine
from kvserve_hf.texts import Prompt

WARM_UPS = 2
MAX_TOKENS = 32
START_S = 120.0
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One line of the tables, in seconds. Both TTFTs are the prompt's prefill (done once) + choose .. first token."""

    link_bps: float | None
    prompt: str
    profile: str
    reason: str
    cr: float
    wire_bytes: int
    raw_bytes: int
    encode_s: float
    transfer_s: float
    decode_s: float
    ttft_s: float
    raw_ttft_s: float
    kl: float
    top1: float
    same_text: bool
    text: str
    explained: str

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class PrefillProcess:
    """The other process, as calls."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, request: Request) -> Answer:
        """Send a request and wait for its answer.

        Raises:
            KVServeError: the other side failed. PeerLost: it died.
        """
        try:
            self._connection.send(request)
            return checked(self._connection.recv())
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise PeerLost("the prefill process died; run with KVSERVE_TRACEBACK=1 to see its output") from error


def checked(answer: Answer) -> Answer:
    """The answer, or its failure raised."""
    if isinstance(answer, Failure):
        raise KVServeError(answer.error)
    return answer


@contextmanager
def prefill_process(setup: prefill.Setup) -> Iterator[PrefillProcess]:
    """Start the prefill process; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill.main, args=(theirs, setup), name="kvserve-prefill", daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise PeerLost(f"the prefill process did not start within {START_S:g} s")
        checked(ours.recv())
        yield PrefillProcess(ours)
    except EOFError as error:
        raise PeerLost("the prefill process died while starting") from error
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


class Demo:
    """Runs links x prompts; ``progress`` is told what happens next."""

    def __init__(
        self,
        peer: PrefillProcess,
        engine: Engine,
        prompts: Sequence[Prompt],
        progress: Progress,
        artefacts: Artefacts = NONE,
    ) -> None:
        self._peer, self._engine, self._progress = peer, engine, progress
        self._decode = DecodeSide(engine, artefacts)
        self._ids = {p.name: engine.tokenize(p.text, chat=True) for p in prompts}
        self._prefill_s: dict[str, float] = {}
        self._reference: dict[str, Answered] = {}
        self._count = 0

    def steps(self, links: Sequence[Link]) -> int:
        """How often ``progress`` will be called."""
        return 2 * len(self._ids) + len(links) * (1 + 2 * len(self._ids))

    def references(self) -> None:
        """Prefill every prompt, and answer it from uncompressed KV fetched over an unlimited link."""
        self._peer.ask(SetLink(None, 1e9))
        for name, ids in self._ids.items():
            self._progress(f"prefill {name}: {len(ids)} tokens")
            answer = self._peer.ask(Prefill(name, tuple(ids[:-1])))
            if isinstance(answer, Prefilled):
                self._prefill_s[name] = answer.seconds
            self._progress(f"reference answer to {name}")
            self._reference[name] = self._answer(name, RAW)[0]

    def link(self, link: Link) -> list[Run]:
        """Warm up, then answer every prompt with the controller's choice and with raw."""
        self._peer.ask(SetLink(link.bytes_per_s, link.prior_bytes_per_s))
        self._progress(f"{link.name}: {WARM_UPS} warm-up fetches")
        for _ in range(WARM_UPS):
            published: list[Published] = []
            self._decode.warm_up(self._publisher(self._warm_up_prompt(), None, published))
            self._peer.ask(Settle(published[0].locator.transfer_id))
        return [self._run(link, name) for name in self._ids]

    def _warm_up_prompt(self) -> str:
        """The longest prompt: on a fast link a short one shows latency, not bandwidth."""
        return max(self._ids, key=lambda name: len(self._ids[name]))

    def _run(self, link: Link, name: str) -> Run:
        self._progress(f"{link.name}: {name}, as chosen")
        chosen, published, outcome = self._answer(name, None)
        self._progress(f"{link.name}: {name}, raw")
        raw, *_ = self._answer(name, RAW)
        reference, last = self._reference[name], self._ids[name][-1]
        quality = quality_of(name, reference, chosen, last)
        return Run(
            link_bps=link.bits_per_s,
            prompt=name,
            profile=published.locator.profile,
            reason=published.reason,
            cr=outcome.raw_bytes / outcome.wire_bytes,
            wire_bytes=outcome.wire_bytes,
            raw_bytes=outcome.raw_bytes,
            encode_s=outcome.encode_s,
            transfer_s=outcome.transfer_s,
            decode_s=outcome.decode_s,
            ttft_s=self._prefill_s[name] + chosen.first_token_s,
            raw_ttft_s=self._prefill_s[name] + raw.first_token_s,
            kl=quality.kl,
            top1=quality.top1,
            same_text=chosen.ids == reference.ids,
            text=self._engine.detokenize(chosen.ids),
            explained=published.explained,
        )

    def _answer(self, name: str, forced: str | None) -> tuple[Answered, Published, Outcome]:
        published: list[Published] = []
        reference = self._reference.get(name)
        answered = self._decode.answer(
            self._publisher(name, forced, published),
            self._ids[name][-1],
            MAX_TOKENS,
            None if reference is None else reference.ids,
        )
        settled = self._peer.ask(Settle(published[0].locator.transfer_id))
        if not isinstance(settled, Outcome):
            raise KVServeError(f"the prefill process answered {settled!r} to Settle")
        return answered, published[0], settled

    def _publisher(self, name: str, forced: str | None, into: list[Published]) -> Callable[[], Locator]:
        def publish() -> Locator:
            self._count += 1
            answer = self._peer.ask(Publish(f"demo-{self._count}", name, forced))
            if not isinstance(answer, Published):
                raise KVServeError(f"the prefill process answered {answer!r} to Publish")
            into.append(answer)
            return answer.locator

        return publish

    def close(self) -> None:
        """Stop the decode side."""
        self._decode.close()
