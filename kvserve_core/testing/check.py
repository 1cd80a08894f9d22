"""What a check is, how it is run, and what comes of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvserve_core.component import Kind
from kvserve_core.errors import KVServeError, UnsupportedSpecError
from kvserve_core.testing.subject import CheckFailed, Skipped, Subject

STAGES: tuple[Kind, ...] = ("transform", "quantizer", "codec")
VALUES: tuple[Kind, ...] = ("transform", "quantizer")
FOREIGN = "its calibrated files are for another model than the kit's; set 'model', 'plane' and 'sample' in a test"


@dataclass(frozen=True)
class Check:
    """One demand on a component. ``when``: whether it is made of this one, asked of its capabilities."""

    name: str
    kinds: tuple[Kind, ...]
    demand: Callable[[Subject], None]
    when: Callable[[Subject], bool]

    @property
    def about(self) -> str:
        """What is demanded, in one line."""
        return (inspect.getdoc(self.demand) or "").partition("\n")[0]

    def applies(self, subject: Subject) -> bool:
        """Whether ``subject`` must pass it."""
        return subject.kind in self.kinds and self.when(subject)

    def __call__(self, subject: Subject) -> None:
        """Run it.

        Raises:
            CheckFailed: the demand is not met. Skipped: it cannot be checked here.
        """
        if reason := subject.obstacle():
            raise Skipped(reason)
        try:
            self.demand(subject)
        except UnsupportedSpecError as error:
            if subject.unplaced:
                raise Skipped(f"{FOREIGN} ({error})") from error
            raise


@dataclass(frozen=True)
class Result:
    """What came of one check."""

    check: str
    status: Literal["ok", "skipped", "failed"]
    detail: str


def always(subject: Subject) -> bool:
    """For demands on every component of a kind."""
    del subject
    return True


def check(*kinds: Kind, when: Callable[[Subject], bool] = always) -> Callable[[Callable[[Subject], None]], Check]:
    """Make a function a demand on these kinds; its name and first docstring line are what is reported."""
    return lambda demand: Check(demand.__name__, kinds, demand, when)


def result(each: Check, subject: Subject) -> Result:
    """Run one check; whatever the component raises is a failure, with its type and message, SystemExit too."""
    try:
        each(subject)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a component that exits must not end the run with its own exit code
        return _ended(each.name, error)
    return Result(each.name, "ok", each.about)


def _ended(name: str, error: BaseException) -> Result:
    if isinstance(error, Skipped):
        return Result(name, "skipped", str(error))
    if isinstance(error, CheckFailed):
        return Result(name, "failed", str(error))
    expected = "" if isinstance(error, KVServeError) else "unexpected "
    return Result(name, "failed", f"{expected}{type(error).__name__}: {error}")
