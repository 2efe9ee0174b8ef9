"""Heads that learn while they are served: their hidden states are the target's, and what is learned is served."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from heads import drafter_of, ids_of, llm_of, save_block, save_eagle3
from pair_heads import save_eagle
from reference.texts import hidden_states
from specinfer import LLM, SamplingParams
from specinfer.learning.adapt.adaptation import Adaptation
from specinfer.learning.adapt.hits import served_hits
from specinfer.learning.adapt.settings import HEAD_RATE, MODEL_RATE, AdaptationConfig
from specinfer.learning.adapt.student import Student, find_learner
from specinfer.learning.examples import Source, TrainingExample
from specinfer.learning.heads.new import new_head
from specinfer.learning.trainable import export
from specinfer.model.heads.load import find_format
from tiny import make_model, random_prompts, save_model

LAYERS = 4
QUICK = AdaptationConfig(learning_rate=3e-3, window=64, steps_between=16, eval_tokens=512, min_eval_tokens=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=LAYERS)


def _adaptation(llm: LLM, folder: Path, config: AdaptationConfig = QUICK) -> Adaptation:
    assert llm.drafter is not None
    return Adaptation(llm.engine, llm.drafter.drafters, folder, config)


def _num_accepted(llm: LLM) -> int:
    outputs = llm.generate(ids_of(random_prompts([5] * 8, seed=5)), GREEDY, use_tqdm=False)
    return sum(int(dict(one.metrics.speculative_decoding)["num_accepted_draft_tokens"]) for one in outputs)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("kind", "token_map"), [("eagle3", range(2, 96)), pytest.param("dspark", None, marks=pytest.mark.slow)]
)
def test_what_a_head_learned_is_a_head_that_drafts_better_and_is_taken_up_again(
    kind: str, token_map: Any, target: Path, tmp_path: Path
) -> None:
    export(new_head(f"new:{kind}", target, 0, token_map), tmp_path / "head")
    options = {"tree": "1,1,1", "max_num_seqs": 8, "enable_prefix_caching": False}
    with llm_of(target, tmp_path / "head", **options) as llm:
        before = _num_accepted(llm)
        adaptation = _adaptation(llm, tmp_path / "kept")
        llm.generate(ids_of(random_prompts([5] * 32)), GREEDY, use_tqdm=False)
        adaptation.run(60)
        (one,) = adaptation._trainers
        assert one.stats.num_swaps >= 1
        after, kept = _num_accepted(llm), one.current.folder
        assert after > before + 20
        adaptation.close()
    assert find_format(kept) == find_format(tmp_path / "head")
    names = [load_file(folder / "model.safetensors").keys() for folder in (kept, tmp_path / "head")]
    assert names[0] == names[1]
    with llm_of(target, kept, **options) as llm:
        assert _num_accepted(llm) == after, "its files are those of a head"
    with llm_of(target, tmp_path / "head", **options) as llm:
        adaptation = _adaptation(llm, tmp_path / "kept")
        assert adaptation._trainers[0].current.folder == kept
        assert _num_accepted(llm) == after
        adaptation.close()


def test_a_head_learns_more_slowly_than_a_small_model_unless_a_rate_is_given(target: Path, tmp_path: Path) -> None:
    export(new_head("new:eagle3", target, 0), tmp_path / "head")
    with llm_of(target, tmp_path / "head", save_model(tmp_path / "small", num_hidden_layers=1)) as llm:
        for rate, wanted in ((None, [HEAD_RATE, MODEL_RATE]), (0.5, [0.5, 0.5])):
            adaptation = _adaptation(llm, tmp_path / str(rate), AdaptationConfig(learning_rate=rate, window=64))
            assert [one._student.trainer.optimizers[0].param_groups[0]["lr"] for one in adaptation._trainers] == wanted
            adaptation.close()


def test_hidden_states_of_the_traffic_are_the_targets(target: Path, tmp_path: Path) -> None:
    """Also of requests that end inside an accepted path, and of long ones, of which the end is kept."""
    head, model = save_eagle3(tmp_path / "head"), make_model("llama", num_hidden_layers=LAYERS)
    prompts = random_prompts([5, 9, 90])
    with llm_of(target, head, "suffix", tree="3,2,1") as llm:
        texts = [list(one.outputs[0].token_ids) for one in llm.generate(ids_of(prompts), GREEDY, use_tqdm=False)]
        adaptation = _adaptation(llm, tmp_path / "kept")
        params = [SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=text[count : count + 1])
                  for text, count in zip(texts, (40, 11, 17), strict=True)]  # fmt: skip
        llm.generate(ids_of(prompts), params, use_tqdm=False)
        reads = drafter_of(llm).runner.head.reads
        served = list(adaptation._traffic)
        adaptation.close()
    assert len(served) == 3
    for one in served:
        assert one.example.taps is not None
        wanted = hidden_states(model, one.example.tokens[:-1].tolist(), reads)
        assert set(one.example.taps) == set(reads)
        for layer, states in zip(reads, wanted, strict=True):
            torch.testing.assert_close(one.example.taps[layer], states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_prompt", [1, 6])
@pytest.mark.parametrize(
    "save",
    [
        lambda at: save_eagle3(at, draft_ids=range(2, 90)),
        lambda at: save_block(at),
        lambda at: save_block(at, "dspark"),
    ],
    ids=["eagle3", "dflash", "dspark"],
)
def test_hits_of_a_served_head_are_those_of_its_training_copy(
    save: Callable[[Path], Path], num_prompt: int, target: Path, tmp_path: Path
) -> None:
    model, tokens = make_model("llama", num_hidden_layers=LAYERS), random_prompts([45])[0]
    with llm_of(target, save(tmp_path / "head"), tree="1,1") as llm:
        learner = find_learner(drafter_of(llm), llm.target.loaded)
        assert learner is not None
        reads, count = drafter_of(llm).runner.head.reads, len(tokens) - num_prompt
        taps = dict(zip(reads, hidden_states(model, tokens[:-1], reads), strict=True))
        example = TrainingExample(
            np.asarray(tokens, dtype=np.int32), num_prompt, np.tile(np.arange(16, dtype=np.int32), (count, 1)),
            np.full((count, 16), -2.8, np.float16), np.zeros(count, np.float16), 0, Source.SAMPLED, taps,
        )  # fmt: skip
        served = served_hits(drafter_of(llm).runner.loaded, example, learner.vocab_size)
        copy = Student(learner, tmp_path / "head", QUICK).hits(example)
        assert len(served) == count
        assert np.ptp(served) > 0
        np.testing.assert_allclose(served, copy, rtol=1e-4, atol=1e-5)


def test_heads_that_cannot_be_trained_are_refused_or_left_out(target: Path, tmp_path: Path) -> None:
    first, second = save_eagle(tmp_path / "first"), save_eagle3(tmp_path / "second")
    with pytest.raises(
        ValueError, match=r"adapt_drafters: no drafter is a language model .*or a head of the kinds EAGLE-3"
    ):
        llm_of(target, first, adapt_drafters=True)
    with llm_of(target, first, second, tree="1", adapt_drafters=True) as llm:
        assert llm.adaptation is not None
        assert list(llm.adaptation.stats) == ["second"]


def test_hidden_states_take_no_more_memory_than_they_may(target: Path, tmp_path: Path) -> None:
    head = save_eagle3(tmp_path / "head")
    with llm_of(target, head, tree="1,1") as llm:
        size = len(set(drafter_of(llm).runner.head.reads)) * 32 * 4 * 44  # of an output: all tokens but the last
        adaptation = _adaptation(llm, tmp_path / "kept", replace(QUICK, max_tap_bytes=5 * size))
        for start in range(0, 12, 4):
            llm.generate(ids_of(random_prompts([5] * 12)[start : start + 4]), GREEDY, use_tqdm=False)
            traffic = adaptation._traffic
            assert traffic.num_tap_bytes == min(5, start + 4) * size
        assert [served.number for served in traffic] == [11, 10, 9, 8, 7]

        adaptation.close()
