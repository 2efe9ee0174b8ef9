"""A target split over several processes generates the tokens that one process generates."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from specinfer import LLM, SamplingParams
from specinfer.core.config import EngineConfig, OffloadConfig
from specinfer.core.parallel_config import Place
from specinfer.drafters import sparse_context
from specinfer.drafters.remote.placement import DrafterPlacement, PlacedDrafter
from specinfer.model import target
from specinfer.model.offload.budget import available_bytes
from specinfer.model.target import TargetConfig, connect_devices, load_shard, with_rank_budget
from specinfer.parallel.group import ShardSpec
from tiny import random_prompts, save_model, save_tokenizer
from worlds import (
    SETTINGS,
    await_that,
    free_port,
    is_alive,
    listening_places,
    make_cluster_cert,
    sizes_of,
    tokens_of,
    workers,
)

_PROMPTS = [{"prompt_token_ids": ids} for ids in random_prompts([3, 50, 17, 1, 40])]
_PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0),
    SamplingParams(max_tokens=24, temperature=0.8, seed=5),
    SamplingParams(max_tokens=24, temperature=1.0, seed=6, n=2, logprobs=2),
    SamplingParams(max_tokens=24, temperature=0.9, seed=7, tree="2,2,1"),
    SamplingParams(max_tokens=24, temperature=0.9, seed=8, structured_outputs={"regex": "[a-e ]{4,20}"}),
]
# Each of two ranks has whole groups of 64 inputs that share a scale.
_WIDE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64
}  # fmt: skip


def _say(llm: LLM, params: Sequence[SamplingParams] = _PARAMS) -> list[list[int]]:
    return tokens_of(llm, _PROMPTS, params)


def _tokens_in_a_pass(llm: LLM) -> float:
    """Mean number of tokens that a pass without prompts adds to a request; prompts may be read in other parts."""
    steps = [step for step in llm.engine.metrics.recent if step.num_rows == step.num_requests + step.num_guessed]
    return sum(step.num_generated for step in steps) / sum(step.num_requests for step in steps)


def _folder(place: Path, family: str, **changes: Any) -> str:
    save_tokenizer(save_model(place, family, **changes))
    return str(place)


# Every family and every split; the first two, which have both ways to split, with every `make test`, one of them with
# keys and values of 8 bits.
_SPLITS = [("llama", (2, 1)), ("qwen3_5_text", (1, 2))]
_KV_CACHE_DTYPES = {_SPLITS[1]: "fp8"}
_COPIES = {_SPLITS[0]: ("self:int8",)}  # each rank drafts with its part of the target, too
_MORE_SPLITS = [
    ("qwen3_next", (2, 1)), ("granitemoehybrid", (2, 1)), ("mpt", (1, 2)),
    ("qwen3_next", (1, 2)), ("kimi_linear", (1, 2)), ("recurrent_gemma", (1, 2)), ("granitemoehybrid", (1, 2)),
    ("falcon", (1, 2)), ("llama", (1, 2)), ("llama", (2, 2)),
    ("mpt", (2, 2)), ("opt", (2, 2)), ("falcon", (2, 2)), ("gpt_bigcode", (2, 2)),
    ("gemma4_text-shared", (2, 1)), ("gemma4_text-moe", (2, 1)), ("gemma4_text", (2, 2)), ("gemma3_text", (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "sizes"),
    [*_SPLITS, *(pytest.param(*split, marks=pytest.mark.distributed) for split in _MORE_SPLITS)],
    ids=lambda one: one if isinstance(one, str) else f"tp{one[0]}-pp{one[1]}",
)
def test_several_processes_generate_what_one_does(family: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Greedy, seeded, trees, a grammar and several outputs in one batch; prompts in chunks."""
    copies = _COPIES.get((family, sizes), ())
    folder = _folder(tmp_path, family, **(_WIDE if copies else {}))
    drafter = str(save_model(tmp_path / "drafter", family, noise=0.2))
    settings = SETTINGS | {"drafters": [drafter, *copies, "ngram"]}
    settings["kv_cache_dtype"] = _KV_CACHE_DTYPES.get((family, sizes), "auto")
    with LLM(folder, **settings) as llm:
        expected, tokens = _say(llm), _tokens_in_a_pass(llm)
    with LLM(folder, **settings, **sizes_of(sizes)) as llm:
        ids = workers(llm)
        assert len(ids) == sizes[0] * sizes[1] - 1
        assert not any(listening_places(one) for one in (os.getpid(), *ids)), "a port for strangers"
        assert _say(llm) == expected
        assert _tokens_in_a_pass(llm) == pytest.approx(tokens, rel=0.05)
        assert _say(llm) == expected
        assert llm.engine.metrics.num_generated
        cache = llm.target.cache
        assert cache.is_balanced()
        assert cache.num_owned == 0
    assert not any(map(is_alive, ids))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "sizes", "drafter", "streams"),
    [
        ("llama", (2, 1), "self:int8", False),
        ("llama", (1, 2), "self:int8", True),
        ("llama", (1, 2), "self:sparse", False),
        ("llama", (2, 2), "self:int4-sparse", False),
        ("qwen3_5_text", (1, 2), "self:int8", False),
    ],
    ids=str,
)
def test_each_rank_drafts_with_its_part_of_the_target_itself(
    family: str, sizes: tuple[int, int], drafter: str, streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_context, "_LEAST", 24)
    settings: dict[str, Any] = SETTINGS | {"drafters": [drafter, "ngram"], "tree": "2,1,1"}
    if streams:
        settings |= {"offload": "disk", "offload_folder": tmp_path / "copies"}
    folder, found = _folder(tmp_path / "model", family, **_WIDE), []
    for split in ({}, sizes_of(sizes)):
        with LLM(folder, **settings, **split) as llm:
            found.append((_say(llm), _tokens_in_a_pass(llm)))
            assert llm.target.cache.is_balanced()
            assert llm.target.cache.num_owned == 0
    (texts, tokens), (split_texts, split_tokens) = found
    assert split_texts == texts
    assert split_tokens == pytest.approx(tokens, rel=0.05), "tokens of a request in a pass"
    assert tokens > 1.5


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sizes", "drafter", "name"),
    [
        ((2, 1), "small", "fp8"),
        ((2, 1), "self:int4", "fp8"),
        ((2, 1), "self:sparse", "fp8"),
        ((2, 1), "self:int4-sparse", "fp8_e5m2"),
        ((1, 2), "self:int4", "fp8"),
        ((1, 2), "self:sparse", "fp8_e5m2"),
        ((2, 2), "self:int4", "fp8"),
    ],
    ids=str,
)
def test_trees_of_ranks_whose_caches_have_8_bits_generate_what_plain_decoding_does(
    sizes: tuple[int, int], drafter: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same ranks: the sums of several may round to another number of 8 bits than the sums of one."""
    monkeypatch.setattr(sparse_context, "_LEAST", 24)
    folder, options = _folder(tmp_path / "model", "llama", **_WIDE), {"kv_cache_dtype": name}
    if drafter == "small":
        drafter = str(save_model(tmp_path / "small", "llama", noise=0.1, **_WIDE))
    split = sizes_of(sizes)
    without_trees = [replace(params, tree=None) for params in _PARAMS]
    with LLM(folder, **SETTINGS | {"tree": "off"}, **split, **options) as llm:
        plain = _say(llm, without_trees)
    with LLM(folder, **SETTINGS | {"drafters": [drafter, "ngram"], "tree": "2,1,1"}, **split, **options) as llm:
        assert _say(llm) == plain
        metrics = llm.engine.metrics
        assert metrics.num_generated > 1.5 * sum(step.num_requests for step in metrics.recent)
    if drafter.startswith("self"):
        return
    with LLM(folder, **SETTINGS | {"tree": "off"}, **split) as llm:
        assert _say(llm, without_trees) != plain, "rounding that changes no text would show nothing here"


@pytest.mark.parametrize(
    ("num_gpus", "num_sharing", "device"), [(0, 4, "cpu"), (4, 1, "cuda:1"), (2, 2, "cuda:1"), (3, 2, "cuda:1")]
)
def test_ranks_share_the_memory_that_one_process_would_take(
    num_gpus: int, num_sharing: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a GPU share that GPU's, and nobody shares a GPU of its own."""
    asked = list[tuple[str, int]]()

    def usual_budget(device: torch.device, num_sharing: int) -> int:
        asked.append((str(device), num_sharing))
        return 7 * 2**20

    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(target, "usual_budget", usual_budget)
    place = Place(1, 4, 1, 4, folder=str(tmp_path))
    name = device.partition(":")[0]
    settings = TargetConfig(str(tmp_path), "float32", name, None, OffloadConfig("disk"), EngineConfig())
    found = with_rank_budget(settings, place)
    assert (found.offload.budget_bytes, asked) == (7 * 2**20, [(device, num_sharing)])
    assert replace(found, offload=settings.offload) == settings
    for given in (found, replace(settings, offload=OffloadConfig())):
        assert with_rank_budget(given, place) is given
    assert len(asked) == 1
    connections, load = Mock(), Mock()
    monkeypatch.setattr(target, "check_gpu", lambda device: device)
    connect_devices(found, connections, place)
    assert str(connections.connect.call_args.args[0]) == device
    monkeypatch.setattr(target, "load_model", load)
    load_shard(found, ShardSpec(), place)
    assert load.call_args.kwargs["num_sharing"] == 4, "the machine's memory is shared by all"
    assert str(load.call_args.args[2]) == device


@pytest.mark.distributed
def test_layers_that_ranks_keep_in_memory_fit_into_it_together(tmp_path: Path) -> None:
    settings = SETTINGS | {"drafters": [], "tree": "off", "offload": "disk", "pipeline_parallel_size": 2}
    available = available_bytes()
    with LLM(_folder(tmp_path, "llama"), **settings) as llm:
        stream = llm.target.loaded.stream
        assert stream is not None
        assert stream.settled_bytes < 0.45 * available


def test_ranks_compare_copies_of_the_target_besides_drafters_that_are_placed(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "llama")
    settings = TargetConfig(folder, "float32", "cpu", None, OffloadConfig(), EngineConfig(), ("self:int4",))
    placement = DrafterPlacement((PlacedDrafter("small", folder, 1),))
    assert settings.wanted() != replace(settings, copies=()).wanted()
    assert not settings.wanted().keys() & placement.wanted().keys()


def test_a_model_that_cannot_be_split_so_is_refused_before_anybody_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path, "llama")
    monkeypatch.setattr("specinfer.setup.assembly.start_ranks", None)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        LLM(folder, **SETTINGS, tensor_parallel_size=3)
    with pytest.raises(ValueError, match="pipeline_parallel_size"):
        LLM(folder, **SETTINGS, pipeline_parallel_size=3)


@pytest.mark.distributed
def test_two_machines_serve_one_target_and_end_together(tmp_path: Path) -> None:
    """Both are this one; the second is only informed where the first is."""
    folder = _folder(tmp_path, "llama")
    port = str(free_port())
    cert = make_cluster_cert(tmp_path)
    flags = ["--dtype", "float32", "--drafter", "ngram", "-pp", "2", "--nnodes", "2", "--node-rank", "1"]
    flags += ["--cluster-cert", cert]
    command = [sys.executable, "-m", "specinfer", "generate", folder, "x", *flags, "--master-addr", "127.0.0.1"]
    home = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": home, "OMP_NUM_THREADS": "1"}
    with LLM(folder, **SETTINGS) as llm:
        expected = _say(llm)
    with subprocess.Popen([*command, "--master-port", port], env=environment) as follower:
        try:
            settings: dict[str, Any] = {"pipeline_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1"}
            settings |= {"max_num_batched_tokens": 512, "cluster_cert": cert}
            with LLM(folder, **(SETTINGS | settings), master_port=int(port)) as llm:
                assert workers(llm) == []
                assert _say(llm) == expected
            assert follower.wait(60) == 0
        finally:
            follower.kill()


@pytest.mark.distributed
def test_workers_end_when_the_model_is_released(tmp_path: Path) -> None:
    llm = LLM(_folder(tmp_path, "llama"), **SETTINGS, pipeline_parallel_size=2)
    ids = workers(llm)
    assert all(map(is_alive, ids))
    del llm
    await_that(lambda: not any(map(is_alive, ids)), 30)
