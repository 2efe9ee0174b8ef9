"""Drafters with a tokenizer of their own: what they read, what they may say, and that outputs do not change."""

import json
import logging
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from drafting import draft_within
from specinfer import LLM, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.demo.corpus import heldout_prompts
from specinfer.demo.pair import demo_folders
from specinfer.drafters import MergedDrafter, NGramDrafter, SmallModelDrafter
from specinfer.drafters.merge.selection import Selection
from specinfer.drafters.vocabulary.token_map import Known, SharedVocabulary
from specinfer.drafters.vocabulary.token_text import TokenText
from specinfer.drafters.vocabulary.translation import TranslatedVocabulary, find_vocabulary, same_tokenizer
from specinfer.engine.engine import Engine
from specinfer.engine.scheduler import Scheduler
from specinfer.model.batch import Piece
from specinfer.model.runner import ModelRunner
from specinfer.policy.base import FixedPolicy
from specinfer.verify import Acceptance
from tests.drafters.vocabulary.tokenizers_of import LETTERS, TOKENIZERS, bpe, byte_level, wrap
from tiny import (
    EOS,
    VOCAB,
    load_runner,
    make_request,
    make_tokenizer,
    paths_of,
    random_prompts,
    resized,
    run,
    save_tokenizer,
    transformers_model,
)


def _pieces() -> PreTrainedTokenizerFast:
    """WordPiece: a token that begins a word is not the one that goes on with it, and what it lacks is unknown."""
    letters = [letter for letter in LETTERS if not letter.isspace()]
    tokens = ["[UNK]", *letters, *("##" + letter for letter in letters), "the", "##the", "cat", "##at", "##ion"]
    tokenizer = Tokenizer(WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]"])
    return wrap(tokenizer)


READERS = TOKENIZERS | {"pieces": _pieces}
TEXTS = (
    "the cat is in the station, and the rest of it",
    " the  cat\n\n sat! it's the\u00e9 \u20ac\u20ac \U0001f642 end",
    "a",
    "\u00e9",
)


def _vocabulary(kind: str, padding: int = 0) -> TranslatedVocabulary:
    tokenizer = READERS[kind]()
    return TranslatedVocabulary(make_tokenizer(), tokenizer, VOCAB, len(tokenizer) + padding)


def _runner(target: ModelRunner, vocabulary: TranslatedVocabulary, size: int, num_slots: int = 1024) -> ModelRunner:
    """The target with another vocabulary: shared tokens have its own weights, the others random ones."""
    loaded, generator = target.loaded, torch.Generator().manual_seed(5)
    model = transformers_model(loaded.folder)
    tokens = list(range(VOCAB))
    shared = [token for token in tokens if vocabulary.to_target(torch.zeros(1, size))[0, token] == 0]
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        old = layer.weight
        new = torch.randn(size, old.shape[1], generator=generator) * old.std()
        new[list(vocabulary.to_drafter(shared))] = old[shared]
        layer.weight = torch.nn.Parameter(new, requires_grad=False)
    return ModelRunner(replace(loaded, model=model, vocab_size=size), num_slots)


def _drafter(kind: str, target: ModelRunner, num_slots: int = 1024, **options: Any) -> SmallModelDrafter:
    vocabulary = _vocabulary(kind)
    size = len(TOKENIZERS[kind]())
    runner = _runner(target, vocabulary, size, num_slots)
    return SmallModelDrafter(runner, VOCAB, kind, vocabulary=vocabulary, **options)


def _engine(
    target: ModelRunner, drafter: Any, budget: TreeBudget, verification: str = "coupled", **limits: int
) -> Engine:
    scheduler = Scheduler(target.cache, limits.get("max_num_seqs", 32), limits.get("max_num_batched_tokens", 512))
    return Engine(target, drafter, FixedPolicy(budget), scheduler, verification)


# ---------------------------------------------------------------------------------------- token texts


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_token_texts_are_what_tokens_decode_to(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    token_text = TokenText(tokenizer, len(tokenizer))
    ids = tokenizer.encode(text, add_special_tokens=False)
    said = b"".join(map(token_text.text, ids)).decode()
    assert said.removeprefix(" " if token_text.drops_first_space else "") == tokenizer.decode(ids)
    # This one takes a space at a text's beginning for its own.
    assert tokenizer.decode(ids) == (text.removeprefix(" ") if kind == "metaspace" else text)


def test_shared_tokens_by_hand() -> None:
    """Same text, same token; of special ones only the ends."""
    sizes = {kind: _vocabulary(kind).num_shared for kind in TOKENIZERS}
    assert sizes["permuted"] == VOCAB - 1  # all but the beginning
    target, other = make_tokenizer(), TOKENIZERS["metaspace"]()
    vocabulary = _vocabulary("metaspace")

    def own(token: str) -> int:
        (i,) = vocabulary.to_drafter([target.convert_tokens_to_ids(token)])
        return i

    for theirs, its in (("\u0120the", "\u2581the"), ("ing", "ing"), ("\u0120", "\u2581"), ("\u010a", "<0x0A>")):
        assert own(theirs) == other.convert_tokens_to_ids(its)
    assert own("a") == other.convert_tokens_to_ids("a"), "rather than <0x61>"
    assert own("</s>") == other.eos_token_id
    with pytest.raises(KeyError):
        own("\u0120and")
    with pytest.raises(KeyError):
        own("<s>")


def test_token_texts_of_words_and_bare_tokens() -> None:
    words = Tokenizer(WordPiece({"[UNK]": 0, "the": 1, "##re": 2, "[SEP]": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.WordPiece()
    token_text = TokenText(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[SEP]"), 3)
    assert token_text.by_text == {b" the": 1, b"re": 2}
    assert token_text.drops_first_space
    assert token_text.eos is None, "the model has no such token"
    bare = PreTrainedTokenizerFast(tokenizer_object=bpe("ab", ""))
    assert TokenText(bare, 2).by_text == {b" a": 0, b" b": 1}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_logits_of_shared_tokens_only(kind: str) -> None:
    vocabulary, size = _vocabulary(kind, padding=7), len(TOKENIZERS[kind]()) + 7
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    translated = vocabulary.to_target(logits)
    assert translated.shape == (3, VOCAB)
    shared = (translated[0] > -torch.inf).nonzero().squeeze(1).tolist()
    assert len(shared) == vocabulary.num_shared
    assert torch.equal(translated[:, shared], logits[:, list(vocabulary.to_drafter(shared))])
    texts, own = TokenText(make_tokenizer(), VOCAB), TokenText(TOKENIZERS[kind](), size)
    for token in shared:
        (i,) = vocabulary.to_drafter([token])
        assert texts.text(token) == own.text(i)


# ----------------------------------------------------------------------------------------- reading


def _read(vocabulary: TranslatedVocabulary, request: Request) -> Known:
    known = vocabulary.read(request, 0)
    assert known is not None
    return replace(known, ids=list(known.ids))


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_text_is_read_as_the_drafters_tokenizer_reads_it(kind: str, text: str) -> None:
    known = _read(_vocabulary(kind), make_request("0", make_tokenizer().encode(text)))
    assert list(known.ids) == READERS[kind]().encode(text)
    assert known.num_kept == 0


@pytest.mark.parametrize("theirs", ["metaspace", "prepended", "characters", "pieces"])
@pytest.mark.parametrize("kind", ["merges", "metaspace", "prepended"])
def test_the_text_of_other_targets(kind: str, theirs: str) -> None:
    """A space that the target's tokenizer put before the text is no part of it."""
    target, other = READERS[theirs](), TOKENIZERS[kind]()
    vocabulary = TranslatedVocabulary(target, other, len(target), len(other))
    text = "the cat is in the station and"
    for lead in ([], [target.bos_token_id]):
        ids = target.encode(text, add_special_tokens=False)
        known = _read(vocabulary, make_request("0", [*lead, *ids]))
        own = other.encode(text, add_special_tokens=False)
        assert list(known.ids)[-len(own) :] == own
        assert list(known.ids)[: -len(own)] == ([other.bos_token_id] if lead or kind != "merges" else [])
        vocabulary.forget("0")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_stand_for_their_own(kind: str) -> None:
    tokenizer, own = make_tokenizer(), TOKENIZERS[kind]()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    words = tokenizer.encode("the cat")
    known = _read(_vocabulary(kind), make_request("0", [bos, *words, eos, *words]))
    said = own.encode(f"the cat{own.eos_token}the cat", add_special_tokens=False)
    assert list(known.ids) == [own.bos_token_id, *said]
    nothing = _read(_vocabulary(kind), make_request("0", [bos]))
    assert list(nothing.ids) == [own.bos_token_id]


def test_special_tokens_of_one_side_are_left_out() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>", "<user>"]})
    other = TOKENIZERS["merges"]()
    other.add_special_tokens({"additional_special_tokens": ["<user>"]})
    vocabulary = TranslatedVocabulary(tokenizer, other, VOCAB + 2, len(other))
    ids = tokenizer.encode("<user>the<tool> cat")
    assert list(_read(vocabulary, make_request("0", ids)).ids) == other.encode("<user>the cat")
    (column,) = vocabulary.to_target(torch.zeros(1, len(other)))
    assert column[ids[0]] == -torch.inf, "known in a text, but never guessed"


def test_an_empty_text_begins_somewhere() -> None:
    """The drafter has nothing before it: its own beginning stands for that, until there is a text."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    other = TOKENIZERS["merges"]()
    vocabulary = TranslatedVocabulary(tokenizer, other, VOCAB + 1, len(other))
    request = make_request("0", [VOCAB])
    assert list(_read(vocabulary, request).ids) == [other.bos_token_id]
    request.token_ids += tokenizer.encode("the cat")
    known = _read(vocabulary, request)
    assert list(known.ids) == other.encode("the cat")
    assert known.num_kept == 0


def test_inside_a_character_nothing_is_read() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("the \U0001f642 end")
    whole = next(i for i in range(len(ids)) if "\U0001f642" in tokenizer.decode(ids[:i]))
    for kind in TOKENIZERS:
        vocabulary, request = _vocabulary(kind), make_request("0", ids[: whole - 4])
        before = _read(vocabulary, request)
        for token in ids[whole - 4 : whole - 1]:
            request.token_ids.append(token)
            assert vocabulary.read(request, 0) is None
        request.token_ids.append(ids[whole - 1])
        after = _read(vocabulary, request)
        assert list(after.ids) == TOKENIZERS[kind]().encode("the \U0001f642")
        assert after.ids[: after.num_kept] == before.ids[: after.num_kept]
        assert after.num_tokens == whole


def test_tokens_the_drafters_model_lacks_are_left_out() -> None:
    other = TOKENIZERS["merges"]()
    size = other.convert_tokens_to_ids("the")
    vocabulary = TranslatedVocabulary(make_tokenizer(), other, VOCAB, size)
    known = _read(vocabulary, make_request("0", make_tokenizer().encode("athe cat")))
    assert list(known.ids) == [i for i in other.encode("athe cat") if i < size]


WORD = st.sampled_from(["the", "cat", "station", "\u00e9t\u00e9", "a", "\U0001f642", "it's", "and", "ring", "xxxx"])
SPACE = st.sampled_from([" ", " ", " ", ", ", "\n", "  ", "! "])


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(READERS)),
    st.lists(st.tuples(WORD, SPACE), min_size=60, max_size=120),
    st.lists(st.integers(1, 9), min_size=10),
)
def test_reading_step_by_step_is_reading_at_once(
    kind: str, words: Sequence[tuple[str, str]], steps: Sequence[int]
) -> None:
    """Long enough that the settled part moves on several times."""
    text = "".join(word + space for word, space in words).strip(" ")
    ids, at = make_tokenizer().encode(text), 0
    vocabulary, request = _vocabulary(kind), make_request("0", ids[:1])
    request.token_ids.clear()
    before: list[int] = []
    while at < len(ids):
        at += steps[at % len(steps)]
        request.token_ids[:] = ids[:at]
        known = vocabulary.read(request, 0)
        if known is not None:
            now = list(known.ids)
            assert now[: known.num_kept] == before[: known.num_kept]
            before = now
    assert before == READERS[kind]().encode(text)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("unit", ["\U0001f642\u00e9", "xyz", "theat", "the x", "cat thestation "])
def test_a_text_without_an_end_of_words(kind: str, unit: str) -> None:
    """No place between words, or few: the text is cut between tokens, but never inside a character."""
    text = unit * 60
    ids = make_tokenizer().encode(text)
    vocabulary, request, known = _vocabulary(kind), make_request("0", ids[:1]), None
    for end in range(1, len(ids) + 1):
        request.token_ids[:] = ids[:end]
        known = vocabulary.read(request, 0)
    assert known is not None
    if kind != "pieces" or " " in unit:  # for WordPiece there is no way to go on with such a word
        assert list(known.ids) == READERS[kind]().encode(text)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("unit", ["the cat, ", "xyz", "\u00e9", "\n"])
def test_the_work_of_a_step_does_not_grow_with_the_text(kind: str, unit: str) -> None:
    class Counting:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer, self.lengths = tokenizer, list[int]()

        def encode(self, text: str, **options: Any) -> Any:
            self.lengths.append(len(text))
            return self.tokenizer.encode(text, **options)

    ids = make_tokenizer().encode(unit * 1000)[:1500]
    vocabulary, request = _vocabulary(kind), make_request("0", ids[:500])
    counting = vocabulary._tokenizer = Counting(vocabulary._tokenizer)
    vocabulary.read(request, 0)
    kept = []
    for token in ids[500:]:
        request.token_ids.append(token)
        known = vocabulary.read(request, 0)
        if known is not None:
            kept.append(len(known.ids) - known.num_kept)
    assert max(counting.lengths[1:]) < (400 if kind != "pieces" else 1100)  # a word it does not know is one token
    assert max(kept[1:], default=0) < 60


# ------------------------------------------------------------------------------------------ drafts


@settings(max_examples=8)
@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, VOCAB - 1), st.booleans()), min_size=1, max_size=25),
    st.sampled_from([TreeBudget.expansion((2, 1, 1)), TreeBudget(6, 3)]),
)
def test_it_keeps_up_with_any_output(
    runner_of: Callable[..., ModelRunner],
    kind: str,
    prompt: list[int],
    steps: Sequence[tuple[int, int, bool]],
    budget: TreeBudget,
) -> None:
    """Its cache follows accepted guesses, others' tokens, text encoded anew, and steps it did not see the end of."""
    target = runner_of("llama")
    drafter, fresh = _drafter(kind, target), _drafter(kind, target)
    request = make_request("0", prompt, SamplingParams(temperature=0.0, max_tokens=500))
    for leaf, token, seen in steps:
        tree = draft_within(drafter, request, budget)
        assert set(paths_of(tree)) == set(paths_of(draft_within(fresh, request, budget)))
        fresh.forget("0")
        path = tree.path(leaf % len(tree))
        for said in (*(tree.tokens[node] for node in path), token):
            request.append(said, None)
        if seen:
            drafter.observe(request, tree, Acceptance(path, token))
    drafter.forget("0")
    assert not drafter.vocabulary._readings, "nothing is left of a request"  # type: ignore[attr-defined]


def test_accepted_guesses_are_not_read_again(runner_of: Callable[..., ModelRunner]) -> None:
    """What the drafter computed of its guesses stays, as long as the text is encoded as they were."""
    drafter = _drafter("characters", runner_of("llama"))
    tokenizer = make_tokenizer()
    params = SamplingParams(
        temperature=0.0, max_tokens=99, allowed_token_ids=tokenizer.convert_tokens_to_ids(["x", "z"])
    )
    request = make_request("0", tokenizer.encode("the \u00e9 cat"), params)  # one character is two target tokens
    for _ in range(5):
        tree = draft_within(drafter, request, TreeBudget.expansion((2, 1, 1)))
        num_known = len(drafter._cache.known["0"].ids)
        path = tree.path(len(tree) - 1)
        for token in (*(tree.tokens[node] for node in path), tree.tokens[1]):
            request.append(token, None)
        drafter.observe(request, tree, Acceptance(path, tree.tokens[1]))
        assert len(drafter.runner.cache.slots("0")) == num_known + 2  # nothing hung on the last one
        known = drafter._sync(request)
        assert known is not None
        assert len(known.ids) == num_known + 4
        assert known.num_kept == num_known + 2
    drafter.forget("0")


def test_its_own_length_is_counted_in_its_own_tokens(runner_of: Callable[..., ModelRunner]) -> None:
    drafter = _drafter("characters", runner_of("llama"))
    drafter.runner.loaded = replace(drafter.runner.loaded, max_position=20)
    for text, depth in (("the " * 4, 3), ("the " * 4 + "is", 2), ("the " * 5, 0), ("the " * 9, 0)):
        request = make_request("0", make_tokenizer().encode(text))
        assert draft_within(drafter, request, TreeBudget.expansion((1, 1, 1))).max_depth == depth
        drafter.forget("0")


def test_long_texts_are_read_in_chunks(runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    request, budget = make_request("0", make_tokenizer().encode("the cat is in the station, " * 3)), TreeBudget(6, 3)
    whole = _drafter("merges", runner_of("llama"))
    tree = draft_within(whole, request, budget)
    monkeypatch.setattr("specinfer.drafters.drafter_cache.MAX_CHUNK", 7)
    parts = _drafter("merges", runner_of("llama"))
    assert set(paths_of(draft_within(parts, request, budget))) == set(paths_of(tree))
    assert tree.num_guessed == 6
    for drafter in (whole, parts):
        drafter.forget("0")


def test_a_copy_with_other_ids_guesses_as_well(runner_of: Callable[..., ModelRunner]) -> None:
    """Character by character there is one way to read a text, so the copy knows exactly what the original does."""
    target = runner_of("llama", vocab_size=256)
    tokenizer = byte_level("", marks=("<s>", "</s>"))
    other = byte_level("", marks=("</s>", "<s>"))
    order = random.Random(1).sample(range(256), 256)
    data = json.loads(other.backend_tokenizer.to_str())
    data["model"]["vocab"] = {token: order[i] if i < 256 else i for token, i in data["model"]["vocab"].items()}
    other = wrap(Tokenizer.from_str(json.dumps(data)))
    vocabulary = TranslatedVocabulary(tokenizer, other, 256, 256)
    assert vocabulary.num_shared == 256
    column = list(vocabulary.to_drafter(range(256)))
    model = transformers_model(target.loaded.folder)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = torch.empty_like(layer.weight)
        weight[column] = layer.weight
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    copied = ModelRunner(replace(target.loaded, model=model), 1000)
    ascii_only = {i: -100.0 for token, i in tokenizer.get_vocab().items() if i < 256 and not token.isascii()}
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9), SamplingParams(top_k=3)):
        params = replace(params, max_tokens=25, logit_bias=ascii_only)
        for budget in (TreeBudget.expansion((1, 1, 1)), TreeBudget(8, 4)):
            stats = []
            for drafter in (
                SmallModelDrafter(resized(target, 1000), 256),
                SmallModelDrafter(copied, 256, vocabulary=vocabulary),
            ):
                request = make_request("0", tokenizer.encode("the cat sat"), params, seed=4)
                (said,) = run(_engine(target, drafter, budget), [request])
                stats.append((said, request.speculation.as_dict()))
            assert stats[0] == stats[1]
            assert stats[0][1]["tokens_per_pass"] > 2  # type: ignore[operator]


# ---------------------------------------------------------------------------------------- lossless

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.9, max_tokens=24),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=20),
    SamplingParams(temperature=1.0, top_k=5, logit_bias={EOS: 2.0}, max_tokens=30),
    SamplingParams(temperature=1.2, top_p=0.8, min_tokens=5, max_tokens=9),
]
PROMPTS = [*random_prompts([3, 26, 40], seed=5), *(make_tokenizer().encode(text) for text in TEXTS)]
JOBS = [(i, k) for i in range(len(PROMPTS)) for k in range(len(PARAMS))]


def _request(job: tuple[int, int]) -> Request:
    prompt, params = job
    name = f"{prompt}.{params}"
    return make_request(name, PROMPTS[prompt], PARAMS[params], seed=prompt * 31 + params, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def plain(runner_of: Callable[..., ModelRunner]) -> dict[tuple[int, int], list[int]]:
    engine = _engine(runner_of("llama"), None, TreeBudget())
    return dict(zip(JOBS, run(engine, [_request(job) for job in JOBS]), strict=True))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("budget", [TreeBudget.expansion((2, 1, 1)), TreeBudget(12, 5)], ids=["fixed", "best first"])
def test_a_batch_generates_the_same_tokens(
    kind: str,
    budget: TreeBudget,
    runner_of: Callable[..., ModelRunner],
    plain: dict[tuple[int, int], list[int]],
) -> None:
    requests = [_request(job) for job in JOBS]
    engine = _engine(runner_of("llama"), _drafter(kind, runner_of("llama"), 8000), budget)
    assert run(engine, requests) == list(plain.values())
    assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > 100, "it is of some use"


@settings(max_examples=10)
@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.lists(st.sampled_from(JOBS), min_size=1, max_size=7, unique=True),
    st.sampled_from([TreeBudget.expansion(w) for w in ((1,), (2, 2), (1, 1, 3))] + [TreeBudget(7, 3), TreeBudget(20)]),
    st.integers(1, 6),
    st.integers(1, 64),
    st.sampled_from([80, 130, 600]),
    st.sampled_from([60, 200, 900]),
    st.booleans(),
)
def test_any_engine_generates_the_same_tokens(
    runner_of: Callable[..., ModelRunner],
    plain: dict[tuple[int, int], list[int]],
    kind: str,
    jobs: list[tuple[int, int]],
    budget: TreeBudget,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_slots: int,
    drafter_slots: int,
    beside_ngram: bool,
) -> None:
    """Requests are put back, and the drafter's cache runs out."""
    small = _drafter(kind, runner_of("llama"), drafter_slots)
    engine = _engine(
        resized(runner_of("llama"), num_slots),
        MergedDrafter([small, NGramDrafter()] if beside_ngram else [small]),
        budget,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    requests = [_request(job) for job in jobs]
    try:
        assert run(engine, requests) == [plain[job] for job in jobs]
    finally:
        for request in requests:
            engine.abort(request)


# ----------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_it_is_scored_on_tokens_of_its_own(kind: str, runner_of: Callable[..., ModelRunner]) -> None:
    drafter = _drafter(kind, runner_of("llama"), is_scored=True)
    request = make_request("0", make_tokenizer().encode("the cat sat on the mat"), SamplingParams(max_tokens=99))
    drafter.replay([request])
    ids = list(_read(_vocabulary(kind), request).ids)
    cache = drafter.runner.cache
    piece = Piece.from_span(ids, None, cache.slots("all"), cache.reserve("all", len(ids)))
    best = drafter.runner.forward([replace(piece, num_logits=len(ids))]).argmax(dim=-1).tolist()
    cache.free("all")
    assert drafter.take_losses("0").prompt == [float(a != b) for a, b in zip(best[:-1], ids[1:], strict=True)]
    for step in range(4):  # its own accepted nodes among them
        tree = draft_within(drafter, request, TreeBudget(6, 3))
        leaf = len(tree) - 1
        for token in (*tree.path_tokens(leaf), make_tokenizer().encode("x. y")[step]):
            request.append(token, None)
        drafter.observe(request, tree, Acceptance(tree.path(leaf), request.token_ids[-1]))
    drafter.replay([request])
    losses = drafter.take_losses("0")
    assert not losses.prompt
    # Of a text that is encoded anew a token may be scored once more, or not at all.
    assert abs(len(losses.output) - (len(_read(_vocabulary(kind), request).ids) - len(ids))) <= 4
    drafter.forget("0")


@pytest.mark.parametrize("drawing", ["shared-noise", pytest.param("iid", marks=pytest.mark.slow)])
def test_a_choice_among_them_changes_nothing(
    drawing: str, runner_of: Callable[..., ModelRunner], plain: dict[tuple[int, int], list[int]]
) -> None:
    drafters = [_drafter(kind, runner_of("llama"), 8000, draft_sampling=drawing, is_scored=True) for kind in TOKENIZERS]
    merged = MergedDrafter(
        [*drafters, NGramDrafter()],
        may_choose=drawing == "shared-noise",
        selection=Selection(list(TOKENIZERS), ["ngram"], 1),
    )
    engine = _engine(runner_of("llama"), merged, TreeBudget(12, 5))
    jobs = JOBS[::3]
    assert run(engine, [_request(job) for job in jobs]) == [plain[job] for job in jobs]
    assert engine.metrics.num_draft_failures == 0
    assert not merged.num_failures


@pytest.mark.parametrize(
    ("kind", "drawing"), [("merges", "without-replacement"), ("metaspace", "iid"), ("characters", "hybrid")]
)
def test_recorded_distributions_are_over_target_tokens(
    kind: str, drawing: str, runner_of: Callable[..., ModelRunner]
) -> None:
    drafter = _drafter(kind, runner_of("llama"), 8000, draft_sampling=drawing)
    shared = set(drafter.vocabulary._pairs)  # type: ignore[attr-defined]
    num_distributions, draft = 0, drafter.draft

    def watched(*args: Any) -> list[TokenTree]:
        nonlocal num_distributions
        trees = draft(*args)
        for tree in trees:
            for made in tree.draws:
                assert tree.tokens[made.node] in shared
                if made.distribution is None:
                    continue
                num_distributions += 1
                possible = made.distribution.token_ids[made.distribution.weights() > 0].tolist()
                assert made.distribution.weights().sum() == pytest.approx(1)
                assert tree.tokens[made.node] in possible
                assert shared.issuperset(possible)
        return trees

    drafter.draft = watched  # type: ignore[method-assign, assignment]
    for budget in (TreeBudget.expansion((2, 2, 1)), TreeBudget(10, 4)):
        requests = [_request(job) for job in JOBS[::3]]
        run(_engine(runner_of("llama"), drafter, budget, "multi-step"), requests)
        assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > 10
    assert num_distributions > 300


# -------------------------------------------------------------------------------------------- LLM


def _save(folder: Path, runner: ModelRunner, tokenizer: PreTrainedTokenizerFast, source: Path) -> Path:
    folder.mkdir()
    weights = {name: weight.contiguous() for name, weight in runner.loaded.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": runner.loaded.vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["merges", "prepended"])
def test_outputs_of_an_llm_are_the_same(
    kind: str, tmp_path: Path, model_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder("llama", tokenizer=True, eos_token_id=EOS)
    vocabulary, tokenizer = _vocabulary(kind), TOKENIZERS[kind]()
    small = _save(tmp_path / "small", _runner(load_runner(folder), vocabulary, len(tokenizer)), tokenizer, folder)
    params = [replace(one, seed=i) for i, one in enumerate(PARAMS[: len(TEXTS)])]
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 120}
    with LLM(folder, drafters=[], **options) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(TEXTS, params)]
    for tree in ("2,1,1", "best-first:8", "auto"):
        with (
            caplog.at_level(logging.INFO, logger="specinfer"),
            LLM(folder, drafters=[str(small)], tree=tree, **options) as llm,
        ):
            outputs = llm.generate(TEXTS, params)
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert f"guesses among the {vocabulary.num_shared} tokens" in caplog.text
        origins = [origin for output in outputs for origin in output.outputs[0].token_origins if origin]
        assert tree == "auto" or set(origins) == {"small"}


def _permuted_demo_drafter(folder: Path) -> Path:
    """The embedded drafter with its tokens numbered otherwise."""
    shutil.copytree(demo_folders().drafter, folder)
    model = transformers_model(folder)
    weight = model.get_input_embeddings().weight
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))
    weight[order] = weight.clone()
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"] = {token: int(order[i]) for token, i in data["model"]["vocab"].items()}
    for token in data["added_tokens"]:
        token["id"] = int(order[token["id"]])
    (folder / "tokenizer.json").write_text(json.dumps(data))
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_demo_drafter_with_other_ids_is_as_good(tmp_path: Path) -> None:
    other = _permuted_demo_drafter(tmp_path / "other")
    prompts = heldout_prompts(2, num_chars=200)
    results: list[list[Any]] = [[], []]
    for result, drafter in zip(results, ("demo", str(other)), strict=True):
        with LLM("demo", drafters=[drafter], tree="1,1,3,1", device="cpu", max_model_len=400) as llm:
            for params in (SamplingParams(temperature=0.0, max_tokens=30), SamplingParams(max_tokens=30, seed=2)):
                said = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
                result.append((said, llm.engine.metrics.num_steps))
    assert results[0] == results[1]


# ------------------------------------------------------------------------------------ which of them


def test_the_same_tokenizer_is_shared() -> None:
    one, other = make_tokenizer(), make_tokenizer()
    assert same_tokenizer(one, other)
    assert isinstance(find_vocabulary("small", one, other, VOCAB, VOCAB + 5), SharedVocabulary)
    assert isinstance(find_vocabulary("small", one, None, VOCAB, VOCAB), SharedVocabulary)


def test_other_merges_are_another_tokenizer() -> None:
    data = json.loads(make_tokenizer().backend_tokenizer.to_str())
    data["model"]["merges"].reverse()
    other = wrap(Tokenizer.from_str(json.dumps(data)))
    assert other.get_vocab() == make_tokenizer().get_vocab()
    assert not same_tokenizer(make_tokenizer(), other)
    assert isinstance(find_vocabulary("small", make_tokenizer(), other, VOCAB, VOCAB), TranslatedVocabulary)


def test_what_is_refused_by_name() -> None:
    strange = bpe("αβγδεζηθικλμν", "")
    strange.decoder = decoders.Fuse()
    with pytest.raises(ModelError, match=r"small has another tokenizer .* only 1 of its tokens .* target's tokenizer"):
        find_vocabulary("small", make_tokenizer(), wrap(strange), VOCAB, 15)
    with pytest.raises(ModelError, match=r"small has a vocabulary of 15 tokens, the target of 96.* no tokenizer"):
        find_vocabulary("small", make_tokenizer(), None, VOCAB, 15)

    class Slow:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    with pytest.raises(ModelError, match=r"that of small comes without a tokenizer\.json"):
        find_vocabulary("small", make_tokenizer(), Slow(), VOCAB, 15)


def test_a_folder_with_too_little_in_common(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = model_folder("llama", tokenizer=True, eos_token_id=EOS)
    other = shutil.copytree(folder, tmp_path / "other")
    strange = bpe("αβγδεζηθικλμν", "")
    strange.decoder = decoders.Fuse()
    wrap(strange).save_pretrained(other)
    with pytest.raises(ModelError, match=r"drafters: .*other has another tokenizer than the target, and only 1 of"):
        LLM(folder, drafters=[str(other)], device="cpu")
    save_tokenizer(other)
    LLM(folder, drafters=[str(other)], device="cpu").shutdown()
