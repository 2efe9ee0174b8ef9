"""Conversion of the tokenizer in a GGUF file to tokenizer.json.

Two kinds are supported: byte-level BPE ("gpt2"), which splits text by a rule that the file only names, and
SentencePiece's BPE ("llama"), whose merges follow from the tokens' scores. Tokens are those of llama.cpp; tests compare
them.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from specinfer.model.gguf.header import GgufError, GgufHeader
from specinfer.model.gguf.split_rules import ADDS_BOS, COMPOSES, DEFAULT, IGNORES_MERGES, SPLITS

logger = logging.getLogger(__name__)
SPACE = "▁"  # what SentencePiece has in place of it
_NO_TOKENIZER = "take the model as a folder with tokenizer.json"
_LONGEST = 512  # of tokens with merges; the work grows with its square
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(header: GgufHeader) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and the fields of tokenizer_config.json.

    Raises:
        GgufError: The file has no tokenizer, or one of an unknown kind.
    """
    kind = header.get("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise GgufError(header.path, f"its tokenizer is of kind {kind!r}, which is not read", _NO_TOKENIZER)
    tokens = tokens_of(header)
    types = types_of(header, tokens)
    tokenizer = _byte_level(header, tokens) if kind == "gpt2" else _sentencepiece(header, tokens, types)
    for wanted, is_special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        added = [token for token, found in zip(tokens, types, strict=True) if found == wanted and token]
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([AddedToken(token, normalized=False, special=is_special) for token in added])
    named = _named_tokens(header, tokens)
    _add_ends(header, tokenizer, kind, named)
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,  # no limit; the model's own applies
        **named,
    }


def _named_tokens(header: GgufHeader, tokens: Sequence[str]) -> dict[str, str]:
    """Return the tokens that tokenizer_config.json names."""
    named = {}
    for name, key in _NAMED.items():
        found = token_id(header, f"{key}_token_id")
        if found is not None and found < len(tokens):
            named[name] = tokens[found]
        elif (given := header.get(f"tokenizer.ggml.{key}_token_id", int)) is not None:
            logger.warning("%s: tokenizer.ggml.%s_token_id is %d, which is not a token", header.path, key, given)
    return named


def _byte_level(header: GgufHeader, tokens: Sequence[str]) -> Tokenizer:
    rule, listed = _rule(header), values_of(header, "merges", str)
    kinds = zip(tokens, types_of(header, tokens), strict=True)
    if listed is None and any(kind == TokenType.NORMAL and len(token) > 1 for token, kind in kinds):
        raise GgufError(header.path, "it has no merges of tokens", _NO_TOKENIZER)  # files leave out an empty list
    vocabulary = _vocabulary(tokens)
    merges = []
    for merge in listed or ():
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule in IGNORES_MERGES))
    if rule in COMPOSES:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[rule]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _rule(header: GgufHeader) -> str:
    """Return the name of the rule by which text is cut: the default one if the file has none, as in llama.cpp."""
    rule: str = header.get("tokenizer.ggml.pre", str) or DEFAULT
    if rule not in SPLITS:
        raise GgufError(header.path, f"its pre-tokenizer, {rule!r}, is not known", _NO_TOKENIZER)
    if rule == DEFAULT:
        logger.warning(
            "%s does not name its pre-tokenizer: text is cut by llama.cpp's default rule, which may not be the "
            "model's; files of newer converters name it",
            header.path,
        )
    return rule


def _sentencepiece(header: GgufHeader, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = values_of(header, "scores", float)
    if scores is None or len(scores) != len(tokens):
        raise GgufError(header.path, f"it has {len(scores or ())} scores for {len(tokens)} tokens")
    has_prefix = header.get("tokenizer.ggml.add_space_prefix", bool, True)
    unknown = token_id(header, "unknown_token_id")
    merged = {
        token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == TokenType.NORMAL
    }
    vocabulary = _vocabulary(tokens)
    tokenizer = Tokenizer(
        BPE(
            vocabulary, merges_of(merged, vocabulary), unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Return the token ids by text; of tokens with the same text the first counts, as in llama.cpp."""
    return {token: i for i, token in reversed(list(enumerate(tokens)))}


def merges_of(scores: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs that make a token, highest scores first: SentencePiece merges the pair with the best score."""
    found = []
    for token, score in scores.items():
        for cut in range(1, len(token) if len(token) <= _LONGEST else 0):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_ends(header: GgufHeader, tokenizer: Tokenizer, kind: str, named: dict[str, str]) -> None:
    begins = kind == "llama" or header.get("tokenizer.ggml.pre", str) in ADDS_BOS
    begins = header.get("tokenizer.ggml.add_bos_token", bool, begins) and "bos_token" in named
    ends = header.get("tokenizer.ggml.add_eos_token", bool, False) and "eos_token" in named
    first, last = [named["bos_token"]] if begins else [], [named["eos_token"]] if ends else []
    if not first and not last:
        return
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(first + last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B", *last], special_tokens=special
    )


_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # of SentencePiece
_NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    # What models of code write after a piece that they fill in: padding, or the next file.
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
}  # fmt: skip
# Texts that end no output beside one of each of these: in the vocabularies of gpt-oss, Solar Open and Gemma 4.
_NO_ENDS: Mapping[str, tuple[set[str], ...]] = {
    "<|end|>": ({"<|return|>", "<|flush|>"}, {"<|call|>", "<|calls|>"}),
    "</s>": ({"<|tool_response>"},),
}


def values_of(header: GgufHeader, name: str, kind: type) -> list[Any] | None:
    """Return a list about the tokens, or None if the file has none."""
    found: list[Any] | None = header.get(f"tokenizer.ggml.{name}", list)
    if found and not isinstance(found[0], kind):
        raise GgufError(header.path, f"tokenizer.ggml.{name} is a list of {type(found[0]).__name__}")
    return found


def tokens_of(header: GgufHeader) -> list[str]:
    """Return the tokens' texts by their ids."""
    tokens, size = values_of(header, "tokens", str), header.tensors["token_embd.weight"].shape[0]
    if not tokens or len(tokens) > size:
        raise GgufError(header.path, f"it names {len(tokens or ())} tokens, and has embeddings of {size}")
    return tokens


def types_of(header: GgufHeader, tokens: Sequence[str]) -> list[int]:
    """Return the tokens' types: those of the file, except that tokens that end an output are control tokens."""
    types = values_of(header, "token_type", int) or [int(TokenType.NORMAL)] * len(tokens)
    if len(types) != len(tokens):
        raise GgufError(header.path, f"it has {len(types)} types for {len(tokens)} tokens")
    return [int(TokenType.CONTROL) if _ends(token, kind) else kind for token, kind in zip(tokens, types, strict=True)]


def token_id(header: GgufHeader, name: str) -> int | None:
    """Return the id of a special token, or None if the file names none, or one that the vocabulary does not have."""
    size = header.tensors["token_embd.weight"].shape[0]
    is_sentencepiece = header.get("tokenizer.ggml.model", str) == "llama"
    found: int | None = header.get(f"tokenizer.ggml.{name}", int, _DEFAULTS.get(name) if is_sentencepiece else None)
    return found if found is not None and 0 <= found < size else None


def end_token_ids(header: GgufHeader) -> list[int]:
    """Return the tokens that end an output: those the file names, and those that are known by their text."""
    tokens = tokens_of(header)
    named = [i for name in _NAMED_ENDS if (i := token_id(header, f"{name}_token_id")) is not None]
    types = types_of(header, tokens)
    known = [i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if _ends(token, kind)]
    found = dict.fromkeys(named + known)
    texts = {tokens[i] for i in found if i < len(tokens)}
    others = {text for text, sets in _NO_ENDS.items() if all(texts & one for one in sets)}
    eos = token_id(header, "eos_token_id")
    return [i for i in found if i == eos or i >= len(tokens) or tokens[i] not in others]


def _ends(token: str, kind: int) -> bool:
    """Return whether a token ends an output by its text.

    Ordinary text has some of these texts, such as the tag </s>: a token of it is none unless the file marks it.
    """
    return token in _ENDS and (kind != TokenType.NORMAL or token.startswith("<|"))
