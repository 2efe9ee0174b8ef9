"""Rules by which byte-level BPE cuts a text into pieces, by the names that GGUF files have for them.

A rule is one or more regular expressions, applied one after the other to the pieces that the last one left. Names are
those of llama.cpp, and so are the pieces, except where llama.cpp approximates the expression in the model's own
tokenizer.json. Each expression takes time in proportion to the text.
"""

from collections.abc import Mapping
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_LLAMA3 = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
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
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_EXAONE_MOE = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DIGITS, _HAN_AND_KANA = r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with a case, as of the version of Unicode that DeepSeek's tokenizers were made with.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"(?<!\s)\s+$",  # the same as \s+$, which takes the square of the time
    _ASIAN, r"\p{N}+",
)  # fmt: skip
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|"
    + _HAN_AND_KANA
)
_BY_DIGIT = (r"\p{N}", _GPT2)
DEFAULT = "default"
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "gigachat", "a.x-4.0", "mellum"), (_GPT2,)
    ),
    **dict.fromkeys(("exaone4", "trillion", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _BY_DIGIT),
    "mellum2": _BY_DIGIT,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("falcon-h1", "lfm2", "glm4", "chatglm-bpe", "midm-2.0"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), (_QWEN2,)),
    **dict.fromkeys(("grok-2", "solar-open"), (_QWEN2,)),
    "ufakzeka": (_QWEN2.removeprefix(_CONTRACTIONS),),
    "qwen35": (_QWEN35,),
    "laguna": (r"[^\n]+|\n+", _QWEN2),
    "minicpm5": (_DIGITS, _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"), (_GPT4O,)),
    "youtu": (_YOUTU, _GPT4O.replace(_DIGITS, r"\p{N}")),
    "kimi-k2": (_KIMI,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), (_DIGITS, _HAN_AND_KANA, _DEEPSEEK3)),
    "spark2_5": (_DIGITS, _HAN_AND_KANA, _DEEPSEEK3.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"), r"\p{N}"),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    "seed-coder": (_SEED,),
    "exaone-moe": (_EXAONE_MOE,),
    # Digits in threes from the right: (?=(\d{3})+(?!\d)) for them would take the square of the time.
    "superbpe": (r"\p{N}+", r"^\d{1,2}(?=(?>(?:\d{3})+)$)", r"\d{3}"),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"),
    DEFAULT: (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"),
}
_LLAMA3_RULES = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral", "midm-2.0", "tekken"}
IGNORES_MERGES = _LLAMA3_RULES | {"minicpm5", "youtu"}  # a piece that is a token as a whole is not split
ADDS_BOS = _LLAMA3_RULES  # if the file does not specify it
COMPOSES = {"qwen2", "qwen35"}  # brings text into NFC, as the models' own tokenizers do; llama.cpp does not


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
    return next((name for name, split in SPLITS.items() if split == tuple(cuts)), None)
