"""Proxies of requests on a rank without an engine: their parameters are sent once as text, then only new tokens."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Protocol

from specinfer.core.grammar.state import Grammar
from specinfer.core.request import DRAWS_EACH, Request
from specinfer.core.sampling import EFFECTS, Effect, SamplingParams
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.core.thought import Decode, Reasoning, Thought

# The sampling parameters that drafts depend on, without those that are sent in another form.
_PARAMS = tuple(
    name
    for name, effect in EFFECTS.items()
    if effect is not Effect.NONE and name not in ("bad_words", "thinking_token_budget", "structured_outputs")
)


class Grammars(Protocol):
    """A compiler of grammars, see `GrammarCompiler`."""

    def compile(self, asked: StructuredOutputsParams, *, ignore_eos: bool = False) -> Grammar: ...


def can_be_sent(request: Request) -> bool:
    """Return whether the request can be sent as text; a grammar without a text form cannot."""
    return request.grammar is None or request.params.structured_outputs is not None


def describe(request: Request) -> str:
    """Return a JSON description of the request, as far as drafts depend on it."""
    params, asked, thought = request.params, request.params.structured_outputs, request.thought
    has_budget = thought is not None and thought.budget is not None
    assert isinstance(asked, StructuredOutputsParams | None)
    return json.dumps(
        {
            "num_prompt": len(request.prompt_ids),
            "seed": request.seed,
            "eos_token_ids": request.eos_token_ids,
            "bad_words_ids": request.bad_words_ids,
            "cache_salt": request.cache_salt,
            "params": {name: getattr(params, name) for name in _PARAMS},
            "grammar": None if request.grammar is None or asked is None else dataclasses.asdict(asked),
            "thought": [dataclasses.asdict(thought.reasoning), thought.budget] if thought and has_budget else None,
        }
    )


def make_proxy(name: str, about: str, tokens: Sequence[int], grammars: Grammars, decode: Decode) -> Request:
    """Return a request whose drafts are those of the request that `describe` was given.

    Args:
        tokens: The tokens known so far, the prompt first.
        decode: Function that returns the text of tokens, special ones included.
    """
    fields = json.loads(about)
    num_prompt, params = fields["num_prompt"], SamplingParams(**fields["params"], max_tokens=None)
    grammar = None
    if fields["grammar"] is not None:
        grammar = grammars.compile(_constraint(fields["grammar"]), ignore_eos=params.ignore_eos)
    thought = None
    if fields["thought"] is not None:
        reasoning, budget = fields["thought"]
        made: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in reasoning.items()
        }
        thought = Thought(Reasoning(**made), decode, budget)
    request = Request(
        name, list(tokens[:num_prompt]), params, fields["seed"], tuple(fields["eos_token_ids"]), grammar=grammar,
        bad_words_ids=tuple(map(tuple, fields["bad_words_ids"])), thought=thought, cache_salt=fields["cache_salt"],
    )  # fmt: skip
    append_tokens(request, tokens[num_prompt:])
    return request


def _constraint(fields: dict[str, Any]) -> StructuredOutputsParams:
    named = fields["schemas"]
    of_names = None if named is None else {name: _constraint(each) for name, each in named.items()}
    return StructuredOutputsParams(**fields | {"schemas": of_names})


def append_tokens(request: Request, tokens: Sequence[int]) -> None:
    """Append emitted tokens to the request; the engine's rank decides when it ends."""
    request.token_ids += tokens
    for token in tokens:
        request.follow(token)


def draw_from(request: Request, drafter: str, first: int) -> None:
    """Set the number of the first draw of the drafter's next tree, see `DraftState.begin_draws`."""
    request.drafting.num_draws[drafter] = first - DRAWS_EACH
