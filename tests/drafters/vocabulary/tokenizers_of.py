"""Tokenizers of every kind that a drafter may have, over the alphabet of the tiny models."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tiny import make_tokenizer

_MARKS = ("<|begin|>", "<|end|>")
LETTERS = "etaoinshrdlucmfwypvbgkjqxz .,!?'\n"
_WIDE = "\u00e9\u20ac\U0001f642"


def wrap(tokenizer: Tokenizer, bos: str = "<s>", eos: str = "</s>") -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )


def bpe(tokens: Sequence[str], merges: str, **options: Any) -> Tokenizer:
    pairs = [(a, b) for a, b in (pair.split("_") for pair in merges.split("|") if pair)]
    every = list(dict.fromkeys([*tokens, *(a + b for a, b in pairs)]))
    return Tokenizer(BPE({token: i for i, token in enumerate(every)}, pairs, **options))


def byte_level(merges: str, marks: Sequence[str] = _MARKS) -> PreTrainedTokenizerFast:
    """Bytes in another order, with other merges; G with a dot is a space."""
    names = dict(zip(range(256), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    tokenizer = bpe([*names.values(), *marks], merges.replace(" ", "\u0120"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as GPT-2's: spaces are not in a token's place
    return wrap(tokenizer, *marks)


def _characters() -> PreTrainedTokenizerFast:
    """One token for each character, whole ones too that the target says byte by byte."""
    tokenizer = bpe([*LETTERS, *_WIDE], "")
    tokenizer.decoder = decoders.Fuse()
    return wrap(tokenizer, *_MARKS)


_WORDS = (
    "t_h|h_e|n_g|\u2581_t|\u2581t_he|\u2581_a|i_n|i_ng|\u2581_i|\u2581i_n|\u2581_c|\u2581c_a|s_t|a_t|o_u|r_e|\u2581_s"
)


def _metaspace(*, prepends: bool) -> PreTrainedTokenizerFast:
    """SentencePiece's way, as Llama 2 has it: a space before the text, U+2581 for spaces, bytes by number."""
    numbered = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = bpe(
        ["<unk>", "<s>", "</s>", *numbered, "\u2581", *LETTERS.replace(" ", "").replace("\n", "")],
        _WORDS, unk_token="<unk>", byte_fallback=True, fuse_unk=True,
    )  # fmt: skip
    if prepends:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return wrap(tokenizer)


def _permuted() -> PreTrainedTokenizerFast:
    """The target's, with other ids."""
    data = json.loads(make_tokenizer().backend_tokenizer.to_str())
    vocab = data["model"]["vocab"]
    order = random.Random(3).sample(range(len(vocab)), len(vocab))
    data["model"]["vocab"] = {token: order[i] for token, i in vocab.items()}
    for token in data["added_tokens"]:
        token["id"] = order[token["id"]]
    data["added_tokens"].sort(key=lambda token: token["id"])
    return wrap(Tokenizer.from_str(json.dumps(data)))


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "merges": lambda: byte_level("t_h|th_e|a_n|an_d| _the| _and|o_n|e_r|r_e|s_t| _c|i_n|\u00c3_\u00a9"),
    "characters": _characters,
    "metaspace": lambda: _metaspace(prepends=False),
    "prepended": lambda: _metaspace(prepends=True),
    "permuted": _permuted,
}
