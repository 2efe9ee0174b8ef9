"""The vocabulary of a GGUF file: its tokens, their types, and those that begin or end an output.

Converters often leave out what a token is for. Tokens that end an output are then known by their text, as in llama.cpp.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType

from specinfer.model.gguf.header import GgufError, GgufHeader

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
