"""From a pool, a model and the settings to the two sides of a rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kvserve_core.controller import Controller
from kvserve_core.deployment import Deployment
from kvserve_core.errors import ConfigError
from kvserve_core.model import model_id
from kvserve_core.pipeline import Pipeline
from kvserve_core.settings import Settings, load_settings
from kvserve_core.spec import KVSpec, Shard
from kvserve_sglang import pools
from kvserve_sglang.layout import Layout
from kvserve_sglang.spec import model_spec, transfer_spec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """What of a running SGLang the adapter is told. window: tokens of a sliding-window pool that it sends."""

    pool: Any
    config: Mapping[str, Any]
    model: str
    window: int | None = None

    @classmethod
    def of(cls, queue: Any) -> Engine:
        """From the queue that made the manager."""
        scheduler = queue.scheduler
        config = scheduler.model_config.hf_text_config.to_dict()
        identity = model_id(folder(scheduler.model_config.model_path))
        return cls(queue.token_to_kv_pool, config, identity, getattr(scheduler, "sliding_window_size", None))


def folder(model_path: str) -> Path:
    """The local folder of a model, which SGLang has loaded by now.

    Raises:
        ConfigError: there is none.
    """
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"the weights of {model_path!r} are in no local folder, and kvserve tells models apart by them; download"
            " the model and serve its folder"
        ) from error


class TransferDeployment(Deployment):
    """A model's deployment for what SGLang exchanges: libraries, and so the controller, know the model's cache only."""

    def __init__(self, model: Deployment, kv: KVSpec) -> None:
        super().__init__(model.settings, kv, model.library, model.registry, model.counters)
        self._model = model

    @cached_property
    def controller(self) -> Controller:
        """The model's."""
        return self._model.controller


def check_policy(deployment: Deployment) -> None:
    """Make what decides while the server starts: a policy or classifier that cannot be had is no request's failure.

    Raises:
        ConfigError: as the deployment does.
    """
    log.info("kvserve decides by the policy %r", deployment.settings.policy.name)
    _ = deployment.controller, deployment.classifier


class RankSetup:
    """Everything of one rank that does not depend on its role."""

    def __init__(self, engine: Engine, manager: Any, settings: Settings | None = None) -> None:
        pools.check_pool(engine.pool)
        self.engine, self.manager = engine, manager
        self.settings = settings or load_settings().settings
        self.device = torch.device(engine.pool.device)
        self.window = engine.window if pools.windowed(engine.pool) else None

    @cached_property
    def model(self) -> KVSpec:
        """What every engine says of this model."""
        pool = self.engine.pool
        attention = pools.cache_layers(pool) if hasattr(pool, "full_attention_layer_id_mapping") else None
        return model_spec(self.engine.config, pools.store_dtype(pool), self.engine.model, attention)

    @cached_property
    def kv(self) -> KVSpec:
        """What two SGLang servers exchange."""
        args = self.manager.kv_args
        states = pools.states(args, self.manager.attn_tp_size)
        return transfer_spec(self.model, sum(args.aux_item_lens), self._num_layers, states, self.window)

    @property
    def _num_layers(self) -> int:
        return int(self.engine.config["num_hidden_layers"])

    @cached_property
    def shard(self) -> Shard:
        """The layers of this pipeline stage; the last one has the auxiliary row."""
        m = self.manager
        layers = list(pools.cache_layers(self.engine.pool))
        for component in m.kv_args.state_layer_ids:
            layers += component
        if m.pp_rank == m.pp_size - 1:
            layers.append(self._num_layers)
        return Shard(tuple(sorted(set(layers))), m.attn_tp_rank, m.attn_tp_size)

    @cached_property
    def layout(self) -> Layout:
        """Gather and scatter over this rank's pools."""
        lanes = pools.lanes(self.engine.pool, self.kv, self.shard, self.manager.kv_args)
        return Layout(self.kv, self.shard, lanes, self.device)

    @cached_property
    def deployment(self) -> Deployment:
        """For what is exchanged."""
        return TransferDeployment(Deployment.load(self.settings, self.model), self.kv)

    @cached_property
    def pipelines(self) -> dict[str, Pipeline]:
        """By profile."""
        return self.deployment.pipelines(self.shard, self.device)

    def close(self) -> None:
        """Close what was made; what could not be made is not tried again."""
        made = vars(self).get("deployment")
        if made is not None:
            made.close()

    @property
    def holds(self) -> dict[str, str]:
        """What must be equal on both sides, by a name that an operator knows."""
        args = self.manager.kv_args
        return {
            "model": self.model.model_id,
            "KV cache dtype": str(pools.store_dtype(self.engine.pool)),
            "metadata buffers": " ".join(map(str, args.aux_item_lens)),
            "state components": " ".join(kind.value for kind in args.state_types) or "none",
            "state over tensor-parallel ranks": str(self.manager.attn_tp_size) if self._has_state else "any",
            "sliding window": str(self.window),
        }

    @property
    def _has_state(self) -> bool:
        return bool(pools.states(self.manager.kv_args, 1))
