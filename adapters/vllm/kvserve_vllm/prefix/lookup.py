"""What a store holds of a prompt, at which quality, and whether loading it is faster than computing it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kvserve_core.deployment import Deployment
from kvserve_core.policy import RAW, Decision, ServiceContext
from kvserve_core.prefix import CLASSES, classes_for, quality_class, stored_key
from kvserve_core.requests import RequestOptions
from kvserve_core.spec import SEGMENT_TOKENS
from kvserve_core.transport import Store
from kvserve_vllm.prefix.keys import Keys
from kvserve_vllm.prefix.meta import Names

log = logging.getLogger(__name__)
MAX_UNREADABLE = 65536
"""Names of cells remembered as not decodable here."""


@dataclass(frozen=True)
class Hit:
    """Cells in a row that are stored: names and quality class by the number of the cell. stop: tokens of use."""

    names: dict[int, Names]
    classes: dict[int, float]
    stop: int

    @property
    def quality(self) -> float:
        """Of the worst cell."""
        return min(self.classes.values())

    @property
    def first_lossy(self) -> int | None:
        """The first token that is not exact."""
        return next((i * SEGMENT_TOKENS for i in sorted(self.classes) if self.classes[i] < 1.0), None)


def names_of(keys: Keys, cell: int, quality: float) -> Names:
    """The names of one cell's objects at a quality class."""
    return tuple(stored_key(of_rank[cell], quality) for of_rank in keys)


class Index:
    """What a store holds, asked from the scheduler's loop: reads headers only, and a store that fails holds nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._failing = False
        self._unreadable: OrderedDict[str, None] = OrderedDict()

    def unreadable(self, names: Iterable[str]) -> None:
        """These are there, but this side cannot decode them: it does not ask for them again. It leaves them to others:
        what it stores itself has names of its own."""
        for name in names:
            self._unreadable[name] = None
        while len(self._unreadable) > MAX_UNREADABLE:
            self._unreadable.popitem(last=False)

    def cells(self, keys: Keys, first: int, classes: Sequence[float]) -> dict[int, float]:
        """The quality class of each cell from ``first`` on, up to the first that no class has on every rank.

        The best class that has a cell serves it, as far as it goes.
        """
        found: dict[int, float] = {}
        count = len(keys[0])
        while (at := first + len(found)) < count:
            run, quality = self._longest(keys, range(at, count), classes)
            if run == 0:
                break
            found.update((i, quality) for i in range(at, at + run))
        return found

    def _longest(self, keys: Keys, wanted: range, classes: Sequence[float]) -> tuple[int, float]:
        for quality in classes:
            run = min(self._readable([stored_key(of_rank[i], quality) for i in wanted]) for of_rank in keys)
            if run:
                return run, quality
        return 0, 0.0

    def holds(self, keys: Keys, cell: int, quality: float) -> bool:
        """Whether a cell is there at this class or a better one."""
        better = [known for known in CLASSES if known >= quality]
        return any(self._leading(names_of(keys, cell, known)) == len(keys) for known in better)

    def _readable(self, names: Sequence[str]) -> int:
        if self._unreadable:
            names = list(takewhile(lambda name: name not in self._unreadable, names))
        return self._leading(names) if names else 0

    def _leading(self, names: Sequence[str]) -> int:
        try:
            count = self._store.contains(names)
        except Exception as error:  # noqa: BLE001  # a store that is away must not end the engine's loop
            if not self._failing:
                log.warning("the prefix store does not answer, prompts are computed: %s", error)
            self._failing = True
            return 0
        self._failing = False
        return count


class Prices:
    """Which profile stores a request's prefix, and what loading takes. link: under which name goodput is kept.

    acceptable: profiles that every rank can encode and every reader decode.
    """

    def __init__(self, deployment: Deployment, link: str) -> None:
        self._deployment, self.link = deployment, link
        self.acceptable: frozenset[str] = frozenset({RAW})
        self._profiles = {profile.name: profile for profile in deployment.controller.profiles}

    def floor(self, options: RequestOptions) -> float:
        """The worst quality class that serves a request."""
        lowest = self._deployment.settings.min_quality if options.min_quality is None else options.min_quality
        return classes_for(lowest)[-1]

    def quality(self, profile: str) -> float:
        """Of a profile, whoever will read."""
        return self._profiles[profile].worst_quality

    def stored_class(self, profile: str, held: float) -> float:
        """The class of a cell that a profile encodes, computed after KV of quality ``held`` (1.0: exact)."""
        return quality_class(self.quality(profile) * held, exact=self._profiles[profile].exact and held == 1.0)

    def choose(self, options: RequestOptions, tokens: int, held: float) -> Decision:
        """How to store a request's cells, so that requests like it can read them; exactly, where loss would sum up."""
        decision = self._choose(options, tokens, self.floor(options), self.acceptable)
        if self.stored_class(decision.profile, held) < self.floor(options):
            decision = self._choose(options, tokens, 1.0, self.acceptable)
        return decision

    def pays(self, options: RequestOptions, tokens: int, quality: float) -> tuple[bool, str]:
        """``(loading is no slower than computing, the profile it is taken to be stored as)``.

        A name says the class of a cell and not its profile: the one that would be chosen for this class now stands
        for it.
        """
        profile = self._choose(options, tokens, quality, None).profile
        context = self._context(options, tokens, quality, None)
        return self._deployment.controller.decide_load(tokens, context, profile).action == "load", profile

    def _choose(
        self, options: RequestOptions, tokens: int, quality: float, acceptable: frozenset[str] | None
    ) -> Decision:
        return self._deployment.controller.choose(self._context(options, tokens, quality, acceptable))

    def _context(
        self, options: RequestOptions, tokens: int, quality: float, acceptable: frozenset[str] | None
    ) -> ServiceContext:
        asked = replace(options, min_quality=quality)
        return self._deployment.context(tokens, asked, link=self.link, acceptable=acceptable, store=True)
