"""A model split over ranks, which are threads here, computes what the whole one does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from specinfer.core.errors import ModelError
from specinfer.model.layers.families import FAMILIES as FUSED
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from thread_group import WHOLE, Ranks, ThreadGroup, assert_close_each, check_shards, make_shards, passes
from tiny import FAMILIES, HYBRIDS, make_model, quick, save_model

CPU = torch.device("cpu")
# Ranks of a tensor group, and stages. Four ranks share two KV heads, or one.
_SPLITS = {family: [(2, 2)] for family in FAMILIES}
_SPLITS |= {family: [(2, 1), (4, 1), (1, 2)] for family in ("llama", "falcon", "falcon-7b", "gpt_bigcode", "phi3")}
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {"moe_intermediate_size": 32},  # experts are multiplied with rows of whole 16 bytes
    "gpt_bigcode-heads": {"multi_query": False},
    "falcon-bias": {"new_decoder_architecture": True, "num_kv_heads": 4, "bias": True},
}


def save(folder: Path, family: str, **changes: Any) -> Path:
    """A model whose biases and norms are not those it begins with."""
    model = make_model(family, **(_CHANGES.get(family, {}) | changes))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += torch.randn_like(weight) * 0.2
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {family: save(place / family, family) for family in FAMILIES}


# Of those that have native layers the other test compares the same shards.
@pytest.mark.parametrize("family", quick(FAMILIES, "llama", *(FAMILIES.keys() - FUSED)))
def test_shards_compute_what_the_whole_does(folders: dict[str, Path], family: str) -> None:
    check_shards(folders[family], _SPLITS[family], native=False)


@pytest.mark.parametrize("name", ["gpt_bigcode-heads", "falcon-bias"])
def test_other_layouts_of_fused_projections(tmp_path: Path, name: str) -> None:
    check_shards(save(tmp_path, name.split("-")[0], **_CHANGES[name]), [(2, 1), (4, 1)], native=False)


@pytest.mark.parametrize("family", ["granitemoe", "granitemoeshared", "phimoe"])
def test_experts_are_split_where_transformers_has_no_plan_for_them_yet(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONFIG_MAPPING[family], "base_model_tp_plan", None)
    folder = save(tmp_path, family)
    wanted, ranks = Ranks(folder, WHOLE, native=False), Ranks(folder, (2, 1), native=False)
    assert_close_each(ranks.logits(), wanted.logits())
    assert ranks.all[0].num_bytes < wanted.all[0].num_bytes


_EACH_KIND = ("lfm2", "qwen3_5_text", "jamba", "bailing_hybrid", "minimax", "recurrent_gemma")
_MIXED = [
    ("granitemoehybrid", {"mamba_n_groups": 1}),
    *((family, {}) for family in _EACH_KIND),
    *(pytest.param(family, {}, marks=pytest.mark.slow) for family in sorted(HYBRIDS.keys() - _EACH_KIND)),
]


@pytest.mark.parametrize(("family", "changes"), _MIXED)
def test_shards_of_layers_without_attention(tmp_path: Path, family: str, changes: dict[str, int]) -> None:
    """Also with one group of keys for all heads, which are then normalized together."""
    folder = save_model(tmp_path, family, **changes)
    wanted, ranks = Ranks(folder, WHOLE, native=False), Ranks(folder, (2, 1))
    assert_close_each(ranks.logits(), wanted.logits())
    shapes = [one.layer_shapes for one in (*wanted.all, *ranks.all)]
    whole_width, *widths = [sum(shape.num_kv_heads * shape.key_dim for shape in one) for one in shapes]
    assert whole_width > widths[0] == widths[1]


_NORMED_HEADS = ("olmo2", "olmo3-mixed", "olmo_hybrid", "olmoe", "minimax_m2")  # all heads of a token together
_EACH_LAYOUT = (
    "llama", "bloom", "falcon", "falcon-rw", "mpt", "gpt_bigcode", "mixtral", "gemma3_text", "phi3", "gpt2", "gpt_oss",
)  # fmt: skip


@pytest.mark.parametrize("family", quick(FAMILIES, *_EACH_LAYOUT))
def test_native_shards_compute_what_the_whole_does(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    folder = save(tmp_path, family, intermediate_size=64) if family in FUSED else folders[family]
    wanted = Ranks(folder, WHOLE, native=False).logits()
    for split in _SPLITS[family]:
        ranks = Ranks(folder, split)
        fits = 64 // split[0] % 16 == 0  # panels of the gated MLP are halves of 16
        assert isinstance(ranks.stages[0][0].model, FusedDecoder) == (family in FUSED and fits)
        assert_close_each(ranks.logits(), wanted)


@pytest.mark.parametrize(
    "family",
    quick(
        ["qwen2_moe-mixed", "granitemoe", "glm4_moe-grouped", "ernie4_5_moe", "exaone4-mixed", "arcee", *_NORMED_HEADS],
        *("qwen2_moe-mixed", "granitemoe", "glm4_moe-grouped", "olmo_hybrid", "minimax_m2"),
    ),
)
def test_native_shards_add_up_what_each_computes_a_part_of(tmp_path: Path, family: str) -> None:
    """Also squares of the queries and of the keys of all heads, of which two of four ranks have the same."""
    experts = ("qwen2_moe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "olmoe")
    changes = {"moe_intermediate_size": 32} if family.split("-")[0] in experts else {}
    folder = save(tmp_path, family, intermediate_size=64, **changes)
    wanted = Ranks(folder, WHOLE, native=False).logits()
    for split in ((2, 1), (2, 2), *([(4, 1)] if family in ("olmo2", "minimax_m2") else [])):
        ranks = Ranks(folder, split)
        assert isinstance(ranks.stages[0][0].model, FusedDecoder)
        assert max(shape.num_kv_heads for loaded in ranks.all for shape in loaded.layer_shapes) == 1
        assert_close_each(ranks.logits(), wanted)


def test_norms_over_all_heads_are_computed_together_without_native_code(tmp_path: Path) -> None:
    check_shards(save(tmp_path, "olmo2"), [(2, 1), (4, 1)], native=False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "starcoder2", "olmo2"])
def test_logits_of_a_token_do_not_depend_on_the_pass(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    folder = save(tmp_path, family, intermediate_size=64)
    ranks = Ranks(folder, (2, 1), dtype=dtype)
    first, second = passes()
    ranks(first)
    together, alone = ranks(second), [ranks([piece]) for piece in second]
    assert torch.equal(together, torch.cat(alone))


def test_each_layer_is_added_up_twice(folders: dict[str, Path]) -> None:
    ranks = Ranks(folders["llama"], (2, 1))
    ranks.logits()
    for loaded in ranks.all:
        group = loaded.shard.tensor
        assert isinstance(group, ThreadGroup)
        assert group.num_sums == 2 * 2 * len(passes())


@pytest.mark.parametrize("split", [(2, 1), (1, 2), (2, 2)])
def test_a_tied_head_is_on_the_rank_that_uses_it(tmp_path: Path, split: tuple[int, int]) -> None:
    folder = save(tmp_path, "llama", tie_word_embeddings=True, vocab_size=480, intermediate_size=64)
    whole, ranks = Ranks(folder, WHOLE), Ranks(folder, split)
    assert_close_each(ranks.logits(), whole.logits())
    embedding = 480 * 32 * 4
    for stage in ranks.stages:
        for loaded in stage:
            holds = loaded.shard.is_first or loaded.shard.has_head
            assert (loaded.num_bytes >= embedding) == holds


def test_shapes_of_caches_are_those_of_the_part(folders: dict[str, Path]) -> None:
    whole = load_model(folders["llama"], torch.float32, CPU)
    for size, num_kv_heads in ((2, 1), (4, 1)):
        for loaded in Ranks(folders["llama"], (size, 1)).all:
            assert [shape.num_kv_heads for shape in loaded.layer_shapes] == [num_kv_heads] * 2
            assert loaded.num_parameters == whole.num_parameters
    assert [len(loaded.layer_shapes) for loaded in Ranks(folders["gemma3_text"], (1, 2)).all] == [2, 1]
    assert whole.shard.is_whole


@pytest.mark.parametrize(
    ("family", "changes", "split", "message"),
    [
        ("llama", {}, (3, 1), r"4 attention heads with 2 .* 3 ranks; use 1 or 2 or 4, or pipeline"),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48}, (2, 1), "use 1 or 3 or 6"),
        ("falcon-7b", {}, (8, 1), "use 1 or 2 or 4, or"),
        ("llama", {"intermediate_size": 50}, (4, 1), "50 numbers of mlp.gate_proj cannot be split over 4"),
        ("phi3", {"intermediate_size": 50}, (4, 1), "50 numbers of mlp.gate_up_proj cannot be split over 4"),
        ("gpt_oss", {"intermediate_size": 50}, (4, 1), "50 numbers of mlp.experts.gate_up_proj"),
        ("gemma4_text-alike", {}, (2, 1), "its layers have different numbers of heads for keys and values"),
        ("llama", {}, (1, 3), "2 layers cannot be split into 3 stages; use at most 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], split: tuple[int, int], message: str
) -> None:
    folder = save_model(tmp_path, family, **changes)
    for shard in (shard for stage in make_shards(*split) for shard in stage):
        with pytest.raises(ModelError, match=message):
            load_model(folder, torch.float32, CPU, shard=shard)


@pytest.mark.parametrize(
    ("family", "why"), [("stablelm", "no plan"), ("flex_olmo", "q_proj would be colwise_gather_output")]
)
def test_families_without_a_plan_are_refused_by_name(tmp_path: Path, family: str, why: str) -> None:
    config = AutoConfig.for_model(family, **FAMILIES["llama"])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"tensor_parallel_size: family '{family}' is not split .*{why}.*; use 1, or"):
        load_model(tmp_path, torch.float32, CPU, shard=make_shards(2, 1)[0][1])


def test_families_without_a_plan_may_be_split_into_stages(tmp_path: Path) -> None:
    config = AutoConfig.for_model("olmo2", **FAMILIES["llama"])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    check_shards(tmp_path, [(1, 2)], native=False)


@pytest.mark.parametrize("split", [(2, 1), (1, 2)])
def test_weights_that_are_not_finite_are_refused_by_their_rank(tmp_path: Path, split: tuple[int, int]) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[-1, 0] = float("nan")  # of the last rank, of the last stage
    model.save_pretrained(tmp_path)
    shards = [shard for stage in make_shards(*split) for shard in stage]
    load_model(tmp_path, torch.float32, CPU, shard=shards[0])
    with pytest.raises(ModelError, match="NaN"):
        load_model(tmp_path, torch.float32, CPU, shard=shards[1])


@pytest.mark.parametrize(
    ("family", "width", "split"),
    [("gemma4_text-shared", 64, (2, 1)), ("gemma4_text-shared", 48, (2, 1)), ("gemma4_text", 64, (2, 2))],
)
def test_shards_of_gemma_4(family: str, width: int, split: tuple[int, int], tmp_path: Path) -> None:
    """Layers that share keys and values, and read inputs beside hidden states; native where panels are whole."""
    folder = save_model(tmp_path, family, intermediate_size=width)
    wanted, ranks = Ranks(folder, WHOLE, native=False).logits(), Ranks(folder, split)
    assert isinstance(ranks.stages[0][0].model, FusedDecoder) == (width == 64)
    assert_close_each(ranks.logits(), wanted, rtol=1e-4, atol=3e-5)
