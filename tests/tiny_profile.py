"""A tiny model that can be loaded in a worker process, texts for it, and a small space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvserve_core.component import ComponentSpec
from kvserve_core.evaluation.engine import Text
from kvserve_core.profile import PipelineSpec
from kvserve_core.profiling.families import SpaceConfig
from kvserve_core.profiling.point import Point
from kvserve_core.spec import DType
from kvserve_hf.engine import Engine
from kvserve_hf.profile.objective import ModelObjective, Setup
from tiny_models import VOCAB, make

SPACE = SpaceConfig.parse(
    {
        "families": [
            {
                "name": "levels",
                "planes": {
                    "*": {
                        "quantizer": [
                            {
                                "name": "uniform",
                                "configuration": {"axis": "token_head", "levels": {"$try": [4, 8, 16, 64]}},
                            }
                        ],
                        "codec": ["bitpack", "zstd"],
                    }
                },
                "layer_block": [3],
            }
        ]
    }
)


def load(folder: Path) -> Engine:
    """The same random model each time; a letter is a token."""
    del folder
    made = make("llama", DType.BF16)
    made.tokenize = lambda text, chat=False: [3 + ord(c) % (VOCAB - 3) for c in text]  # type: ignore[method-assign]  # a model without a tokenizer
    return made


def texts(count: int = 4) -> tuple[Text, ...]:
    """Random letters, as prose and code in turn."""
    g = torch.Generator().manual_seed(5)
    rows = [torch.randint(32, 120, (90,), generator=g).tolist() for _ in range(count)]
    return tuple(Text(f"t{i}", ("prose", "code")[i % 2], "".join(map(chr, row))) for i, row in enumerate(rows))


def setup(**more: Any) -> Setup:
    """Short texts, short timings."""
    short = {"prompt_tokens": 60, "continuation_tokens": 20}
    spec = ComponentSpec(name="continuation", configuration=short)
    given: dict[str, Any] = {"evaluators": (spec,), "lengths": (16, 60), "repeats": 1, "prompt_tokens": 60}
    return Setup(Path("tiny"), texts(), **(given | more))


def objective(**more: Any) -> ModelObjective:
    """One over the tiny model."""
    return ModelObjective(setup(**more), load)


def uniform(levels: int, codec: str = "bitpack", **more: Any) -> Point:
    """A candidate by hand."""
    quantizer = {"name": "uniform", "configuration": {"levels": levels, "axis": "token_head"}}
    spec = PipelineSpec.parse({"planes": {"*": {"quantizer": quantizer, "codec": codec}}, **more})
    return Point((("levels", levels),), spec, f"uniform-{levels}")
