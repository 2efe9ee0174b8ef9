"""Training of heads: levels as in drafting, files in the public format, and a run from prompts to a drafter."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from heads import drafter_of, llm_of, save_block, save_cycle, save_eagle3
from reference.heads import SlowBlock, SlowEagle3
from reference.texts import hidden_states
from specinfer import LLM, SamplingParams
from specinfer.cli.app import app
from specinfer.core.errors import ModelError
from specinfer.core.request import Request, Span
from specinfer.core.tree import TreeBudget
from specinfer.drafters.block_drafter import BlockDrafter
from specinfer.learning.batches import collate
from specinfer.learning.examples import TrainingExample
from specinfer.learning.heads.block import TrainableBlock
from specinfer.learning.heads.eagle3 import NUM_LEVELS
from specinfer.learning.heads.files import read_head
from specinfer.learning.heads.head import TrainableHead
from specinfer.learning.heads.new import NEW_HEADS, new_head
from specinfer.learning.trainable import export
from specinfer.learning.tune.initial_weights import build, parse_initial_weights
from specinfer.learning.tune.training import TrainingConfig, fit
from tests.learning.outputs import save_prompts
from tiny import make_model, random_prompts, save_model, save_tokenizer

LAYERS = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=LAYERS))


def _example(tokens: list[int], num_prompt: int = 1) -> TrainingExample:
    """Return an example in which the target is sure of each token of the output."""
    count = len(tokens) - num_prompt
    best = np.stack([tokens[num_prompt:], np.zeros(count)], axis=1).astype(np.int32)
    logprobs = np.tile(np.asarray([0.0, -np.inf], dtype=np.float16), (count, 1))
    return TrainingExample(np.asarray(tokens, dtype=np.int32), num_prompt, best, logprobs, np.zeros(count, np.float16))


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
        found = head(collate([_example(text)]))
        once = head.eval()(collate([_example(text)]))
    levels = found.logits.unflatten(0, (NUM_LEVELS, -1))  # of all outputs but the second token of the text
    assert levels.shape == (NUM_LEVELS, len(text) - 2, 58)
    assert found.outputs.tolist() == list(range(1, len(text) - 1)) * NUM_LEVELS
    assert found.levels.bincount().tolist() == [len(text) - 2] * NUM_LEVELS
    torch.testing.assert_close(once[1:], levels[0])
    features = slow.project(hidden_states(model, text, (2, 4, 5)))
    for pair in range(NUM_LEVELS - 1, len(text) - 2):
        for level in range(NUM_LEVELS):
            seen = features[: pair - level + 1]
            for _ in range(level):  # each draft is computed from the output for the one before
                logits, output = slow.run(seen, text[1 : len(seen) + 1])
                seen = torch.cat([seen, output[-1:]])
            logits, _ = slow.run(seen, text[1 : pair + 2])
            torch.testing.assert_close(levels[level][pair], logits[-1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "options"), [("dspark", {"draft_ids": range(2, 60)}), ("dflash", {}), ("jetspec", {})], ids=str
)
def test_rows_of_blocks_in_training_are_those_of_drafting(
    kind: str, options: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    folder = save_block(tmp_path / "head", kind, **options)
    model = make_model("llama", num_hidden_layers=LAYERS)
    slow = SlowBlock(folder, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())
    texts = random_prompts([20, 13])
    batch = collate([_example(texts[0], 3), _example(texts[1])])
    head = read_head(folder, target).train()
    torch.manual_seed(0)
    with torch.no_grad():
        found, once = head(batch), head.eval()(batch)
    assert found.levels.bincount()[0] == 5 + 3  # a quarter of 17 and of 12 outputs
    assert len(once) == 17 + 12
    first_row = 0 if kind == "dspark" else 1
    taps = [hidden_states(model, text, head.model.reads) for text in texts]

    @functools.cache
    def rows_of(row: int, anchor: int) -> Tensor:
        before = [tap[:anchor] for tap in taps[row]]
        return slow.rows(before, texts[row][anchor], 6, causal=kind == "jetspec")[first_row:]

    firsts = ((range(len(once)), [0] * len(once), once), (found.outputs.tolist(), found.levels.tolist(), found.logits))
    for outputs, levels, logits in firsts:
        for output, level, one in zip(outputs, levels, logits, strict=True):
            row, place = int(batch.rows[output]), int(batch.places[output])
            wanted = slow.logits(rows_of(row, place - level)[level], texts[row][place])
            torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("token_map", [None, range(5, 90)], ids=["whole", "mapped"])
@pytest.mark.parametrize("name", NEW_HEADS)
def test_what_is_written_is_read_again_in_the_format_of_speculators(
    name: str, token_map: range | None, target: Path, tmp_path: Path
) -> None:
    head = new_head(name, target, 3, token_map)
    export(head, tmp_path / "written")
    fields = json.loads((tmp_path / "written/config.json").read_text())
    kind = name.removeprefix("new:")
    assert fields["speculators_model_type"] == fields["speculators_config"]["algorithm"] == kind
    ids = {
        "eagle3": ("eagle_aux_hidden_state_layer_ids", [2, 4, 5]),
        "dspark": ("aux_hidden_state_layer_ids", [2, 4, 6]),
    }
    assert fields[ids[kind][0]] == ids[kind][1]
    assert fields["draft_vocab_size"] == (96 if token_map is None else 85)
    modes = {file.stat().st_mode for file in (tmp_path / "written").iterdir()}
    assert len(modes) == 1, "the weights can be read by whoever can read the configuration"
    tensors = load_file(tmp_path / "written/model.safetensors")
    if token_map is not None:
        assert tensors["d2t"].tolist() == [5] * 85
        assert int(tensors["t2d"].sum()) == 85
    assert {"eagle3": "layers.0.hidden_norm.weight", "dspark": "markov_head.markov_w1.weight"}[kind] in tensors
    assert ("lm_head.weight" in tensors) == (kind == "eagle3" or token_map is not None)
    again = read_head(tmp_path / "written", target)
    pairs = zip(head.model.named_parameters(), again.model.named_parameters(), strict=True)
    for (one_name, one), (other_name, other) in pairs:
        assert one_name == other_name
        assert torch.equal(one, other)


def test_a_head_in_another_format_keeps_it_with_the_tensors_that_are_not_trained(target: Path, tmp_path: Path) -> None:
    folder = save_eagle3(tmp_path / "head", draft_ids=range(2, 60), norm_before_fc=True)
    head = read_head(folder, target)
    with torch.no_grad():
        head.model.hidden_norm.weight.fill_(3.0)
    export(head, tmp_path / "written")
    configs = [json.loads((one / "config.json").read_text()) for one in (folder, tmp_path / "written")]
    assert configs[0] == configs[1]
    read, written = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "written"))
    assert read.keys() == written.keys()
    changed = [name for name in read if not torch.equal(read[name], written[name])]
    assert changed == ["midlayer.hidden_norm.weight"]


def _trained(name: str, target: Path, checkpoint: Path, num_steps: int) -> tuple[TrainableHead, list[float]]:
    """Return a head after some of twelve steps, with the losses, resumed from the checkpoint if there is one."""
    head = new_head(name, target, 0)
    examples = [_example(text, 2) for text in random_prompts([16] * 4)]
    config = TrainingConfig(12, batch_tokens=32, learning_rate=0.01, save_every=0.0)
    steps = fit(Accelerator(cpu=True), head, examples, [], config, checkpoint)
    return head, [one.loss for one in itertools.islice(steps, 1, num_steps + 1)]


@pytest.mark.parametrize("name", NEW_HEADS)
def test_a_few_steps_lower_the_loss_and_resuming_gives_the_same_weights(
    name: str, target: Path, tmp_path: Path
) -> None:
    head, losses = _trained(name, target, tmp_path / "whole.pt", 12)
    assert losses[-1] < 0.95 * losses[0]
    _trained(name, target, tmp_path / "resumed.pt", 5)
    resumed, _ = _trained(name, target, tmp_path / "resumed.pt", 12)
    assert all(map(torch.equal, head.model.parameters(), resumed.model.parameters()))


def test_a_trained_block_head_drafts_what_it_computed_in_training(target: Path, tmp_path: Path) -> None:
    head, _ = _trained("new:dspark", target, tmp_path / "head.pt", 12)
    assert isinstance(head, TrainableBlock)
    export(head, tmp_path / "written")
    with llm_of(target, tmp_path / "written", tree="1,1") as llm:
        drafter = drafter_of(llm)
        assert isinstance(drafter, BlockDrafter)
        request = Request("one", random_prompts([9])[0], SamplingParams(max_tokens=9), seed=0, cache_salt=None)
        llm.engine.add(request)
        while request.num_output < 1:
            llm.engine.step()
        drafter.draft([Span(request, request.num_computed, len(request.token_ids))], [TreeBudget.expansion((1,))])
        rows = drafter._cache.score([request])
        text = [*request.token_ids, *random_prompts([8], seed=5)[0]]
        before = torch.tensor(text[len(request.token_ids) - 1 : -1])
        logits, accepted = drafter._head.conditional(rows.logits, rows.hidden, before)
    head.eval()
    batch = collate([_example(text, len(request.token_ids))])
    with torch.no_grad():
        every = torch.ones(1, 1, dtype=torch.bool)
        found = head._draft(batch, head.features(batch), torch.tensor([8]), torch.zeros(1, 1).long(), every, 8)
    torch.testing.assert_close(found.logits, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.accepted, accepted, rtol=1e-5, atol=1e-5)


def test_sizes_of_a_new_block_head_are_those_of_its_name(target: Path, tmp_path: Path) -> None:
    """Attention starts as the target's, as before; a head with more layers than the target is refused."""
    export(build(parse_initial_weights("new:dspark:2x40x3"), target, 0), tmp_path / "head")
    tensors, usual = load_file(tmp_path / "head/model.safetensors"), new_head("new:dspark", target, 0).tensors()
    assert [tensors[f"layers.{i}.mlp.down_proj.weight"].shape for i in range(2)] == [(32, 40)] * 2
    assert tensors["markov_head.markov_w1.weight"].shape == (96, 3)
    assert "layers.2.mlp.down_proj.weight" not in tensors
    name = "self_attn.q_proj.weight"
    assert torch.equal(tensors[f"layers.1.{name}"], usual[f"layers.0.{name}"])
    with llm_of(target, tmp_path / "head", tree="1,1") as llm:
        llm.generate(random_prompts([5]), SamplingParams(max_tokens=6), use_tqdm=False)
        assert llm.drafter is not None
        assert llm.drafter.num_failures == {}
    with pytest.raises(ValueError, match="a head of 9 layers is too large: the target has 8"):
        build(parse_initial_weights("new:dspark:9x40"), target, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW_HEADS)
def test_a_run_trains_a_head_that_is_accepted(name: str, tmp_path: Path) -> None:
    target, _ = save_cycle(tmp_path)
    data = save_prompts(tmp_path / "prompts.jsonl", random_prompts([6] * 220, vocab=64))
    words = (
        *("tune", str(target), "--drafter", name, "--data", str(data), "--out", str(tmp_path / "run")),
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
    data = save_prompts(tmp_path / "prompts.jsonl", random_prompts([6] * 60))
    words = (
        *("tune", str(target), "--drafter", "new:dspark", "--drafter", "new:eagle3"),
        *("--data", str(data), "--token-map", "90"),
        *("--out", str(tmp_path / "run"), "--num-prompts", "40", "--num-held-out", "4", "--max-tokens", "6"),
        *("--epochs", "1", "--batch-tokens", "128", "--device", "cpu", "--mixed-precision", "no"),
    )
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for i, name in enumerate(("new:dspark", "new:eagle3")):
        trained = load_file(tmp_path / f"run/drafter-{i + 1}/model.safetensors")
        assert all(bool(one.isfinite().all()) for one in trained.values() if one.is_floating_point())
        assert not torch.equal(trained["fc.weight"], new_head(name, target, i).model.fc.weight)


@pytest.mark.parametrize("name", NEW_HEADS)
def test_a_new_head_needs_sizes_of_usual_names(name: str, tmp_path: Path) -> None:
    other = save_tokenizer(save_model(tmp_path / "gpt2", "gpt2"))
    data = save_prompts(tmp_path / "prompts.jsonl", random_prompts([6] * 60))
    words = ("tune", str(other), "--drafter", name, "--data", str(data), "--out", str(tmp_path / "run"))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "a new head needs a Llama-like target" in result.output


def test_heads_that_cannot_be_trained_are_refused_by_name(target: Path, tmp_path: Path) -> None:
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
    last = {"dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 7]}}
    cases = [
        (save_eagle3(tmp_path / "parallel", parallel=True, mask_token_id=90), "is a P-EAGLE head"),
        (save_block(tmp_path / "windows", "dspark", **windows), "has sliding windows"),
        (save_block(tmp_path / "last", "dflash", **last), "after the target's last layer"),
        (save_model(tmp_path / "model", "llama"), "is a head of the kind None"),
    ]
    for folder, part in cases:
        with pytest.raises(ModelError, match=part):
            read_head(folder, target)
