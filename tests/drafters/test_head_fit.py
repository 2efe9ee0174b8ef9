"""Heads that were trained for another target: refused by what their files state, or noticed by what they draft."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import llm_of, save_block, save_cycle, save_eagle3
from reference.heads import SlowBlock
from reference.texts import hidden_states
from specinfer.core.errors import ModelError
from specinfer.drafters.block_drafter import BlockDrafter
from specinfer.drafters.dialect_choice import _block_agreement, _target_choices
from tiny import make_model, quick, random_prompts, save_model, save_tokenizer

WARNING = "agrees with the target on"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8)
    save_tokenizer(folder)
    return folder


def _verifier(architecture: str, name: str = "org/other") -> dict[str, Any]:
    return {"speculators_config": {"verifier": {"name_or_path": name, "architectures": [architecture]}}}


@pytest.mark.parametrize(
    ("kind", "options", "part"),
    [
        ("eagle3", {"target_hidden_size": 48}, "target_hidden_size .* is 48, and the target's is 32"),
        ("dflash", {"num_target_layers": 36}, "num_target_layers .* is 36, and the target's is 8"),
        (
            "eagle3",
            {"layout": "speculators", **_verifier("Qwen3ForCausalLM")},
            r"verifier\.architectures .* is Qwen3ForCausalLM, and the target's is LlamaForCausalLM",
        ),
        (
            "eagle3",
            {"vocab_size": 128, "draft_ids": range(2, 50)},
            r"tensor t2d of .* has shape \[128\], and \[96\] fits",
        ),
    ],
    ids=str,
)
def test_a_head_whose_files_state_another_target_is_refused_by_the_field(
    kind: str, options: dict[str, Any], part: str, target: Path, tmp_path: Path
) -> None:
    folder = save_eagle3(tmp_path / "head", **options) if kind == "eagle3" else save_block(tmp_path / "head", **options)
    with pytest.raises(ModelError, match=f"^drafters: .*{part}.*; take a drafter that was trained for"):
        llm_of(target, folder)


def test_a_head_with_another_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    head = save_eagle3(tmp_path / "head")
    fields = json.loads((target / "tokenizer.json").read_text())
    ids = fields["model"]["vocab"]
    fields["model"]["vocab"] = dict(zip(ids, [*list(ids.values())[1:], 0], strict=True))
    (head / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=r"^drafters: tokenizer\.json of .*head .* not the target's; take a drafter"):
        llm_of(target, head)


@pytest.mark.parametrize("text", ["", "[]", '{"model": [1]}', '{"model": {"vocab": [[1]]}, "added_tokens": [{}]}'])
def test_a_head_whose_tokenizer_is_malformed_is_refused(text: str, target: Path, tmp_path: Path) -> None:
    head = save_eagle3(tmp_path / "head")
    (head / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"^drafters: tokenizer\.json of .*head cannot be read; replace it"):
        llm_of(target, head)


def test_renamed_special_tokens_and_another_class_of_the_family_are_no_other_target(
    target: Path, tmp_path: Path
) -> None:
    fields = json.loads((target / "tokenizer.json").read_text())
    fields["added_tokens"][0]["content"] = "<|another_name|>"
    head = save_eagle3(tmp_path / "head", "speculators", **_verifier("Llama4ForConditionalGeneration"))
    (head / "tokenizer.json").write_text(json.dumps(fields))
    llm_of(target, head)


@pytest.mark.parametrize("kind", quick(["eagle3", "dflash", "dspark"], "eagle3", "dspark"))
def test_a_head_that_drafts_nothing_right_is_noticed_at_load_in_one_line(
    kind: str, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"draft_ids": range(90, 94), **_verifier("LlamaForCausalLM")}
    if kind == "eagle3":
        head = save_eagle3(tmp_path / "head", **options)
    else:
        head = save_block(tmp_path / "head", kind, **options)
    llm_of(target, head)
    (line,) = [one for one in caplog.records if one.levelno == logging.WARNING and WARNING in one.getMessage()]
    assert "\n" not in line.getMessage()
    assert "was trained for org/other" in line.getMessage()
    caplog.clear()
    shutil.copy(target / "tokenizer.json", head)  # the same tokens: the user's text may just be unlike the short one
    llm_of(target, head)
    assert not [one for one in caplog.records if WARNING in one.getMessage()]


def test_a_head_that_drafts_well_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = save_cycle(tmp_path)
    generated = [1]
    while len(generated) < 48:
        generated.append((generated[-1] * 5 + 3) % 64)
    monkeypatch.setattr("specinfer.drafters.dialect_choice.common_tokens", lambda *_: generated)
    llm_of(target, head)
    assert not [one for one in caplog.records if WARNING in one.getMessage()]


@pytest.mark.parametrize("kind", ["dflash", "jetspec", "dspark"])
def test_the_agreement_of_a_block_head_is_that_of_the_first_tokens_of_its_blocks(
    kind: str, target: Path, tmp_path: Path
) -> None:
    head, ids = save_block(tmp_path / "head", kind), random_prompts([40])[0]
    model = make_model("llama", num_hidden_layers=8)
    embedding, output = (one.weight.detach() for one in (model.model.embed_tokens, model.lm_head))
    slow, first = SlowBlock(head, embedding, output), int(kind != "dspark")
    with llm_of(target, head) as llm:
        assert llm.drafter is not None
        (runner,) = [one.runner for one in llm.drafter.drafters if isinstance(one, BlockDrafter)]
        _target_choices(runner, ids)
        states = hidden_states(model, ids, runner.head.reads)
        wanted = torch.zeros(40, dtype=torch.long)
        for end in range(1, 40):
            rows = slow.rows([one[:end] for one in states], ids[end], 6, causal=kind == "jetspec")
            wanted[end] = slow.logits(rows[first], ids[end]).argmax()
        assert _block_agreement(runner, ids, wanted) == 1.0
        assert _block_agreement(runner, ids, wanted + 1) == 0.0
        assert runner.cache.num_owned == 0
        runner.target.cache.free("dialect-probe")
