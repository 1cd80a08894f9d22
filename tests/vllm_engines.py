"""A real vLLM engine in a process of its own, as calls: two connectors cannot live in one process.

The engine itself runs in that process (no further one), so that tests can look into its scheduler and its worker.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_S = 600.0
CALL_S = 600.0
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "kvserve",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
CONNECTOR = {"kv_connector": "KVServeConnector", "kv_connector_module_path": "kvserve_vllm.connector"}


@dataclass(frozen=True)
class Answer:
    """One request's result."""

    tokens: list[int]
    finish: str | None
    params: dict[str, Any] | None
    logprobs: list[dict[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Setup:
    """How an engine is started. role: None for one without a connector. beside: further connectors, after ours."""

    model: Path
    role: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "recompute"
    llm: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[Mapping[str, Any], ...] = ()


class EngineProcess:
    """Starts at once; the first call waits until the engine is up."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = dict(os.environ)
        os.environ.update({**ENVIRONMENT, **setup.env})
        try:
            self._process = context.Process(target=_main, args=(theirs, setup), name="engine")
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        self._up = False

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(llm, *args)`` in the engine's process; a failure there is raised here."""
        if not self._up:
            self._answer(START_S)
            self._up = True
        self._pipe.send((function, args))
        return self._answer(CALL_S)

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"the engine did not answer within {seconds:g} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise RuntimeError(value)
        return value

    def kill(self) -> None:
        """As a crash: nothing is closed."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _main(pipe: Connection, setup: Setup) -> None:
    try:
        llm = _start(setup)
        pipe.send((True, None))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            llm.llm_engine.engine_core.shutdown()
            os._exit(0)  # vLLM's own exit handlers may wait for peers that are gone
        try:
            pipe.send((True, function(llm, *args)))
        except Exception:  # noqa: BLE001  # a failed test step is told to the test
            pipe.send((False, traceback.format_exc()))


def _start(setup: Setup) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    given: dict[str, Any] = {
        "model": str(setup.model),
        "dtype": "float32",
        "max_model_len": 2048,
        "block_size": 32,
        "enforce_eager": True,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        **setup.llm,
    }
    if setup.role is not None:
        common = {"kv_role": setup.role, "kv_load_failure_policy": setup.policy}
        ours = {**CONNECTOR, **common, "kv_connector_extra_config": dict(setup.extra)}
        several = {"connectors": [ours, *map(dict, setup.beside)]}
        multi = {"kv_connector": "MultiConnector", **common, "kv_connector_extra_config": several}
        given["kv_transfer_config"] = KVTransferConfig(**(multi if setup.beside else ours))
    return LLM(**given)


def generate(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    params: Sequence[Mapping[str, Any] | None] | None = None,
    logprobs: int | None = None,
) -> list[Answer]:
    """Greedy answers, with ``kv_transfer_params`` by prompt."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            extra_args={"kv_transfer_params": dict(p)} if p else None,
        )
        for p in (params or [None] * len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
    return [
        Answer(
            list(o.outputs[0].token_ids),
            o.outputs[0].finish_reason,
            o.kv_transfer_params,
            [{t: x.logprob for t, x in step.items()} for step in o.outputs[0].logprobs or ()],
        )
        for o in outputs
    ]


def forget(llm: Any) -> bool:
    """Empty the prefix cache."""
    settle(llm)
    return bool(llm.reset_prefix_cache())


def settle(llm: Any, steps: int = 200) -> None:
    """Let the engine step until it holds no request and its workers have nothing more to say."""
    import time

    core = llm.llm_engine.engine_core.engine_core
    for _ in range(steps):
        core.step_fn()
        if not core.scheduler.requests:
            return
        time.sleep(0.01)


def external_tokens(llm: Any) -> int:
    """Prompt tokens that vLLM itself counts as coming from a connector."""
    found = 0
    for metric in llm.get_metrics():
        if metric.name == "vllm:prompt_tokens_by_source" and metric.labels.get("source") == "external_kv_transfer":
            found += int(metric.value)
    return found


def used_blocks(llm: Any) -> int:
    """Blocks of the engine's pool that some request holds."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def counters(llm: Any) -> dict[str, int]:
    """What this engine's connector counted: transfers released by their consumers, bytes, fallbacks."""
    return dict(worker_side(llm)._deployment.counters.snapshot())


def worker_side(llm: Any) -> Any:
    """The worker half of the connector, in an engine of one rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return _ours(get_kv_transfer_group())._worker


def scheduler_side(llm: Any) -> Any:
    """The scheduler half."""
    return _ours(llm.llm_engine.engine_core.engine_core.scheduler.connector)._scheduler


def _ours(connector: Any) -> Any:
    """The connector itself, or the first of several."""
    return getattr(connector, "_connectors", [connector])[0]


def held(llm: Any) -> dict[str, int]:
    """Everything that must be nothing once no request is left."""
    settle(llm)
    worker, scheduler = worker_side(llm), scheduler_side(llm)
    found = {"blocks": used_blocks(llm), "params": len(scheduler._params), "lossy": len(scheduler._pollution._lossy)}
    if worker.offers is not None:
        found |= {"offers": worker.offers.held, "wanted": len(scheduler._offering._wanted)}
        found |= {"unsettled": len(scheduler._offering._unsettled), "bytes": worker._producer.budget.held_bytes}
    if worker.loads is not None:
        found |= {"loads": worker.loads.active, "fetches": len(scheduler._fetching._wanted)}
        found |= {"loading": len(scheduler._fetching._loading)}
    return found


def metrics(llm: Any) -> dict[str, float]:
    """kvserve's metrics in the engine's registry: values of counters and gauges, counts of histograms."""
    from prometheus_client import REGISTRY

    del llm
    found: dict[str, float] = {}
    for metric in REGISTRY.collect():
        wanted = {"counter": "_total", "gauge": "", "histogram": "_count"}.get(metric.type)
        if not metric.name.startswith("kvserve:") or wanted is None:
            continue
        for sample in metric.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name"))
            if sample.name == metric.name + wanted:
                found[f"{metric.name}{{{labels}}}"] = sample.value
    return found
