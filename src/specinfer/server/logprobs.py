"""Log-probabilities in the formats of the two completion endpoints, and the text of each token."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specinfer.async_llm import AsyncLLM
from specinfer.core.logprob import Logprob
from specinfer.drafters.vocabulary.token_text import TokenText
from specinfer.llm import LLM

_LEAST = -9999.0  # in place of minus infinity, which JSON does not have


class TokenTexts:
    """The texts of a model's tokens, for one response.

    Args:
        as_ids: Show token ids instead of texts.
    """

    def __init__(self, token_text: TokenText | None, *, as_ids: bool = False) -> None:
        self._token_text, self._as_ids = token_text, as_ids or token_text is None
        self._of_prompts: dict[int, list[dict[str, Any] | None]] = {}  # by the id of what they are made from

    @classmethod
    async def from_engine(cls, engine: AsyncLLM, *, as_ids: bool = False) -> "TokenTexts":
        """Return the texts, which are read once per model: for a large vocabulary that takes about a second."""
        if engine.llm not in _TOKEN_TEXT:
            _TOKEN_TEXT[engine.llm] = await engine.read(lambda: _read(engine.llm))
        return cls(_TOKEN_TEXT[engine.llm], as_ids=as_ids)

    def bytes(self, token: int) -> bytes:
        if self._token_text is None:
            return b""
        return self._token_text.marks.get(token, "").encode() or self._token_text.text(token)

    def name(self, token: int, part: str = "") -> str:
        """Return a token's text.

        Args:
            part: Prefix of the name of a token that is only a part of a character.
        """
        if self._as_ids:
            return f"token_id:{token}"
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return part + "".join(f"\\x{byte:02x}" for byte in raw)

    def prompt_logprobs(self, logprobs: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
        """Return vLLM's format: for each prompt token an object by token id. All outputs of a prompt share it."""
        place = id(logprobs)
        if place not in self._of_prompts:
            self._of_prompts[place] = [
                None if known is None else {str(t): self._ranked(t, p) for t, p in known.items()} for known in logprobs
            ]
        return self._of_prompts[place]

    def _ranked(self, token: int, logprob: Logprob) -> dict[str, Any]:
        return {"logprob": _finite(logprob.logprob), "rank": logprob.rank, "decoded_token": self.name(token)}


_TOKEN_TEXT: "weakref.WeakKeyDictionary[LLM, TokenText | None]" = weakref.WeakKeyDictionary()


def _read(llm: LLM) -> TokenText | None:
    if getattr(llm.tokenizer, "backend_tokenizer", None) is None:
        return None
    return TokenText(llm.tokenizer, llm.target.loaded.vocab_size)


# ------------------------------------------------------------------------------------ /v1/completions


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens with their log-probabilities and their offsets in the text."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[Mapping[int, Logprob] | None] = ()
    offsets: Sequence[int] = ()

    def __add__(self, later: "Scored") -> "Scored":
        return Scored(
            [*self.token_ids, *later.token_ids], [*self.logprobs, *later.logprobs], [*self.offsets, *later.offsets]
        )


def completion_logprobs(scored: Scored, texts: TokenTexts) -> dict[str, Any]:
    """Return the four lists of /v1/completions."""
    names = [texts.name(token, "bytes:") for token in scored.token_ids]
    tops: list[dict[str, float] | None] = []
    for known in scored.logprobs:
        tops.append(None if known is None else {texts.name(t, "bytes:"): _finite(p.logprob) for t, p in known.items()})
    pairs = zip(scored.token_ids, scored.logprobs, strict=True)
    return {
        "tokens": names,
        "token_logprobs": [None if known is None else _finite(known[token].logprob) for token, known in pairs],
        "top_logprobs": tops,
        "text_offset": list(scored.offsets),
    }


# ------------------------------------------------------------------------------- /v1/chat/completions


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob]],
    count: int,
    named: Sequence[int],
    texts: TokenTexts,
) -> dict[str, Any]:
    """Return the list of /v1/chat/completions.

    Args:
        count: Number of most probable tokens to list for each token.
        named: Tokens that are listed after these in any case.
    """
    content = []
    for token, known in zip(token_ids, logprobs, strict=True):
        best = sorted(known, key=lambda t: known[t].rank)[:count]
        listed = [*best, *(t for t in named if t not in best)]
        tops = [_entry(t, known[t].logprob, texts) for t in listed]
        content.append({**_entry(token, known[token].logprob, texts), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.name(token), "logprob": _finite(logprob), "bytes": list(texts.bytes(token))}


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST  # also replaces NaN
