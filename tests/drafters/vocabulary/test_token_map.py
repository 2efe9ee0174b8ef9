"""Drafters that compute the logits of some tokens only: outputs do not change, and the head is as small as it says."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from heads import save_eagle3
from quantized_files import save_quantized
from specinfer import LLM, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import MergedDrafter, NGramDrafter, SmallModelDrafter
from specinfer.drafters.loading import DraftModel, load_draft_model
from specinfer.drafters.merge.scoring import Scoring
from specinfer.drafters.remote.placement import DrafterPlacement, PlacedDrafter
from specinfer.drafters.vocabulary.token_map import ReducedVocabulary
from specinfer.engine.engine import Engine
from specinfer.engine.scheduler import Scheduler
from specinfer.learning.adapt.hits import hits_in, served_hits
from specinfer.learning.batches import collate
from specinfer.learning.examples import Source, TrainingExample
from specinfer.learning.trainable import TrainableModel
from specinfer.model.batch import Piece
from specinfer.model.folder import TOKEN_MAP, find_folder
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.policy.base import FixedPolicy
from tests.drafters.vocabulary.tokenizers_of import TOKENIZERS
from tests.model.gguf_files import write_model
from tiny import EOS, VOCAB, load_runner, make_request, make_tokenizer, random_prompts, run

CPU = torch.device("cpu")
IDS = [EOS, *range(3, VOCAB, 2)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=24),
    SamplingParams(temperature=0.9, max_tokens=24),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, max_tokens=20),
    SamplingParams(temperature=1.0, allowed_token_ids=range(0, VOCAB, 2), max_tokens=20),
    SamplingParams(temperature=0.7, logit_bias={4: 3.0, 5: 1.0}, frequency_penalty=0.5, max_tokens=20),
]
PROMPTS = random_prompts([5, 17, 30, 9, 12, 21], seed=8)


@pytest.fixture
def mapped(model_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A drafter's folder, a disturbed copy of the target, with a token map."""

    def make(ids: Any = IDS, **changes: Any) -> Path:
        source = model_folder("llama", noise=0.2, tokenizer=True, eos_token_id=EOS, **changes)
        folder = Path(shutil.copytree(source, tmp_path / "small", dirs_exist_ok=True))
        (folder / TOKEN_MAP).write_text(ids if isinstance(ids, str) else json.dumps(ids))
        return folder

    return make


@pytest.fixture
def small(mapped: Callable[..., Path], model_folder: Callable[..., Path]) -> Callable[..., DraftModel]:
    def load(quantization: str | None = None, **changes: Any) -> DraftModel:
        target = load_model(model_folder("llama", tokenizer=True, eos_token_id=EOS, **changes), "auto", CPU)
        return load_draft_model("small", mapped(**changes), target, make_tokenizer(), quantization)

    return load


def _logits(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    piece = Piece.from_span(ids, TokenTree.root(ids[-1]), runner.cache.slots("0"), runner.cache.reserve("0", len(ids)))
    logits = runner.forward([piece])
    runner.cache.free("0")
    return logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("native", [False, True])
def test_its_logits_are_those_of_the_whole_model(tied: bool, native: bool, mapped: Callable[..., Path]) -> None:
    folder = mapped(tie_word_embeddings=tied)
    whole = load_model(folder, torch.float32, CPU, native=native)
    cut = load_model(folder, torch.float32, CPU, native=native, token_map=torch.tensor(IDS))
    assert (whole.num_logits, cut.num_logits) == (VOCAB, len(IDS))
    assert cut.vocab_size == VOCAB
    assert cut.num_parameters == whole.num_parameters
    for prompt in PROMPTS:
        logits = [_logits(ModelRunner(one, 64), prompt) for one in (whole, cut)]
        assert logits[1].shape == (1, len(IDS))
        torch.testing.assert_close(logits[0][:, IDS], logits[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL"])
def test_stored_codes_of_a_cut_head_are_those_of_its_rows(tied: bool, kind: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "tie_word_embeddings": tied}
    write_model(tmp_path / "small.gguf", kind=kind, **wide)
    folder, ids = find_folder(tmp_path / "small.gguf"), torch.tensor(IDS)
    whole, cut = (load_model(folder, "auto", CPU, token_map=token_map) for token_map in (None, ids))
    assert cut.stored_types == whole.stored_types == kind
    assert cut.compute_path == whole.compute_path == "native fused layers"
    assert isinstance(cut.model, FusedDecoder)
    assert isinstance(whole.model, FusedDecoder)
    assert cut.model.head is not None
    assert whole.model.head is not None
    assert cut.model.head.call.panels.format == whole.model.head.call.panels.format
    for prompt in PROMPTS:
        logits = [_logits(ModelRunner(one, 64), prompt) for one in (whole, cut)]
        assert torch.equal(logits[0][:, IDS], logits[1])


@pytest.mark.parametrize("name", ["GPTQ", "AWQ", "FP8 of 128"])
def test_a_quantized_checkpoint_with_a_map_keeps_its_codes(
    name: str, mapped: Callable[..., Path], tmp_path: Path
) -> None:
    save_quantized(mapped(hidden_size=256, intermediate_size=256), tmp_path / "quantized", name)
    whole, cut = (
        load_model(tmp_path / "quantized", torch.bfloat16, CPU, token_map=ids) for ids in (None, torch.tensor(IDS))
    )
    assert cut.stored_types == whole.stored_types is not None
    assert torch.equal(_logits(ModelRunner(whole, 64), PROMPTS[1])[:, IDS], _logits(ModelRunner(cut, 64), PROMPTS[1]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_head_takes_only_its_rows(
    tied: bool, quantization: str | None, small: Callable[..., DraftModel], mapped: Callable[..., Path]
) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64}
    cut = small(quantization, tie_word_embeddings=tied, **sizes).loaded
    whole = load_model(cut.folder, "auto", CPU, quantization)
    row = 64 * (4 if quantization is None else 1)
    shared = tied and quantization is None  # then one embedding does for both, and the cut one comes beside it
    saved = VOCAB * row - len(IDS) * row - (VOCAB * row if shared else 0)
    slack = 64 * row // 2 + 2048  # panels are filled up, and quantized rows have scales
    assert abs((whole.num_bytes - cut.num_bytes) - saved) < slack


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", ["coupled", "multi-step", "traversal", "target-only"])
@pytest.mark.parametrize("budget", [TreeBudget.expansion((2, 1, 1)), TreeBudget(12, 5)], ids=["fixed", "best first"])
def test_an_engine_generates_the_same_tokens(
    rule: str, budget: TreeBudget, small: Callable[..., DraftModel], model_folder: Callable[..., Path]
) -> None:
    """Under the rules that use random numbers only greedy requests do, beside sampled ones."""
    target = load_runner(model_folder("llama", tokenizer=True, eos_token_id=EOS), 4096)
    drawing = {"coupled": "shared-noise", "target-only": "without-replacement"}.get(rule, "hybrid")
    one = small()
    jobs = list(enumerate(zip(PROMPTS, PARAMS, strict=True)))

    def outputs(drafter: Any) -> list[list[int]]:
        engine = Engine(target, drafter, FixedPolicy(budget), Scheduler(target.cache, 8, 256), rule)
        requests = [make_request(str(i), prompt, params, 40 + i, eos_token_ids=(EOS,)) for i, (prompt, params) in jobs]
        said = run(engine, requests)
        if drafter is not None:
            assert engine.metrics.num_draft_failures == 0
            assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > 8
        return said

    drafter = SmallModelDrafter(
        ModelRunner(one.loaded, 4096), VOCAB, "small", drawing, vocabulary=one.vocabulary, is_scored=True
    )
    merged = MergedDrafter([drafter, NGramDrafter()], may_choose=rule == "coupled")
    wanted, found = outputs(None), outputs(merged)
    tossing = rule in ("multi-step", "traversal")
    same = [i for i, (_, params) in jobs if params.is_greedy or not tossing]
    assert [found[i] for i in same] == [wanted[i] for i in same]


def test_it_is_scored_as_if_no_other_token_were_possible(small: Callable[..., DraftModel]) -> None:
    one = small()
    assert one.vocabulary.token_map is not None
    for params in (PARAMS[0], PARAMS[2], PARAMS[5]):
        for drawing in ("shared-noise", "hybrid"):
            prompt = PROMPTS[2]
            request = make_request("0", prompt[:9], params, 3)
            request.token_ids = list(prompt)
            short = torch.randn(12, len(IDS), generator=torch.Generator().manual_seed(1)) * 3
            losses = []
            for vocabulary, logits in ((one.vocabulary, short), (None, one.vocabulary.token_map.expand(short))):
                scoring = Scoring(drawing, vocabulary)
                scoring.begin(request, 1)
                scoring.read(request, prompt, logits)
                losses.append(scoring.take("0"))
            assert losses[0].output == pytest.approx(losses[1].output, abs=1e-6)
            assert len(losses[0].output) == 12


def test_outputs_of_an_llm_are_the_same_and_those_of_one_that_selects(
    mapped: Callable[..., Path], model_folder: Callable[..., Path]
) -> None:
    folder, drafter = model_folder("llama", tokenizer=True, eos_token_id=EOS), str(mapped())
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 120, "seed": 3}
    with LLM(folder, drafters=[], **options) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]
    choices: list[dict[str, Any]] = [
        {"tree": "2,1,1"},
        {"tree": "auto"},
        {"drafter_quantization": "int8"},
        {"drafters": [drafter, str(model_folder("llama", noise=0.6, tokenizer=True))], "select": "hedge:1"},
    ]
    for settings in choices:
        with LLM(folder, **({"drafters": [drafter], "tree": "best-first:8"} | options | settings)) as llm:
            outputs = llm.generate(prompts, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        origins = {origin for output in outputs for origin in output.outputs[0].token_origins if origin}
        assert "tree" not in settings or settings["tree"] == "auto" or origins == {"small"}


def test_a_model_that_is_served_itself_ignores_the_file(mapped: Callable[..., Path]) -> None:
    assert load_model(mapped(), "auto", CPU).num_logits == VOCAB


# ------------------------------------------------------------------------------------------- learning


def test_a_copy_that_learns_is_measured_on_its_tokens_and_keeps_the_file(
    small: Callable[..., DraftModel], tmp_path: Path
) -> None:
    loaded = small().loaded
    drafter = TrainableModel.load(loaded.folder, loaded.token_map)
    tokens = torch.tensor(PROMPTS[2])
    top = torch.arange(4).expand(20, -1)
    for source in (Source.GREEDY, Source.SAMPLED):
        example = TrainingExample(
            tokens.numpy(), 10, top.numpy(), torch.full((20, 4), 0.25).log().numpy(), np.zeros(20), 0, source
        )
        with torch.no_grad():
            hits = hits_in(drafter.next_logits(collate([example])), example, VOCAB)
        assert hits == pytest.approx(served_hits(loaded, example, VOCAB), abs=1e-4)
    (tmp_path / "saved").mkdir()
    drafter.save(tmp_path / "saved", loaded.folder)
    assert json.loads((tmp_path / "saved" / TOKEN_MAP).read_text()) == IDS


# --------------------------------------------------------------------------------------------- ranks


def test_ranks_must_have_the_same_map(mapped: Callable[..., Path]) -> None:
    def wanted(ids: list[int]) -> dict[str, str]:
        return DrafterPlacement((PlacedDrafter("small", str(mapped(ids)), 1),)).wanted()

    assert wanted(IDS) == wanted(IDS)
    assert wanted(IDS) != wanted([*IDS[:-1], 94])


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("[1, 2", r"token_map\.json is damaged"),
        ({"1": 2}, r"token_map\.json is not a list of token ids"),
        ([], r"token_map\.json is not a list of token ids"),
        ([1, 2.0], r"token_map\.json is not a list of token ids"),
        ([1, True], r"token_map\.json is not a list of token ids"),
        ([2, 1], r"do not ascend"),
        ([1, 3, 3], r"do not ascend"),
        ([-1, 3], r"token id -1 of .* not in the vocabulary of 96 tokens"),
        ([3, VOCAB], r"token id 96 of .* not in the vocabulary of 96 tokens; take a drafter that was made for this"),
    ],
)
def test_a_map_that_cannot_be_used_is_refused_by_name(
    ids: Any, message: str, mapped: Callable[..., Path], model_folder: Callable[..., Path]
) -> None:
    folder = model_folder("llama", tokenizer=True, eos_token_id=EOS)
    with pytest.raises(ModelError, match=rf"^drafters: .*{message}"):
        LLM(folder, drafters=[str(mapped(ids))], device="cpu")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("some", "'some' is no file; give auto, full, a number of tokens or a JSON list of ids"),
        (3, "must be from 1024 to 10000000, not 3"),
        ("99999999", "must be from 1024 to 10000000, not 99999999"),
        (True, "must be a whole number, not True"),
        (2.5, r"must be a name or a path, not 2\.5"),
        (2048, "the tokenizer has no merges, or no more than 2048 tokens; give a file of ids, or leave it out"),
    ],
)
def test_a_choice_of_tokens_that_cannot_be_used_is_refused_by_name(
    value: Any, message: str, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder("llama", tokenizer=True, eos_token_id=EOS)
    with pytest.raises((ValueError, ModelError), match=rf"^drafter_token_map:? .*{message}"):
        LLM(folder, drafters=[str(folder)], drafter_token_map=value, device="cpu")
    with pytest.raises(ValueError, match="drafter_token_map: no drafter is a model"):
        LLM(folder, drafters=["ngram"], drafter_token_map=2048, device="cpu")


def test_tokens_of_a_file_are_the_only_ones_that_are_proposed(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_folder("llama", tokenizer=True, eos_token_id=EOS)
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    target = load_model(folder, "auto", CPU)
    drafter = load_draft_model("small", folder, target, make_tokenizer(), None, token_map=tmp_path / "ids.json")
    assert drafter.loaded.num_logits == len(IDS)
    for text, message in (("[[" * 10**5, "is damaged"), ("{}", "is not a list"), (f"[1, {VOCAB}]", "token id 96 of")):
        (tmp_path / "ids.json").write_text(text)
        with pytest.raises(ModelError, match=rf"^drafter_token_map: .*{message}"):
            load_draft_model("small", folder, target, make_tokenizer(), None, token_map=tmp_path / "ids.json")


def test_a_head_takes_no_file_of_tokens(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    target = load_model(model_folder("llama", tokenizer=True, eos_token_id=EOS), "auto", CPU)
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    with pytest.raises(ModelError, match=r"^drafter_token_map: head is a head"):
        load_draft_model(
            "head", save_eagle3(tmp_path / "head"), target, make_tokenizer(), None, token_map=tmp_path / "ids.json"
        )


def test_the_whole_head_is_used_on_request(mapped: Callable[..., Path], model_folder: Callable[..., Path]) -> None:
    target = load_model(model_folder("llama", tokenizer=True, eos_token_id=EOS), "auto", CPU)
    drafter = load_draft_model("small", mapped(), target, make_tokenizer(), None, token_map="full")
    assert (drafter.loaded.num_logits, drafter.vocabulary.reduced) == (VOCAB, None)


def test_the_first_tokens_are_those_of_the_first_merges_with_special_ones_and_single_characters() -> None:
    vocab = {chr(0x4E00 + i): i for i in range(4000)} | {"a": 3111, "<|end|>": 4000}
    vocab.pop(chr(0x4E00 + 3111))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab, [])), eos_token="<|end|>")
    reduced = ReducedVocabulary.from_tokenizer(tokenizer, 4010, 1030)
    assert reduced is not None
    assert reduced.runs == (range(1056), range(3104, 3136), range(4000, 4010))
    assert reduced.ids.tolist() == [i for run in reduced.runs for i in run]
    assert reduced.suits([5, 3111, 4000] * 20)
    assert reduced.suits([2000] * 30 + [5] * 29 + [2000] * 3)
    assert not reduced.suits([2000] * 4)
    assert ReducedVocabulary.from_tokenizer(tokenizer, 1030, 1030) is None
    assert ReducedVocabulary.from_tokenizer(None, 4010, 1030) is None


def test_a_map_of_another_tokenizer_is_refused(mapped: Callable[..., Path], model_folder: Callable[..., Path]) -> None:
    folder = mapped()
    TOKENIZERS["permuted"]().save_pretrained(folder)
    with pytest.raises(
        ModelError, match=r"drafters: .*small has a token map.* another tokenizer .*remove token_map\.json"
    ):
        LLM(model_folder("llama", tokenizer=True, eos_token_id=EOS), drafters=[str(folder)], device="cpu")


def test_a_drafter_chooses_its_own_quantization_on_cpus(small: Callable[..., DraftModel]) -> None:
    sizes = {"hidden_size": 64, "vocab_size": 96}
    assert small(**sizes).loaded.quantization is None
    assert small(drafter_quantization="int8", **sizes).loaded.quantization == "int8"
    assert small("int4", drafter_quantization="int8", **sizes).loaded.quantization == "int4", "what is asked for counts"
    with pytest.raises(ModelError, match=r"^drafters: drafter_quantization in .*config.json must be one of int8"):
        small(drafter_quantization=["int8"], **sizes)
