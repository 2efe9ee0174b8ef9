"""Gemma 4 assistants: growth by the formulas over their target's keys and values, exact output, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from assistants import save_assistant
from heads import drafter_of, ids_of, llm_of, outputs_beside_an_abort
from reference.heads import SlowAssistant
from reference.texts import assert_first_tokens_are_distributed_as_the_models
from specinfer import LLM, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.core.request import Request, Span
from specinfer.core.tree import TreeBudget
from specinfer.drafters import AssistantDrafter
from specinfer.model.heads import load
from specinfer.model.load import load_model
from specinfer.ops import Float8Linear, PackedLinear, QuantizedLinear
from tiny import VOCAB, make_model, paths_of, random_prompts, save_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
TARGETS = ("gemma4_text", "gemma4_text-shared", "gemma4_text-alike", "gemma4_text-moe")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(tmp_path_factory.mktemp(name), name) for name in TARGETS}


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_assistant(tmp_path_factory.mktemp("assistant"), clusters=8)


@pytest.mark.parametrize(
    ("family", "clusters", "position"),
    [("gemma4_text", 0, 0), ("gemma4_text-shared", 8, 0), ("gemma4_text-alike", 8, 1), ("gemma4_text-moe", 0, 1)],
)
def test_growth_follows_the_formulas(
    family: str,
    clusters: int,
    position: int,
    targets: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt is longer than the sliding window, and other requests have the first slots of the cache."""
    folder, model = save_assistant(tmp_path / "assistant", clusters=clusters), make_model(family)
    monkeypatch.setattr(
        "specinfer.setup.assembly.choose_dialect", lambda run, _: run.head.speak(run.head.dialects[position])
    )
    slow = SlowAssistant(folder, model, at_last=position == 1)
    with llm_of(targets[family], folder, tree="1") as llm:
        drafter = drafter_of(llm)
        assert isinstance(drafter, AssistantDrafter)
        requests = [Request(str(i), list(prompt), GREEDY, seed=0) for i, prompt in enumerate(random_prompts([5, 21]))]
        for request in requests:
            llm.engine.add(request)
        while min(request.num_output for request in requests) < 1:
            llm.engine.step()
        for widths in ((3, 2, 2), (1, 1, 1, 1), (4, 1, 2)):
            spans = [Span(request, request.num_computed, len(request.token_ids)) for request in requests]
            trees = drafter.draft(spans, [TreeBudget.expansion(widths)] * 2)
            for request, tree in zip(requests, trees, strict=True):
                assert sorted(paths_of(tree)) == sorted(paths_of(slow.tree(request.token_ids, widths)))
            llm.engine.step()
        slots, features = llm.target.cache.slots("1")[:21], drafter.runner.features("1", 20, 21)
        logits, output = drafter.runner.score([drafter.runner.piece([7], slots, features)])
        wanted = slow.step(7, *slow.read(requests[1].token_ids[:21]))
        torch.testing.assert_close(logits[0], wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output[0], wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_of_a_head_in_clusters_only_the_rows_of_the_best_ones_are_read(
    quantization: str | None,
    native: bool,
    targets: dict[str, Path],
    assistant: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed or quantized weights would be made anew for each level: 262,144 rows where 4,096 are scored."""
    quantized: Any = load.quantize_linears
    monkeypatch.setattr(load, "quantize_linears", lambda *args, **_: quantized(*args, native=native))
    target = load_model(targets["gemma4_text"], torch.bfloat16, torch.device("cpu"), native=native)
    head: Any = load.load_head(assistant, target, quantization).model
    hidden = torch.randn(3, head.lm_head.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = head.lm_head.weight.detach() @ hidden.unsqueeze(-1)
    for kind in (PackedLinear, QuantizedLinear, Float8Linear):
        monkeypatch.setattr(kind, "weight", property(lambda _: pytest.fail("the whole weight is made")))
    found = head.logits(hidden)
    is_scored = found.isfinite()
    assert is_scored.sum(dim=1).eq(3 * VOCAB // 8).all()
    torch.testing.assert_close(found[is_scored], whole.squeeze(-1).float()[is_scored], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("family", "tree"), [*zip(TARGETS, ("1,1,1,1", "3,2,2", "best-first:24:6", "2,1,1"), strict=True)]
)
def test_greedy_text_is_that_of_transformers(family: str, tree: str, targets: dict[str, Path], assistant: Path) -> None:
    model, prompts = make_model(family), random_prompts([5, 40, 1])
    wanted = [reference.greedy(model, prompt, 20) for prompt in prompts]
    with llm_of(targets[family], assistant, "suffix", tree=tree) as llm:
        for _ in range(2):  # the second time from cached prefixes
            outputs = llm.generate(ids_of(prompts), GREEDY, use_tqdm=False)
            assert [list(one.outputs[0].token_ids) for one in outputs] == wanted
        assert drafter_of(llm).runner.loaded.taps is None


def test_sampled_text_does_not_depend_on_the_assistant(
    targets: dict[str, Path], assistant: Path, tmp_path: Path
) -> None:
    """Nor on its being chosen, or not, next to a small model."""
    small = save_model(tmp_path / "small")
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=40, presence_penalty=i % 2) for i in range(4)]
    texts = []
    for tree, select in (("off", "all"), ("2,2,1", "hedge:1"), ("best-first:16:5", "all")):
        with llm_of(targets["gemma4_text"], assistant, small, "suffix", tree=tree, select=select) as llm:
            texts.append([one.outputs[0].token_ids for one in llm.generate(ids_of(random_prompts([7] * 4)), params)])
    assert texts[0] == texts[1] == texts[2]


def test_a_rule_that_needs_distributions_draws_from_the_targets(targets: dict[str, Path], assistant: Path) -> None:
    with LLM(
        targets["gemma4_text"], drafters=[str(assistant)], dtype="float32", tree="3,2", verification="multi-step",
        max_num_seqs=64, seed=3,
    ) as llm:  # fmt: skip
        assert_first_tokens_are_distributed_as_the_models(llm, make_model("gemma4_text"), random_prompts([6])[0])


def test_preemption_aborts_and_streamed_layers_change_no_text(
    targets: dict[str, Path], assistant: Path, tmp_path: Path
) -> None:
    target, prompts = targets["gemma4_text-shared"], random_prompts([30, 12, 25, 9])
    wanted = [reference.greedy(make_model("gemma4_text-shared"), prompt, 20) for prompt in prompts]
    limits = {"max_num_seqs": 4, "max_model_len": 64, "kv_cache_memory_bytes": 70_000}
    with llm_of(target, assistant, tree="2,2,1", **limits) as llm:
        outputs = llm.generate(ids_of(prompts), GREEDY, use_tqdm=False)
        assert llm.engine.metrics.num_preempted > 0
        assert [list(one.outputs[0].token_ids) for one in outputs] == wanted
        assert outputs_beside_an_abort(llm, prompts, GREEDY) == wanted[1:]
        assert llm.target.cache.is_balanced()
        assert llm.target.cache.num_owned == 0
        assert not drafter_of(llm)._cache.known
    with llm_of(target, assistant, tree="2,2,1", offload="disk", offload_folder=tmp_path) as llm:
        outputs = llm.generate(ids_of(prompts), GREEDY, use_tqdm=False)
        assert [list(one.outputs[0].token_ids) for one in outputs] == wanted


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"target_width": 48}, "backbone_hidden_size in config.json of .* is 48, not a number from 32 to 32"),
        ({"text": {"vocab_size": 128}}, "vocab_size in config.json of .* is 128, not a number from 96 to 96"),
        ({"text_config": None}, "config.json of .* has no text_config"),
        (
            {"text": {"head_dim": 12}},
            r"tensor model\.layers\.0\.self_attn\.q_proj\.weight of .* heads of size 12, and the target's layer 3",
        ),
        ({"drop": ["model.layers.1.self_attn.q_norm.weight"]}, r"has no tensor model\.layers\.1\.self_attn\.q_norm\.w"),
        ({"drop": ["pre_projection.weight"]}, r"has no tensor pre_projection\.weight; fetch the drafter again"),
        ({"tensors": {"model.norm.weight": torch.full((16,), torch.nan)}}, r"model\.norm\.weight of .* has NaN"),
        ({"tensors": {"model.layers.0.self_attn.k_proj.weight": torch.ones(3)}}, r"1 tensors of .* not known, mod"),
        (
            {"clusters": 8, "tensors": {"masked_embedding.token_ordering": torch.zeros(96, dtype=torch.int64)}},
            r"tensor masked_embedding\.token_ordering of .* does not divide the 96 tokens of the target into 8 cl",
        ),
        ({"clusters": 8, "centroid_intermediate_top_k": 9}, "centroid_intermediate_top_k in config.json of .* is 9"),
    ],
    ids=str,
)
def test_assistants_that_do_not_fit_are_refused_by_name(
    options: dict[str, Any], part: str, targets: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_assistant(tmp_path / "assistant", **options)
    with pytest.raises(ModelError, match=f"^drafters: .*{part}"):
        llm_of(targets["gemma4_text"], folder)


def test_an_assistant_needs_a_target_whose_layers_it_knows(
    targets: dict[str, Path], assistant: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"layer 0 of .* reads the keys and values of a layer with sliding_attention"):
        llm_of(save_model(tmp_path / "llama"), assistant)
    with pytest.raises(ModelError, match=r"is a drafter \(Gemma 4 assistant\); name its target as the model"):
        LLM(assistant)


@pytest.mark.distributed
def test_an_assistant_is_refused_for_a_target_in_several_processes(targets: dict[str, Path], assistant: Path) -> None:
    with pytest.raises(ModelError, match=r"reads keys and values of its target, which must be in one process; leave"):
        llm_of(targets["gemma4_text"], assistant, tensor_parallel_size=2)
