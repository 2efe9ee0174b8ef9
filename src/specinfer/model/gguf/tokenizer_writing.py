"""Tokenizers as metadata of GGUF files: byte-level BPE by the name of its rule, and SentencePiece's BPE by scores.

SentencePiece merges the neighbours that make the token of the best score. A tokenizer.json has merges in their place,
in the order of these scores. It is written if its merges are all those that follow from such scores.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType

from specinfer.core.errors import ModelError
from specinfer.model.gguf.split_rules import IGNORES_MERGES, name_rule
from specinfer.model.gguf.tokenizer import SPACE, merges_of

logger = logging.getLogger(__name__)
_INSTEAD = "use --to int4 or int8, or the converter of llama.cpp"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def refusal(fault: str) -> ModelError:
    """Return the refusal of a model that a GGUF file cannot hold."""
    return ModelError(f"model: {fault}; {_INSTEAD}")


def tokenizer_metadata(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer.

    Args:
        tokenizer: transformers' tokenizer.
        vocab_size: Number of tokens that the model has embeddings of.

    Raises:
        ModelError: A file cannot hold it.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = state["model"], {one["id"]: one for one in state["added_tokens"]}
    if model["type"] != "BPE":
        raise refusal(f"its tokenizer is of kind {model['type']}, not BPE")
    tokens = {i: token for token, i in model["vocab"].items()} | {i: one["content"] for i, one in added.items()}
    if len(tokens) > vocab_size or max(tokens) >= vocab_size:
        raise refusal(f"its tokenizer has token {max(tokens)}, and the vocabulary {vocab_size} tokens")
    types = [TokenType.NORMAL if i in tokens else TokenType.UNUSED for i in range(vocab_size)]
    for i, one in added.items():
        types[i] = TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED
    texts = [tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    ids = tokenizer("a").input_ids
    own = _sentencepiece(state, texts, types) if model.get("byte_fallback") else _byte_level(state)
    return (
        own
        | {
            "tokenizer.ggml.tokens": texts,
            "tokenizer.ggml.token_type": [int(one) for one in types],
            "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
            "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
            "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
            "tokenizer.ggml.add_bos_token": bool(ids) and ids[0] == tokenizer.bos_token_id,
            "tokenizer.ggml.add_eos_token": bool(ids) and ids[-1] == tokenizer.eos_token_id,
        }
        | _templates(tokenizer.chat_template)
    )


def _templates(given: Any) -> dict[str, Any]:
    """Return the chat template, or several by their names."""
    templates = given if isinstance(given, Mapping) else {"default": given}
    named = {re.sub("[^A-Za-z0-9]", "_", name): text for name, text in templates.items() if name != "default"}
    keys = {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    return {"tokenizer.chat_template": templates.get("default"), "tokenizer.chat_templates": list(named) or None} | keys


def _byte_level(state: Mapping[str, Any]) -> dict[str, Any]:
    model = state["model"]
    # Files do not hold NFC.
    is_known = (state["normalizer"] or {}).get("type", "NFC") == "NFC"
    rule = name_rule(state["pre_tokenizer"]) if is_known else None
    if rule is None or bool(model.get("ignore_merges")) != (rule in IGNORES_MERGES):
        raise refusal("its pre-tokenizer has no known name in GGUF files")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in model["merges"]],
    }


# -------------------------------------------------------------------------------------- SentencePiece


def _sentencepiece(state: Mapping[str, Any], texts: Sequence[str], types: list[TokenType]) -> dict[str, Any]:
    """Return the metadata of SentencePiece's BPE, and note in the types which tokens are bytes, and the unknown one."""
    model, ids = state["model"], {text: i for i, text in reversed(list(enumerate(texts)))}
    if missing := [one for one in _BYTES if one not in ids]:
        raise refusal(f"its tokenizer has no token for the byte {missing[0]}")
    has_prefix = _has_prefix(state)
    for text in _BYTES:
        types[ids[text]] = TokenType.BYTE
    unknown = None if model.get("unk_token") is None else ids[model["unk_token"]]
    if unknown is not None:
        types[unknown] = TokenType.UNKNOWN
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": _scores(model["merges"], texts, types),
        "tokenizer.ggml.add_space_prefix": has_prefix,
        "tokenizer.ggml.unknown_token_id": unknown,
    }


def _has_prefix(state: Mapping[str, Any]) -> bool:
    """Return whether a space comes before a text; refuse what else may be done to it."""
    steps = [*_steps(state["normalizer"], "normalizers"), *_steps(state["pre_tokenizer"], "pretokenizers")]
    shows_spaces = has_prefix = False
    for step in steps:
        kind, pattern = step["type"], (step.get("pattern") or {}).get("String")
        if kind == "Prepend" and step["prepend"] == SPACE:
            has_prefix = True
        elif kind == "Replace" and (pattern, step["content"]) == (" ", SPACE):
            shows_spaces = True
        elif kind == "Metaspace" and step["replacement"] == SPACE and not step.get("split", True):
            shows_spaces, scheme = True, step.get("prepend_scheme", "always")
            has_prefix = has_prefix or scheme != "never"
            if scheme != "never":
                logger.warning(
                    "GGUF files have a space before each text: also before one that begins with a space%s",
                    ", and after control tokens" if scheme == "first" else "",
                )
        elif not (kind == "Split" and pattern == " " and shows_spaces):  # of which there are none left
            raise refusal(f"its tokenizer has a step {kind}, which SentencePiece has not")
    if not shows_spaces:
        raise refusal(f"its tokenizer does not have {SPACE} in place of spaces")
    return has_prefix


def _steps(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer."""
    if step is None:
        return []
    steps: list[Mapping[str, Any]] = step[inner] if step["type"] == "Sequence" else [step]
    return steps


def _scores(merges: Sequence[Any], texts: Sequence[str], types: Sequence[TokenType]) -> list[float]:
    """Return a score for each token, by which its merges are all that are possible, in this order.

    Raises:
        ModelError: There are no such scores.
    """
    normal = {text for text, kind in zip(texts, types, strict=True) if kind == TokenType.NORMAL}
    given = [tuple(one.split(" ", 1)) if isinstance(one, str) else (one[0], one[1]) for one in merges]
    given = [one for one in given if "".join(one) in normal]  # others are cut out of a text before
    order: dict[str, int] = {}
    last = ""
    for left, right in given:
        token = left + right
        if token != last and token in order:
            raise refusal(f"merges of its tokenizer make {token!r} before and after other tokens, as no scores do")
        order.setdefault(token, len(order))
        last = token
    # Tokens that nothing makes are single characters; their scores are of no account.
    scores = [-float(order.get(text, len(order))) if text in normal else 0.0 for text in texts]
    ids = {text: i for i, text in reversed(list(enumerate(texts)))}
    possible = set(merges_of({text: scores[ids[text]] for text in normal}, ids))
    if different := possible.symmetric_difference(given):
        left, right = min(different)
        what = "does not merge" if (left, right) in possible else "merges"
        raise refusal(f"its tokenizer {what} {left!r} and {right!r}, and SentencePiece would decide by scores")
    return scores
