"""What ``kvserve profile`` is asked for, checked before hours go by."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from kvserve_core.component import config_error
from kvserve_core.errors import ConfigError, UnknownNameError, did_you_mean
from kvserve_core.latency import Speed
from kvserve_core.library import Profile
from kvserve_core.library_files import SUFFIX
from kvserve_core.profile import PipelineSpec
from kvserve_core.profiling.executor import EXECUTORS
from kvserve_core.profiling.journal import forget
from kvserve_hf.bench.pipelines import Calibrated
from kvserve_hf.measured import read_pipelines
from kvserve_hf.profile.objective import Setup, evaluator_of
from kvserve_hf.profile.run import KEPT_SUFFIX


def journal_path(out: Path, resume: Path | None) -> Path:
    """The journal to go on from, or a new one beside the library.

    Raises:
        ConfigError: there is none to go on from.
    """
    if resume is not None:
        if not resume.exists():
            raise ConfigError(f"there is no journal {str(resume)!r}; leave the option out to begin anew", "resume")
        return resume
    return out.with_name(out.name + ".journal.jsonl")


def begin_anew(journal: Path) -> None:
    """Forget what an earlier run to the same place left.

    Raises:
        ConfigError: that run is still at it.
    """
    for old in (journal, journal.with_name(journal.name + KEPT_SUFFIX)):
        forget(old)


def require_known(executor: str, setup: Setup) -> None:
    """That there is such an executor, and that the evaluators can be made.

    Raises:
        ConfigError: the message names those there are, or the field that is wrong.
    """
    if executor not in EXECUTORS:
        raise UnknownNameError(did_you_mean(executor, EXECUTORS, "executor"))
    for spec in setup.evaluators:
        evaluator_of(spec, None)


def require_place(out: Path) -> None:
    """That the library can be written, before hours go by.

    Raises:
        ConfigError: something else is there, or its folder cannot be made.
    """
    if out.exists() and out.is_dir() == (out.suffix == SUFFIX):
        wanted = "a file" if out.suffix == SUFFIX else f"a folder; end the name in {SUFFIX!r} for one file"
        raise ConfigError(f"{str(out)!r} is there already, and the library would be {wanted}", "out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the library cannot be written: {error}", "out") from error


def named_pipelines(path: Path, calibrated: Path | None) -> dict[str, PipelineSpec]:
    """Pipelines of a file, under names that profiles may have.

    Raises:
        ConfigError: it cannot be read, or a name is none.
    """
    found = read_pipelines(path, Calibrated(calibrated))
    for name, spec in found.items():
        given = {"name": name, "pipeline": spec, "cr": 1.0, "encode": Speed(), "decode": Speed()}
        try:
            Profile.model_validate(given)
        except ValidationError as error:
            raise config_error(error, Profile, given).under(f"{path}: {name!r}") from None
    return found
