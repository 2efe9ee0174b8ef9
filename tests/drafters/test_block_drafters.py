"""Block heads: growth by the formulas of DFlash, JetSpec and DSpark, exact output, and refusals."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import check_growth, drafter_of, llm_of, save_block, save_eagle3
from reference.heads import SlowBlock, SlowEagle3
from reference.texts import hidden_states
from specinfer import SamplingParams
from specinfer.core.tree import TokenTree

LAYERS = 8  # of the target
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


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

    def wanted(tokens: list[int], shape: Sequence[int]) -> TokenTree:
        rows = slow.rows(hidden_states(model, tokens[:-1], reads), tokens[-1], 6, causal=kind == "jetspec")
        return _slow_tree(slow, rows[first_row:], tokens[-1], shape, ids)

    with llm_of(target, folder, tree="1,1") as llm:
        check_growth(llm, wanted, shapes=((3, 2, 2), (1, 1, 1, 1, 1), (4, 1, 2)))


@pytest.mark.parametrize("layout", ["original", "speculators"])
def test_a_parallel_eagle_head_drafts_by_its_formulas(layout: str, target: Path, model: Any, tmp_path: Path) -> None:
    proposal = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}
    fields = {"pard_token": 90} if layout == "original" else {"mask_token_id": 90, "speculators_config": proposal}
    if layout == "speculators":
        fields |= {"speculators_model_type": "peagle", "norm_before_residual": True}
    folder = save_eagle3(tmp_path / "head", layout, parallel=True, **fields)
    slow = SlowEagle3(folder, model.model.embed_tokens.weight.detach(), norm_before_residual=layout == "speculators")
    mask = slow.w["mask_hidden"][0] @ slow.w["fc.weight"].T

    def wanted(tokens: list[int], shape: Sequence[int]) -> TokenTree:
        features = slow.project(hidden_states(model, tokens[:-1], (2, 4, 5)))
        logits, _ = slow.run(torch.cat([features, mask.expand(3, -1)]), [*tokens[1:], 90, 90, 90])
        best = [
            row.topk(width).indices.tolist() for row, width in zip(logits[len(features) - 1 :], shape, strict=False)
        ]
        return TokenTree.merge([TokenTree.chain(tokens[-1], path) for path in itertools.product(*best)])

    with llm_of(target, folder, tree="1,1") as llm:
        assert drafter_of(llm).kind.max_depth == (8 if layout == "original" else 4)
        check_growth(llm, wanted, shapes=((3, 2, 2), (1, 1, 1, 1)))


def test_a_tree_is_no_deeper_than_a_block(target: Path, tmp_path: Path) -> None:
    for kind, deepest in (("dflash", 3), ("dspark", 4)):
        folder = save_block(tmp_path / kind, kind, block_size=4)
        with llm_of(target, folder, tree="best-first:40:12") as llm:
            (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY, use_tqdm=False)
            depths = dict(output.metrics.speculative_decoding)["acceptance_histogram_by_draft_length"]
        assert max(map(int, depths)) == deepest
