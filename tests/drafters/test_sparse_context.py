"""The target as its own drafter over a part of the context: which part, same text, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reference
from adapters import save_adapter
from heads import accepted_share, drafter_of, llm_of, texts_of
from specinfer import LLM, LoRARequest, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.drafters import sparse_context
from specinfer.drafters.self_drafter import SelfDrafter
from specinfer.drafters.sparse_context import kept_places, kept_slots, num_to_read, places_to_read
from tiny import make_model, random_prompts, save_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = random_prompts([5, 60, 1, 33])


@pytest.fixture
def small_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out much of contexts that tiny models can have."""
    monkeypatch.setattr(sparse_context, "_LEAST", 12)
    monkeypatch.setattr(sparse_context, "_PAGE", 1)


@pytest.mark.parametrize("num_known", [257, 300, 1000, 4096, 16_384, 100_000])
def test_the_first_and_last_tokens_and_pages_between_them_are_kept(num_known: int) -> None:
    places = kept_places(num_known)
    assert places is not None
    assert (np.diff(places) > 0).all()
    num_kept = max(256, num_known // 16)
    assert num_kept - 64 <= len(places) <= num_kept
    assert set(range(16)) <= set(places.tolist())
    assert set(range(num_known - num_kept // 2, num_known)) <= set(places.tolist())
    if num_known > 1000:
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        assert [len(run) for run in runs[1:-1]] == [16] * (num_kept // 64)
        starts = np.diff([run[0] for run in runs[1:-1]])
        assert np.ptp(starts) <= 1, "even distances"


def test_a_small_model_reads_a_part_that_changes_in_steps_and_all_that_follows() -> None:
    assert places_to_read(100_000, None) is None
    assert places_to_read(1023, 512) is None
    for num_known in range(1024, 4096):
        places, begun = places_to_read(num_known, 512), num_known // 256 * 256
        before = kept_places(begun, 512)
        assert places is not None
        assert before is not None
        assert 448 <= len(before) <= 512
        assert places.tolist() == [*before.tolist(), *range(begun, num_known)]


def _num_kept(num_known: int) -> int:
    places = kept_places(num_known, 1024)
    assert places is not None
    return len(places)


def test_what_is_read_anew_in_the_next_turn_is_known_before() -> None:
    assert num_to_read(6000, 0, None) == 6000
    assert num_to_read(6000, 0, 1024) == _num_kept(5632) + 368
    assert num_to_read(6100, 6000, 1024) == 100, "the same part of it is read"
    assert num_to_read(6200, 6000, 1024) == _num_kept(6144) + 56, "another part"
    assert num_to_read(6200, 6000, None) == 200


def test_short_contexts_are_kept_whole() -> None:
    assert kept_places(0) is None
    assert kept_places(256) is None


@pytest.mark.parametrize(("context", "least", "page"), [(20_000, 256, 16), (128, 256, 16), (4096, 12, 1), (600, 48, 4)])
def test_a_device_keeps_the_same_part(context: int, least: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_context, "_LEAST", least)
    monkeypatch.setattr(sparse_context, "_PAGE", page)
    lengths = torch.cat([torch.arange(min(context, 700)), torch.randint(context + 1, (200,)), torch.tensor([context])])
    slots = torch.stack([torch.randperm(context, dtype=torch.int32) for _ in lengths])
    table, nums = kept_slots(slots, lengths.int())
    for num_known, of_request, kept, num_kept in zip(lengths.tolist(), slots, table, nums.tolist(), strict=True):
        places = kept_places(num_known)
        wanted = of_request[:num_known] if places is None else of_request[places]
        assert kept[:num_kept].tolist() == wanted.tolist()


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "mpt"])
@pytest.mark.usefixtures("small_part")
def test_other_families_generate_their_own_text_too(family: str, tmp_path: Path) -> None:
    """With windows, with learned positions or biases by distance: true positions are what they need."""
    folder = save_model(tmp_path, family)
    with llm_of(folder, "self:sparse", tree="2,1,1") as llm:
        assert texts_of(llm, PROMPTS, GREEDY) == [
            reference.greedy(make_model(family), prompt, 24) for prompt in PROMPTS
        ]
        assert 0.2 < accepted_share(llm) < 1


def test_drafts_over_a_whole_context_are_all_accepted_with_adapters_too(target: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", target, 3, r=8, lora_alpha=64)
    texts = []
    for lora in (None, LoRARequest("a", 1, str(adapter))):
        with llm_of(target, "self:sparse", tree="1,1,1", enable_lora=True) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=25)  # the last tree is not cut
            (output,) = llm.generate([{"prompt_token_ids": PROMPTS[1]}], params, use_tqdm=False, lora_request=lora)
            texts.append(output.outputs[0].token_ids)
            assert accepted_share(llm) == 1
    assert texts[0] != texts[1]


@pytest.mark.usefixtures("small_part")
def test_drafts_attend_to_that_part_at_true_positions(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with llm_of(target, "self:sparse", tree="2,1") as llm:
        drafter = drafter_of(llm, SelfDrafter)
        pieces, forward = [], drafter.runner.forward
        monkeypatch.setattr(drafter.runner, "forward", lambda some: pieces.extend(some) or forward(some))
        llm.generate([{"prompt_token_ids": PROMPTS[1]}], GREEDY, use_tqdm=False)
        assert {one.num_context for one in pieces} <= set(range(8, 20))
        for piece in pieces:
            assert piece.prefix_positions is not None
            first = piece.earlier_positions[0] if piece.earlier_positions else piece.positions[0]
            wanted = kept_places(first)
            assert wanted is not None
            assert piece.prefix_positions.tolist() == wanted.tolist()


def test_weights_of_the_target_are_not_loaded_twice(target: Path) -> None:
    with llm_of(target, "self:sparse") as llm:
        drafter = drafter_of(llm, SelfDrafter)
        assert drafter.runner.loaded.model is llm.target.loaded.model


@pytest.mark.parametrize(
    ("family", "drafter", "options", "message"),
    [
        ("llama", "self:sparse", {"offload": "disk"}, "self:sparse would stream the target .* name self:int4"),
        ("lfm2", "self:sparse", {}, "self:sparse leaves out tokens, and the target has layers without attention"),
        ("lfm2", "self:int4-sparse", {}, "self:int4-sparse leaves out tokens"),
        ("llama", "self:int4-sparse", {"quantization": "int4"}, "self:int4-sparse .* name self:sparse"),
    ],
)
def test_what_it_does_not_fit_is_refused(
    family: str, drafter: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(save_model(tmp_path, family), drafters=[drafter], dtype="float32", **options)
