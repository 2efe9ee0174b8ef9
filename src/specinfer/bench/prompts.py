"""Prompts for measurements: held-out texts to continue, or messages of several kinds to a chat model.

An answer ends where the target ends it, since text after the end-of-text token is of no use.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from specinfer.bench.options import AnyPrompt, CompareConfig
from specinfer.core.errors import RequestError
from specinfer.core.sampling import SamplingParams
from specinfer.core.thought import Reasoning
from specinfer.demo.corpus import heldout_prompts
from specinfer.demo.pair import is_demo_target
from specinfer.inputs.chat.samples import KINDS, in_turn, named_kinds, rendered
from specinfer.inputs.chat.template import ChatTemplate
from specinfer.llm import LLM
from specinfer.model.definition import known_positions, load_config, load_tokenizer
from specinfer.policy.base import FixedPolicy

_SALTS = itertools.count()
LEAST_TOKENS = 2  # of an answer, since the clock runs from the first token to the last
_NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request as a program sends it to a server.

    Attributes:
        body: Its fields in the format of OpenAI's API, with those of the measurement.
        params: Sampling parameters that a server reads from it, with the grammar of its format and tools.
        reasoning: Thought of its answers, or None if they have none.
    """

    body: Mapping[str, Any]
    params: SamplingParams
    reasoning: Reasoning | None


class Asked(NamedTuple):
    """One prompt as an engine gets it."""

    token_ids: list[int]
    params: SamplingParams
    request: ChatRequest | None

    def prompt(self, salt: str) -> dict[str, Any]:
        """Return the prompt for `LLM`."""
        thought = {} if self.request is None else {"reasoning": self.request.reasoning}
        return {"prompt_token_ids": list(self.token_ids), "cache_salt": salt, **thought}


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one measurement.

    Attributes:
        token_ids: Token ids of each prompt.
        kinds: Kind of each chat prompt; empty if the prompts are texts to continue.
        requests: The request that each prompt was read from; empty if they were not. Its answers end by themselves.
    """

    token_ids: list[list[int]]
    kinds: tuple[str, ...] = ()
    requests: tuple[ChatRequest, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.token_ids))

    @property
    def most_outputs(self) -> int:
        """Most outputs of one prompt."""
        return max((request.params.n for request in self.requests), default=1)

    def params(self, llm: LLM, config: CompareConfig) -> list[SamplingParams]:
        """Return the sampling parameters of each prompt.

        Raises:
            RuntimeError: A request failed.
        """
        if self.requests:
            return [request.params for request in self.requests]
        return self.end_answers(llm, [config.sampling_params(i) for i in range(len(self.token_ids))])

    def replayed(self, llm: LLM, params: Sequence[SamplingParams]) -> list[SamplingParams]:
        """Return these parameters of each prompt, with plain decoding's tokens as the prediction.

        Raises:
            ValueError: A prompt has several outputs.
            RuntimeError: A request failed.
        """
        if self.most_outputs > 1:
            raise ValueError("replay: a prompt has several outputs, and one prediction; leave kind samples out")
        outputs = self._plain_outputs(llm, params)
        return [replace(each, prediction=ids) for each, ids in zip(params, outputs, strict=True)]

    def end_answers(self, llm: LLM, params: Sequence[SamplingParams]) -> list[SamplingParams]:
        """Return the parameters of each prompt. For chat prompts, set `max_tokens` to the length of plain decoding.

        All arms and other engines are then timed on answers of the same length.

        Raises:
            RuntimeError: A request failed.
        """
        if not self.kinds:
            return list(params)
        outputs = self._plain_outputs(llm, [replace(each, ignore_eos=False) for each in params])
        ended = [max(LEAST_TOKENS, len(ids)) for ids in outputs]
        return [replace(each, max_tokens=length) for each, length in zip(params, ended, strict=True)]

    def _plain_outputs(self, llm: LLM, params: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
        """Return the tokens of plain decoding for each prompt, the first output of each."""
        llm.engine.policy = FixedPolicy()
        salt = run_salt(llm)
        asked = [Asked(*each, None) for each in zip(self.token_ids, params, strict=True)]
        outputs = llm.generate([each.prompt(salt) for each in asked], list(params), use_tqdm=False)
        for number, output in enumerate(outputs):
            if output.error is not None:
                raise RuntimeError(f"prompt {number}: {output.error}")
        return [tuple(output.outputs[0].token_ids) for output in outputs]


def chat_token_ids(folder: Path, count: int, kinds: Sequence[str]) -> PromptSet:
    """Return `count` messages of these kinds in turn, functions twice, in the chat format of the model in `folder`.

    Raises:
        ValueError: There are too few messages, or the model has no chat template.
    """
    chosen = in_turn(kinds, count)
    template = ChatTemplate(load_tokenizer(folder), known_positions(folder) or _NO_LIMIT)
    try:
        ids = rendered(template.read, [text for _, text in chosen])
    except RequestError as error:
        raise ValueError(f"kinds: {folder} cannot be given chat prompts: {error}") from error
    return PromptSet(ids, tuple(kind for kind, _ in chosen))


def kinds_for(folder: Path, kinds: Sequence[str] | None, prompts: Sequence[AnyPrompt] | None = None) -> tuple[str, ...]:
    """Return the kinds of chat prompts that a model is measured on, or none if it continues texts.

    The embedded target continues texts, though it has a chat template.
    """
    if kinds is not None:
        return named_kinds(kinds)
    if prompts is not None or is_demo_target(folder):
        return ()
    return KINDS if getattr(load_tokenizer(folder), "chat_template", None) else ()


def find_prompts(
    folder: Path,
    max_tokens: int,
    kinds: Sequence[str],
    *,
    count: int,
    num_chars: int = 600,
    prompts: Sequence[AnyPrompt] | None = None,
) -> PromptSet:
    """Return prompts for the model in `folder`: chat prompts of these kinds, or texts to continue if there are none.

    Raises:
        ValueError: An option cannot be used. The message names it.
    """
    if not kinds:
        return PromptSet(token_prompts(folder, max_tokens, count=count, num_chars=num_chars, prompts=prompts))
    chosen = chat_token_ids(folder, count, kinds)
    return PromptSet(token_prompts(folder, max_tokens, prompts=[tuple(ids) for ids in chosen.token_ids]), chosen.kinds)


def run_salt(llm: LLM) -> str:
    """Return the cache salt of a run, a new one, so that no arm can look up what another generated for the same prompt.

    It is the same for all runs if prompts are read once.
    """
    return "prompts" if llm.target.cache.keeps_prefixes else f"turn-{next(_SALTS)}"


def token_prompts(
    folder: Path,
    max_tokens: int,
    *,
    count: int = 0,
    num_chars: int = 600,
    prompts: Sequence[AnyPrompt] | None = None,
) -> list[list[int]]:
    """Return prompts as token ids for the model in `folder`. The context also holds `max_tokens` more.

    Args:
        count: Number of held-out texts to use if no prompts are given.
        num_chars: Approximate length of those texts in characters.

    Raises:
        ValueError: An option cannot be used. The message names it.
    """
    if prompts is None:
        try:
            prompts = heldout_prompts(count, num_chars=num_chars)
        except ValueError as error:
            raise ValueError(f"num_prompts: {error}") from error
    tokenizer = load_tokenizer(folder)
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts: {folder} has no tokenizer; give token ids")
    encoded = [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
    vocab_size = load_config(folder).get_text_config().vocab_size
    if wrong := [token for ids in encoded for token in ids if not 0 <= token < vocab_size]:
        raise ValueError(f"prompts: token id {wrong[0]} is not in the vocabulary of {vocab_size} tokens")
    longest, context = max(map(len, encoded)), known_positions(folder)
    if context is not None and not max_tokens and longest > context:
        raise ValueError(f"prompts: {longest} tokens do not fit into the context of {context}; give shorter ones")
    if context is not None and longest + max_tokens > context:
        raise ValueError(
            f"max_tokens: {max_tokens} after a prompt of {longest} tokens do not fit into the context of "
            f"{context}; lower max_tokens or prompt_chars"
        )
    return encoded
