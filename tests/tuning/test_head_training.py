"""Training of heads: levels as in drafting, files in the public format, and a run from prompts to a drafter."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from heads import SlowEagle3, save_cycle, save_eagle3
from references_of_text import hidden_states
from specinfer import LLM, SamplingParams
from specinfer.cli.app import app
from specinfer.learning.training_examples import TrainingExample, collate
from specinfer.tuning.head_training import NUM_LEVELS, export_head, new_head, read_head
from tiny import make_model, random_prompts, save_model, save_tokenizer

LAYERS = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=LAYERS))


def _example(tokens: list[int]) -> TrainingExample:
    count = len(tokens) - 1
    return TrainingExample(
        np.asarray(tokens, dtype=np.int32), 1, np.zeros((count, 2), np.int32), np.zeros((count, 2), np.float16),
        np.zeros(count, np.float16),
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "speculators", "norm_before_residual": True, "norm_output": True, "family": "qwen3"}],
    ids=["original", "speculators"],
)
def test_levels_of_training_are_those_of_drafting(options: dict[str, Any], target: Path, tmp_path: Path) -> None:
    folder = save_eagle3(tmp_path / "head", draft_ids=range(2, 60), **options)
    model = make_model("llama", num_hidden_layers=LAYERS)
    flags = {name: options[name] for name in ("norm_output", "norm_before_residual") if name in options}
    slow = SlowEagle3(folder, model.model.embed_tokens.weight.detach(), **flags)
    text = random_prompts([14])[0]
    head = read_head(folder, target).train()
    with torch.no_grad():
        levels = head(collate([_example(text)]))
        once = head.eval()(collate([_example(text)]))
    assert levels.shape == (NUM_LEVELS, len(text) - 1, 58)
    torch.testing.assert_close(once, levels[0])
    features = slow.project(hidden_states(model, text, (2, 4, 5)))
    for pair in range(NUM_LEVELS - 1, len(text) - 2):
        for level in range(NUM_LEVELS):
            seen = features[: pair - level + 1]
            for _ in range(level):  # each draft is computed from the output for the one before
                logits, output = slow.run(seen, text[1 : len(seen) + 1])
                seen = torch.cat([seen, output[-1:]])
            logits, _ = slow.run(seen, text[1 : pair + 2])
            torch.testing.assert_close(levels[level][pair + 1], logits[-1], rtol=2e-4, atol=2e-4)


def test_what_is_written_is_read_again_in_the_format_of_speculators(target: Path, tmp_path: Path) -> None:
    head = new_head(target, seed=3, token_map=range(5, 90))
    export_head(head, target, tmp_path / "written")
    fields = json.loads((tmp_path / "written/config.json").read_text())
    assert fields["speculators_model_type"] == "eagle3"
    assert fields["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert fields["draft_vocab_size"] == 85
    modes = {file.stat().st_mode for file in (tmp_path / "written").iterdir()}
    assert len(modes) == 1, "the weights can be read by whoever can read the configuration"
    tensors = load_file(tmp_path / "written/model.safetensors")
    assert tensors["d2t"].tolist() == [5] * 85
    assert int(tensors["t2d"].sum()) == 85
    assert "layers.0.hidden_norm.weight" in tensors
    again = read_head(tmp_path / "written", target)
    assert again.model.dialect == head.model.dialect
    for (name, one), (other_name, other) in zip(
        head.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert name == other_name
        assert torch.equal(one, other)
    with LLM(target, drafters=[str(tmp_path / "written")], dtype="float32", tree="2,1") as llm:
        (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=9, temperature=0))
    assert dict(output.metrics.speculative_decoding)["num_draft_tokens"] > 0


@pytest.mark.slow
def test_a_run_trains_a_head_that_is_accepted(tmp_path: Path) -> None:
    target, _ = save_cycle(tmp_path)
    data = tmp_path / "prompts.jsonl"
    prompts = random_prompts([6] * 220, vocab=64)
    data.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts))
    words = (
        *("tune", str(target), "--drafter", "new:eagle3", "--data", str(data), "--out", str(tmp_path / "run")),
        *("--num-prompts", "200", "--num-held-out", "8", "--max-tokens", "24", "--epochs", "40"),
        *("--batch-tokens", "512", "--device", "cpu", "--mixed-precision", "no", "--token-map", "60"),
        *("--learning-rate", "0.01"),
    )
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    head = tmp_path / "run/drafter-1"
    with LLM(target, drafters=[str(head)], dtype="float32", tree="1,1,1,1") as llm:
        params = SamplingParams(max_tokens=41, temperature=0)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in random_prompts([5] * 4, seed=9, vocab=64)], params)
    lengths = [dict(one.metrics.speculative_decoding)["mean_acceptance_length"] for one in outputs]
    assert sum(lengths) / len(lengths) > 3  # of 5; untrained 1


def test_a_short_run_writes_a_head_and_measures_it(target: Path, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in random_prompts([6] * 60)))
    words = (
        *("tune", str(target), "--drafter", "new:eagle3", "--drafter", "new:1", "--data", str(data)),
        *("--out", str(tmp_path / "run"), "--num-prompts", "40", "--num-held-out", "4", "--max-tokens", "6"),
        *("--epochs", "1", "--batch-tokens", "128", "--device", "cpu", "--mixed-precision", "no"),
    )
    for _ in range(2):  # the second run finds everything done
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run/drafter-1/config.json").read_text())["speculators_model_type"] == "eagle3"
    trained = load_file(tmp_path / "run/drafter-1/model.safetensors")
    assert all(bool(one.isfinite().all()) for one in trained.values() if one.is_floating_point())
    started = new_head(target, seed=0)
    assert not torch.equal(trained["fc.weight"], started.model.fc.weight)


def test_a_head_needs_weights_of_usual_names(tmp_path: Path) -> None:
    other = save_tokenizer(save_model(tmp_path / "gpt2", "gpt2"))
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in random_prompts([6] * 60)))
    words = ("tune", str(other), "--drafter", "new:eagle3", "--data", str(data), "--out", str(tmp_path / "run"))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "new:eagle3 needs a Llama-like target" in result.output
