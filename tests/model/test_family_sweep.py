"""Every causal family of the installed transformers answers as transformers does with token trees, or is refused."""

from pathlib import Path

import pytest
import torch
import transformers

import sweep
from native_layers import check_tree_logits
from specinfer.core.config import OffloadConfig
from specinfer.core.errors import ModelError
from specinfer.model.adapters.sites import connect
from specinfer.model.load import load_model
from specinfer.model.own_pass import REMEDY
from specinfer.model.past import OWN, PACKED, PACKED_WITH_PAST, way_of
from specinfer.model.reach import Reach
from specinfer.model.runner import ModelRunner
from specinfer.parallel.group import ShardSpec
from tiny import make_engine, quick, resized, run

SHARDS = 8
PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
WAYS = {"afmoe": PACKED, "stablelm": PACKED_WITH_PAST, "llama4_text": PACKED_WITH_PAST} | dict.fromkeys(
    ("gptj", "xglm", "doge", "diffllama", "deepseek_v32", "glm_moe_dsa"), OWN
)
COUNTING = ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "family", [pytest.param(name, id=f"{name}-shard{i % SHARDS}") for i, name in enumerate(sweep.FAMILIES)]
)
def test_a_family_is_right_or_refused_as_the_page_says(family: str, tmp_path: Path) -> None:
    outcome = sweep.outcome_of(family, tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}" in page:
        assert sweep.ways_on(page)[family] == outcome.way


@pytest.mark.parametrize("family", WAYS)
def test_trees_of_a_definition_with_masks_or_a_cache_of_its_own_are_its_paths(family: str, tmp_path: Path) -> None:
    model = sweep.tiny_model(family)
    runner = sweep.load(model, tmp_path)
    assert way_of(runner.loaded.model) == WAYS[family]
    check_tree_logits(model, runner)


def test_adapters_are_refused_where_they_would_have_no_effect(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^enable_lora: family 'gptj' .*; merge the adapter into the weights"):
        connect(sweep.load(sweep.tiny_model("gptj"), tmp_path).loaded)


@pytest.mark.parametrize("family", COUNTING)
def test_a_definition_that_counts_positions_is_refused_with_the_remedy(family: str, tmp_path: Path) -> None:
    sweep.tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"family '{family}' .* something else than by itself .*{REMEDY}"):
        sweep.load(sweep.tiny_model(family), tmp_path)


def test_a_chunk_is_counted_from_the_first_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The known-wrong arm: a chunk that is a window gives other logits."""
    model = sweep.tiny_model("llama4_text")
    runner = sweep.load(model, tmp_path)
    monkeypatch.setattr(Reach, "visible", lambda self, query, key: query.unsqueeze(2) - key.unsqueeze(1) < 8)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_tree_logits(model, runner)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["bart", "plbart", "gptj", "deepseek_v32", "gemma2"])
def test_rounding_hides_no_difference_and_is_none(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sweep.tiny_model(family).to(dtype).save_pretrained(tmp_path)
    if family in COUNTING:
        with pytest.raises(ModelError, match="something else than by itself"):
            load_model(tmp_path, dtype, torch.device("cpu"))
    else:
        load_model(tmp_path, dtype, torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama4_text", "deepseek_v32"])
def test_stages_of_a_definition_that_chooses_masks_are_refused_with_the_remedy(family: str, tmp_path: Path) -> None:
    sweep.tiny_model(family).save_pretrained(tmp_path)
    for rank in range(2):
        with pytest.raises(ModelError, match=r"^pipeline_parallel_size: .*; use 1, or tensor_parallel_size"):
            load_model(tmp_path, torch.float32, torch.device("cpu"), shard=ShardSpec(stage=rank, num_stages=2))


@pytest.mark.parametrize("family", quick(WAYS, "afmoe", "llama4_text", "deepseek_v32"))
@pytest.mark.parametrize("form", ["streamed", "int8", "8-bit keys"])
def test_each_way_runs_in_the_forms_of_other_families(family: str, form: str, tmp_path: Path) -> None:
    model, folder = sweep.tiny_model(family), tmp_path / "model"
    model.save_pretrained(folder)
    offload = OffloadConfig(offload="disk", offload_folder=str(tmp_path / "copy")) if form == "streamed" else None
    runner = ModelRunner(
        load_model(
            folder, torch.float32, torch.device("cpu"), "int8" if form == "int8" else None,
            offload=offload, kv_dtype=torch.float8_e4m3fn if form == "8-bit keys" else None,
        ), 256, keeps_prefixes=True,
    )  # fmt: skip
    if form == "streamed":
        check_tree_logits(model, runner)
        return
    plain = run(make_engine(resized(runner, 256)), sweep.requests("plain"))
    texts = [[*prompt, *output] for prompt, output in zip(sweep.prompts(), plain, strict=True)]
    assert sweep.continued(runner, texts) == texts
