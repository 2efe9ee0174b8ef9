"""Block heads: growth by the formulas of DFlash, JetSpec and DSpark, exact output, and refusals."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from heads import ids_of, llm_of, save_block, save_eagle3
from reference.heads import SlowBlock, SlowEagle3
from reference.texts import assert_first_tokens_are_distributed_as_the_models, hidden_states
from specinfer import LLM, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.block_drafter import BlockDrafter
from tiny import make_model, paths_of, quick, random_prompts, save_model

LAYERS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama", num_hidden_layers=LAYERS)


def _slow_tree(slow: SlowBlock, rows: Any, anchor: int, widths: Sequence[int], ids: Sequence[int]) -> TokenTree:
    trees = [TokenTree.root(anchor)]

    def grow(path: list[int]) -> None:
        if len(path) == len(widths):
            return
        logits = slow.logits(rows[len(path)], path[-1] if path else anchor)
        for place in logits.topk(widths[len(path)]).indices.tolist():
            chain = [anchor, *path, ids[place]]
            trees.append(TokenTree(tuple(chain), tuple(range(-1, len(chain) - 1))))
            grow([*path, ids[place]])

    grow([])
    return TokenTree.merge(trees)


@pytest.mark.parametrize(
    ("kind", "options", "reads", "first_row"),
    [
        ("dflash", {}, (2, 6), 1),
        (
            "dflash",
            {"num_taps": 3, "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 3, 7]}},
            (1, 4, 8),
            1,
        ),
        ("dflash", {"layout": "speculators", "aux_hidden_state_layer_ids": [1, 5]}, (1, 5), 1),
        ("dflash", {"layout": "speculators", "sample_from_anchor": True, "draft_ids": range(3, 90, 2)}, (2, 6), 0),
        ("jetspec", {}, (2, 6), 1),
        ("dspark", {"target_layer_ids": [2, 4]}, (3, 5), 0),
        ("dspark", {"layout": "speculators", "sample_from_anchor": False, "draft_ids": range(4, 80)}, (2, 6), 1),
    ],
    ids=str,
)
def test_growth_follows_the_formulas(
    kind: str, options: dict[str, Any], reads: tuple[int, ...], first_row: int, target: Path, model: Any, tmp_path: Path
) -> None:
    folder = save_block(tmp_path / "head", kind, **options)
    slow = SlowBlock(folder, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())
    ids = list(options.get("draft_ids", range(96)))
    with llm_of(target, folder, tree="1,1") as llm:
        assert llm.drafter is not None
        (drafter,) = [one for one in llm.drafter.drafters if isinstance(one, BlockDrafter)]
        request = Request("one", random_prompts([9])[0], GREEDY, seed=0, cache_salt=None)
        llm.engine.add(request)
        while request.num_output < 1:
            llm.engine.step()
        for widths in ((3, 2, 2), (1, 1, 1, 1, 1), (4, 1, 2)):
            span = Span(request, request.num_computed, len(request.token_ids))
            (tree,) = drafter.draft([span], [TreeBudget.expansion(widths)])
            taps = hidden_states(model, request.token_ids[:-1], reads)
            rows = slow.rows(taps, request.token_ids[-1], 6, causal=kind == "jetspec")
            wanted = _slow_tree(slow, rows[first_row:], request.token_ids[-1], widths, ids)
            assert sorted(paths_of(tree)) == sorted(paths_of(wanted))
            llm.engine.step()


@pytest.mark.parametrize("layout", ["original", "speculators"])
def test_a_parallel_eagle_head_drafts_by_its_formulas(layout: str, target: Path, model: Any, tmp_path: Path) -> None:
    proposal = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}
    fields = {"pard_token": 90} if layout == "original" else {"mask_token_id": 90, "speculators_config": proposal}
    if layout == "speculators":
        fields |= {"speculators_model_type": "peagle", "norm_before_residual": True}
    folder = save_eagle3(tmp_path / "head", layout, parallel=True, **fields)
    slow = SlowEagle3(folder, model.model.embed_tokens.weight.detach(), norm_before_residual=layout == "speculators")
    mask = slow.w["mask_hidden"][0] @ slow.w["fc.weight"].T
    with llm_of(target, folder, tree="1,1") as llm:
        assert llm.drafter is not None
        (drafter,) = [one for one in llm.drafter.drafters if isinstance(one, BlockDrafter)]
        assert drafter.kind.max_depth == (8 if layout == "original" else 4)
        request = Request("one", random_prompts([9])[0], GREEDY, seed=0, cache_salt=None)
        llm.engine.add(request)
        while request.num_output < 1:
            llm.engine.step()
        for widths in ((3, 2, 2), (1, 1, 1, 1)):
            span = Span(request, request.num_computed, len(request.token_ids))
            (tree,) = drafter.draft([span], [TreeBudget.expansion(widths)])
            features = slow.project(hidden_states(model, request.token_ids[:-1], (2, 4, 5)))
            logits, _ = slow.run(torch.cat([features, mask.expand(3, -1)]), [*request.token_ids[1:], 90, 90, 90])
            rows = logits[len(features) - 1 :]
            best = [row.topk(width).indices.tolist() for row, width in zip(rows, widths, strict=False)]
            wanted = [tuple(path) for depth in range(len(widths) + 1) for path in itertools.product(*best[:depth])]
            assert sorted(paths_of(tree)) == sorted(wanted)
            llm.engine.step()


def test_a_tree_is_no_deeper_than_a_block(target: Path, tmp_path: Path) -> None:
    for kind, deepest in (("dflash", 3), ("dspark", 4)):
        folder = save_block(tmp_path / kind, kind, block_size=4)
        with llm_of(target, folder, tree="best-first:40:12") as llm:
            (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY, use_tqdm=False)
            depths = dict(output.metrics.speculative_decoding)["acceptance_histogram_by_draft_length"]
        assert max(map(int, depths)) == deepest


KINDS = ("dflash", "jetspec", "dspark", "peagle")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    save_eagle3(folders["peagle"], parallel=True, mask_token_id=90)
    return {kind: folder if kind == "peagle" else save_block(folder, kind) for kind, folder in folders.items()}


@pytest.mark.parametrize(
    ("kind", "tree"),
    [*zip(KINDS, ("1,1,1,1", "3,2,2", "best-first:24:6", "auto"), strict=True), ("dflash", "best-first:24:6")],
)
def test_greedy_text_is_that_of_transformers(
    kind: str, tree: str, target: Path, model: Any, heads: dict[str, Path]
) -> None:
    prompts = random_prompts([5, 40, 1, 17])
    with llm_of(target, heads[kind], tree=tree) as llm:
        found = [one.outputs[0].token_ids for one in llm.generate(ids_of(prompts), GREEDY, use_tqdm=False)]
    assert [list(one) for one in found] == [reference.greedy(model, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("kind", quick(KINDS, "dspark", "peagle"))
def test_sampled_text_does_not_depend_on_the_head(kind: str, target: Path, heads: dict[str, Path]) -> None:
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=40, presence_penalty=i % 2) for i in range(4)]
    texts = []
    for tree in ("off", "2,2,1", "best-first:16:5"):
        with llm_of(target, heads[kind], "suffix", tree=tree) as llm:
            texts.append([one.outputs[0].token_ids for one in llm.generate(ids_of(random_prompts([7] * 4)), params)])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(("kind", "verification"), [("dflash", "multi-step"), ("dspark", "traversal")])
def test_rules_that_need_distributions_draw_from_the_targets(
    kind: str, verification: str, target: Path, model: Any, heads: dict[str, Path]
) -> None:
    with LLM(
        target,
        drafters=[str(heads[kind])],
        dtype="float32",
        tree="3,2",
        verification=verification,
        max_num_seqs=64,
        seed=3,
    ) as llm:
        assert_first_tokens_are_distributed_as_the_models(llm, model, random_prompts([6])[0])


@pytest.mark.parametrize(
    ("kind", "options", "part"),
    [
        ("dflash", {"block_size": 0}, "block_size in config.json of .* is 0, not a number from 1 to 128"),
        ("dflash", {"dflash_config": {}}, "mask_token_id in config.json of .* is None, not a number from 0 to 95"),
        ("dspark", {"mask_token_id": 200}, "mask_token_id in config.json of .* is 200"),
        ("dspark", {"markov_head_type": "rnn"}, "a markov head of type 'rnn', not vanilla"),
        (
            "dspark",
            {"target_layer_ids": [2, 31]},
            "reads hidden states after layers 3, 32, and the target has 8 layers",
        ),
        ("dflash", {"drop": ["layers.1.mlp.up_proj.weight"]}, r"no tensor layers\.1\.mlp\.up_proj\.weight"),
        ("dflash", {"drop": ["fc.weight"]}, r"no tensor fc\.weight"),
    ],
    ids=str,
)
def test_block_heads_that_do_not_fit_are_refused_by_name(
    kind: str, options: dict[str, Any], part: str, target: Path, tmp_path: Path
) -> None:
    folder = save_block(tmp_path / "head", kind, **options)
    with pytest.raises(ModelError, match=f"^drafters: .*{part}"):
        llm_of(target, folder)
