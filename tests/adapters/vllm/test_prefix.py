"""Prefixes in a store: a cold process restores what another one computed, and answers the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from blake3 import blake3

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec
from kvserve_vllm.prefix.keys import check_prefixes, prompt_keys
from kvserve_vllm.spec import ServedModel
from vllm_engines import EngineProcess, external_tokens, forget, generate, metrics, scheduler_side, settle
from vllm_prefixes import CELL, NEW_TOKENS, loaded_again, nothing_held, setup, untimed
from vllm_servers import wait_until

Folders = dict[str, Path]
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def prefixes(prompts: Prompts) -> Prompts:
    """Prompts with whole cells: 257, 700 and 1500 tokens, and exactly two cells."""
    return [*prompts[5:], prompts[7][200 : 200 + 2 * CELL]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def computed(folders: Folders, prefixes: Prompts, store: Path) -> Prompts:
    """What the first process answered; it stored its prompts and is gone."""
    with EngineProcess(setup(folders["llama"], store)) as first:
        answers = first.call(generate, prefixes, NEW_TOKENS)
        assert first.call(nothing_held)
        assert first.call(external_tokens) == 0
    assert len(list(store.glob("*.kvframe"))) == 1 + 2 + 5 + 2
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def second(folders: Folders, store: Path, computed: Prompts) -> Iterator[EngineProcess]:
    """A cold process over the same store."""
    del computed
    with EngineProcess(setup(folders["llama"], store)) as engine:
        yield engine


def test_a_cold_process_restores_and_answers_the_same(
    second: EngineProcess, prefixes: Prompts, computed: Prompts
) -> None:
    answers, external = loaded_again(second, prefixes)
    assert answers == computed
    assert external == CELL + 2 * CELL + 5 * CELL + 2 * CELL - 1  # of a prompt of whole cells, all but its last token


def test_only_what_the_local_cache_lacks_is_loaded(second: EngineProcess, prefixes: Prompts, computed: Prompts) -> None:
    loaded_again(second, [prefixes[2][:333]])  # ten blocks are cached now
    before = second.call(external_tokens)
    second.call(untimed)
    assert second.call(generate, [prefixes[2]], NEW_TOKENS)[0].tokens == computed[2]
    assert second.call(external_tokens) - before == 5 * CELL - 320


def test_requests_of_one_prefix_at_once_load_it_once(
    second: EngineProcess, prefixes: Prompts, computed: Prompts
) -> None:
    answers, external = loaded_again(second, [prefixes[1]] * 3)
    assert answers == [computed[1]] * 3
    assert external == 2 * CELL


def test_a_slow_store_is_left_alone(second: EngineProcess, prefixes: Prompts, computed: Prompts) -> None:
    assert second.call(forget)
    before = second.call(external_tokens)
    second.call(slow_store)
    assert second.call(generate, [prefixes[1]], NEW_TOKENS)[0].tokens == computed[1]
    assert second.call(external_tokens) == before


@pytest.mark.parametrize("damage", ["bytes", "gone"])
def test_after_a_damaged_or_evicted_cell_the_rest_is_computed_and_stored_anew(
    second: EngineProcess, prefixes: Prompts, computed: Prompts, store: Path, damage: str
) -> None:
    cells = second.call(names, prefixes[2])
    broken = store / f"{blake3(cells[2].encode()).hexdigest()}.kvframe"
    damaged = b""
    if damage == "bytes":
        with broken.open("r+b") as file:
            file.seek(broken.stat().st_size // 2)
            file.write(bytes(64))
        damaged = broken.read_bytes()
    else:
        broken.unlink()
    answers, external = loaded_again(second, [prefixes[2]])
    assert answers == [computed[2]]
    if damage == "gone":
        assert external == 2 * CELL
    else:
        assert second.call(metrics)["kvserve:fallbacks{rung=recompute}"] >= 1
    assert broken.read_bytes() != damaged
    assert loaded_again(second, [prefixes[2]]) == ([computed[2]], 5 * CELL)


def test_two_engines_that_store_the_same_cells_at_once(
    folders: Folders, second: EngineProcess, prompts: Prompts, store: Path, tmp_path: Path
) -> None:
    """Each begins to write each cell only when the other one has begun too."""
    prompt = prompts[7][5 : 5 + 2 * CELL + 40]
    before = set(store.iterdir())
    with EngineProcess(setup(folders["llama"], store)) as third:
        both = (second, third)
        for engine in both:
            engine.call(write_together, tmp_path)  # waits until it is up
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda engine: engine.call(generate, [prompt], NEW_TOKENS)[0].tokens, both))
        assert all(engine.call(nothing_held) for engine in both)
        second.call(write_together, None)
        assert len(list(tmp_path.iterdir())) == 2 * 2
        made = set(store.iterdir()) - before
        assert [path.suffix for path in made] == [".kvframe"] * 2  # and nothing half done
        assert answers[0] == answers[1]
        for engine in both:
            assert loaded_again(engine, [prompt]) == (answers[:1], 2 * CELL)


def test_another_salt_or_adapter_does_not_hit(second: EngineProcess, prefixes: Prompts) -> None:
    plain, salted, other, adapted = second.call(keys_of, prefixes[0])
    assert len({plain, salted, other, adapted}) == 4
    assert second.call(stored, [plain]) == [True]
    assert second.call(stored, [salted, other, adapted]) == [False] * 3
    second.call(forget)
    second.call(untimed)
    before = second.call(external_tokens)
    second.call(with_salt, prefixes[0], "mallory")
    assert second.call(external_tokens) == before


def test_zeroed_kv_changes_the_answers(folders: Folders, store: Path, prefixes: Prompts, computed: Prompts) -> None:
    with EngineProcess(setup(folders["llama"], store, env={"KVSERVE_FAULT": "zero"})) as faulty:
        answers, external = loaded_again(faulty, prefixes)
    assert external > 0
    assert all(a != b for a, b in zip(answers, computed, strict=True))


@pytest.mark.parametrize(
    ("model", "extra", "llm"),
    [
        pytest.param("llama", {"sync_load": True}, {"max_num_batched_tokens": 320, "max_num_seqs": 4}, id="sync"),
        pytest.param("gemma3", {}, {"max_num_batched_tokens": 320, "max_num_seqs": 4}, id="windows"),
        pytest.param("deepseek", {}, {"block_size": 16}, id="mla"),
    ],
)
def test_windows_mla_and_sync_loads_are_restored_too(
    folders: Folders, tmp_path: Path, prefixes: Prompts, model: str, extra: dict[str, Any], llm: dict[str, Any]
) -> None:
    given = setup(folders[model], tmp_path, extra=extra, llm=llm)
    with EngineProcess(given) as engine:
        first = [answer.tokens for answer in engine.call(generate, prefixes, NEW_TOKENS)]
        assert engine.call(nothing_held)
        answers, external = loaded_again(engine, prefixes)
        assert answers == first
        assert external == 10 * CELL - 1
        for path in sorted(tmp_path.glob("*.kvframe"))[::2]:
            path.write_bytes(path.read_bytes()[:-100] + bytes(100))
        assert loaded_again(engine, prefixes)[0] == first


def slow_store(llm: Any) -> None:
    """As after loads at 1 kB/s and prefills at a token a millisecond."""
    controller = scheduler_side(llm)._deployment.controller
    controller.observe_prefill(1000, 1.0)
    for _ in range(20):
        controller.links.observe("store:file", 100_000, 100.0)


def write_together(llm: Any, meeting: Path | None) -> None:
    """From now on a write waits in the middle until another process is in the middle of writing the same cell, which
    files in a folder tell; None: as before."""
    from kvserve_plugins.transports._folder import Folder

    put = vars(llm).setdefault("kvserve_put", Folder.put)

    def together(self: Folder, key: str, size: int, fill: Callable[[BinaryIO], object]) -> None:
        def slowly(out: BinaryIO) -> None:
            fill(out)
            (meeting / f"{self.file(key).stem}-{os.getpid()}").touch()
            wait_until(lambda: len(list(meeting.glob(f"{self.file(key).stem}-*"))) == 2)

        put(self, key, size, slowly)

    Folder.put = put if meeting is None else together


def names(llm: Any, prompt: list[int]) -> list[str]:
    """The names under which the cells of a prompt are stored exactly."""
    return [f"{key}-q1000" for key in _keys(llm, prompt)]


def _keys(llm: Any, prompt: list[int], **fields: Any) -> tuple[str, ...]:
    prefixes = scheduler_side(llm)._prefixes
    request = SimpleNamespace(
        **{"prompt_token_ids": prompt, "lora_request": None, "cache_salt": None, "mm_features": []} | fields
    )
    keys = prompt_keys(request, prefixes._model.kv, prefixes._shards, prefixes._scales)
    assert keys is not None
    return keys[0]


def keys_of(llm: Any, prompt: list[int]) -> list[str]:
    """The first key of a prompt: plain, with two salts, with an adapter."""
    adapter = SimpleNamespace(lora_name="french")
    variants: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_request": adapter}]
    return [_keys(llm, prompt, **fields)[0] for fields in variants]


def stored(llm: Any, keys: list[str]) -> list[bool]:
    """Whether the store holds each of them, exactly."""
    index = scheduler_side(llm)._prefixes._index
    return [index.holds(((key,),), 0, 1.0) for key in keys]


def with_salt(llm: Any, prompt: list[int], salt: str) -> list[int]:
    """An answer to a salted prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    output = llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], sampling, use_tqdm=False)
    settle(llm)
    return list(output[0].outputs[0].token_ids)


def test_a_model_with_state_is_refused_by_name() -> None:
    state = PlaneSpec("opaque", 1, (PlanePart("state", 64),), DType.U8)
    kv = KVSpec("hybrid", (LayerGroup(0, (0, 1), (state,), unit="state"),))
    with pytest.raises(UnsupportedSpecError, match=r"layers \(0, 1\) hold a state"):
        check_prefixes(ServedModel(kv, (), 1, 1, 1), SimpleNamespace())


def test_every_rank_keeps_a_part_of_its_own(folders: Folders, tmp_path: Path, prefixes: Prompts) -> None:
    with EngineProcess(setup(folders["llama"], tmp_path, llm={"tensor_parallel_size": 2})) as engine:
        first = engine.call(generate, prefixes, NEW_TOKENS)
        assert engine.call(forget)
        assert len(list(tmp_path.glob("*.kvframe"))) == 2 * 10
        engine.call(untimed)
        before = engine.call(external_tokens)
        assert [a.tokens for a in engine.call(generate, prefixes, NEW_TOKENS)] == [a.tokens for a in first]
        assert engine.call(external_tokens) - before == 10 * CELL - 1
        assert engine.call(forget)  # no block is held
