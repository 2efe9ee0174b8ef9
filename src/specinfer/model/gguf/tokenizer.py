"""Conversion of the tokenizer in a GGUF file to tokenizer.json.

Two kinds are supported: byte-level BPE ("gpt2"), which splits text by a rule that the file only names, and
SentencePiece's BPE ("llama"), whose merges follow from the tokens' scores. Tokens are those of llama.cpp; tests compare
them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from specinfer.model.gguf.config import token_id
from specinfer.model.gguf.header import GgufError, GgufHeader

SPACE = "▁"  # what SentencePiece has in place of it
_NO_TOKENIZER = "take the model as a folder with tokenizer.json"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    _TEKKEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
    .replace(r"\p{M}]+|", r"\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|")
    .replace(r"\p{M}]*|\p{N}", r"\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}")
)
_KIMI = r"\p{Han}+|" + _GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]", r"[\r\n]")
_DEEPSEEK = (  # applied one after the other
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_BY_DIGIT = (r"\p{N}", _GPT2)
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _BY_DIGIT),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("falcon-h1", "lfm2", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "kimi-k2": (_KIMI,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
}
# A piece that is a token as a whole is not split, and BOS is added if the file does not specify it.
LLAMA3_RULES = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral", "tekken"}
_LONGEST = 512  # of tokens with merges; the work grows with its square
# Control tokens that llama.cpp treats as the end of a turn, in addition to the file's end tokens.
_END_OF_TURN = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "</s>", "<eos>", "<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>",
}  # fmt: skip


def build_tokenizer(header: GgufHeader) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and the fields of tokenizer_config.json.

    Raises:
        GgufError: The file has no tokenizer, or one of an unknown kind.
    """
    kind = header.get("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise GgufError(header.path, f"its tokenizer is of kind {kind!r}, which is not read", _NO_TOKENIZER)
    tokens, types = _tokens(header), _list(header, "token_type", int) or []
    if types and len(types) != len(tokens):
        raise GgufError(header.path, f"it has {len(types)} types for {len(tokens)} tokens")
    tokenizer = _byte_level(header, tokens) if kind == "gpt2" else _sentencepiece(header, tokens, types)
    for wanted, is_special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        added = [token for token, found in zip(tokens, types, strict=False) if found == wanted and token]
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([AddedToken(token, normalized=False, special=is_special) for token in added])
    ids = {name: token_id(header, f"{key}_token_id") for name, key in _NAMED.items()}
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    _add_ends(header, tokenizer, kind, named)
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,  # no limit; the model's own applies
        **named,
    }


def name_rule(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """Return the name by which a file says how text is cut, or None; the argument is from tokenizer.json."""
    steps, cuts = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}], []
    for step in steps:
        if step.get("type") == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            cuts.append(step["pattern"].get("Regex"))
        elif step.get("type") == "Digits" and step["individual_digits"]:
            cuts.append(r"\p{N}")
        elif step.get("type") == "ByteLevel" and not step["add_prefix_space"]:
            cuts += [_GPT2] if step.get("use_regex", True) else []
        else:
            return None
    return next((name for name, split in _SPLITS.items() if split == tuple(cuts)), None)


_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def end_token_ids(header: GgufHeader) -> list[int]:
    """Return the tokens that end an output: those the file names, and those that end a turn by their text."""
    named = [token_id(header, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = _tokens(header), _list(header, "token_type", int) or []
    pairs = enumerate(zip(tokens, types, strict=False))
    by_text = [i for i, (token, kind) in pairs if kind == TokenType.CONTROL and token in _END_OF_TURN]
    return list(dict.fromkeys([i for i in named if i is not None] + by_text))


def _list(header: GgufHeader, name: str, kind: type) -> list[Any] | None:
    found: list[Any] | None = header.get(f"tokenizer.ggml.{name}", list)
    if found and not isinstance(found[0], kind):
        raise GgufError(header.path, f"tokenizer.ggml.{name} is a list of {type(found[0]).__name__}")
    return found


def _tokens(header: GgufHeader) -> list[str]:
    tokens, size = _list(header, "tokens", str), header.tensors["token_embd.weight"].shape[0]
    if not tokens or len(tokens) > size:
        raise GgufError(header.path, f"it names {len(tokens or ())} tokens, and has embeddings of {size}")
    return tokens


def _byte_level(header: GgufHeader, tokens: Sequence[str]) -> Tokenizer:
    rule = header.get("tokenizer.ggml.pre", str)
    if rule not in _SPLITS:
        raise GgufError(header.path, f"its pre-tokenizer, {rule!r}, is not known", _NO_TOKENIZER)
    vocabulary = _vocabulary(tokens)
    merges = []
    for merge in _list(header, "merges", str) or ():
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule in LLAMA3_RULES))
    cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in _SPLITS[rule]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: GgufHeader, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = _list(header, "scores", float)
    if scores is None or len(scores) != len(tokens) or not types:
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
    begins = kind == "llama" or header.get("tokenizer.ggml.pre", str) in LLAMA3_RULES
    begins = header.get("tokenizer.ggml.add_bos_token", bool, begins) and "bos_token" in named
    ends = header.get("tokenizer.ggml.add_eos_token", bool, False) and "eos_token" in named
    first, last = [named["bos_token"]] if begins else [], [named["eos_token"]] if ends else []
    if not first and not last:
        return
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(first + last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B", *last], special_tokens=special
    )
