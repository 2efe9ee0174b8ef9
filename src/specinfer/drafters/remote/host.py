"""The drafters on a rank without an engine, which answer rank 0.

They draft in their own thread, so they do not wait for a running pass of the target's shard.
"""

import functools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from specinfer.core.drafter_forms import TOKEN_MAP_AUTO, parse_token_map
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.state import Grammar
from specinfer.core.request import Request, Span
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.core.thought import Decode
from specinfer.core.tree import TokenTree
from specinfer.drafters.growth.calibration import Calibration, source_of
from specinfer.drafters.loading import DraftModel, load_draft_model
from specinfer.drafters.remote.placement import PlacedDrafter
from specinfer.drafters.remote.request_proxy import Grammars, append_tokens, draw_from, make_proxy
from specinfer.drafters.remote.wire import DraftRequest, read_draft_request, unpack, write_failure, write_trees
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.drafters.vocabulary.token_map import Vocabulary
from specinfer.model.definition import load_tokenizer
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner
from specinfer.model.sharding.worker import is_broken
from specinfer.parallel.group import Channel
from specinfer.verify import Acceptance

_JOIN_SECONDS = 3.0
logger = logging.getLogger(__name__)


class HostedDrafter:
    """One drafter and proxies of the requests that it knows.

    Args:
        vocab_size: The target's vocabulary size.
        grammars: The compiler of grammars for the target's tokens.
        decode: Function that returns the text of the target's tokens, special ones included.
    """

    def __init__(
        self, runner: ModelRunner, vocabulary: Vocabulary, vocab_size: int, grammars: Grammars, decode: Decode
    ) -> None:
        self._runner, self._vocabulary, self._vocab_size = runner, vocabulary, vocab_size
        self._grammars, self._decode = grammars, decode
        self._requests: dict[int, Request] = {}
        self._drafter: SmallModelDrafter | None = None

    def reset(self, name: str, draft_sampling: str) -> None:
        """Drop all requests and everything learned; prefixes in the cache stay."""
        for key in list(self._requests):
            self._forget(key)
        self._drafter = None
        self._calibration = Calibration()
        self._drafter = SmallModelDrafter(
            self._runner, self._vocab_size, name, draft_sampling, self._calibration, self._vocabulary
        )

    def draft(self, draft_request: DraftRequest) -> list[TokenTree]:
        """Return a tree for each tree request."""
        drafter = self._drafter
        assert drafter is not None
        for learned in draft_request.learned:
            self._calibration.restore(source_of(drafter.name, is_greedy=not learned.is_sampled), learned.state)
        for update in draft_request.updates:
            self._update(update.key, update.tokens)
        spans = []
        for tree_request in draft_request.tree_requests:
            if tree_request.about:
                self._requests[tree_request.key] = make_proxy(
                    str(tree_request.key), tree_request.about, tree_request.tokens, self._grammars, self._decode
                )
            else:
                append_tokens(self._requests[tree_request.key], tree_request.tokens)
            request = self._requests[tree_request.key]
            draw_from(request, drafter.name, tree_request.first_draw)
            spans.append(Span(request, len(request.token_ids) - 1, len(request.token_ids)))
        return drafter.draft(spans, [tree_request.budget for tree_request in draft_request.tree_requests])

    def _update(self, key: int, tokens: Sequence[int] | None) -> None:
        request = self._requests.get(key)
        if tokens is None or request is None:
            self._forget(key)
            return
        assert self._drafter is not None
        try:
            append_tokens(request, tokens)
            # It keeps what it has computed of the emitted tokens, whichever drafter proposed them.
            self._drafter.observe(request, TokenTree.root(request.token_ids[-1]), Acceptance((), request.token_ids[-1]))
        except Exception:  # the next tree request fails; after that it is sent again in full
            logger.exception("drafter %s cannot read the emitted tokens", self._drafter.name)
            self._forget(key)

    def _forget(self, key: int) -> None:
        if self._requests.pop(key, None) is not None and self._drafter is not None:
            self._drafter.forget(str(key))


class Host:
    """The `RankService` of a `Worker`: all drafters of its rank.

    Args:
        placed: The drafters by the numbers used in messages.
    """

    def __init__(
        self,
        placed: Mapping[int, PlacedDrafter],
        quantization: str | None,
        *,
        keeps_prefixes: bool,
        token_map: str = TOKEN_MAP_AUTO,
    ) -> None:
        self._placed, self._quantization, self._keeps_prefixes = placed, quantization, keeps_prefixes
        self._token_map = parse_token_map(token_map)
        self._models: dict[int, DraftModel] = {}

    def load(self, target: LoadedModel) -> Sequence[LoadedModel]:
        self._target, self._tokenizer = target, load_tokenizer(target.folder)
        for number, placed in self._placed.items():
            self._models[number] = load_draft_model(
                placed.name,
                Path(placed.folder),
                target,
                self._tokenizer,
                self._quantization,
                token_map=self._token_map,
            )
        return [model.loaded for model in self._models.values()]

    def serve(self, num_slots: int, num_states: int, channel: Channel) -> None:
        target = self._target
        grammars = _LazyGrammars(self._tokenizer, target.vocab_size, target.eos_token_ids)
        decode = functools.partial(_decode, self._tokenizer)
        drafters = {}
        for number, model in self._models.items():
            runner = ModelRunner(model.loaded, num_slots, keeps_prefixes=self._keeps_prefixes, num_states=num_states)
            drafters[number] = HostedDrafter(runner, model.vocabulary, target.vocab_size, grammars, decode)
        self._thread = threading.Thread(
            target=_answer_all, args=(drafters, channel), name="specinfer-drafters", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        self._thread.join(_JOIN_SECONDS)


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=False))


class _LazyGrammars:
    """A compiler made on first use, since reading a large tokenizer takes about a second."""

    def __init__(self, tokenizer: object, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._of = tokenizer, vocab_size, eos_token_ids
        self._compiler: GrammarCompiler | None = None

    def compile(self, asked: StructuredOutputsParams, *, ignore_eos: bool = False) -> Grammar:
        self._compiler = self._compiler or GrammarCompiler(*self._of)
        return self._compiler.compile(asked, ignore_eos=ignore_eos)


def answer(drafters: Mapping[int, HostedDrafter], message: Tensor) -> Tensor | None:
    """Return the answer to a message, or None for no answer; a drafter that fails costs only its drafts."""
    header, arrays = unpack(message)
    drafter, draft = drafters[header["drafter"]], header.get("draft")
    try:
        if draft is not None:
            return write_trees(drafter.draft(read_draft_request(draft, arrays)))
        drafter.reset(**header["reset"])
    except Exception as error:
        logger.exception("a drafter failed; rank 0 goes on without its guesses")
        return None if draft is None else write_failure(f"{type(error).__name__}: {error}")
    return None


def _answer_all(drafters: Mapping[int, HostedDrafter], channel: Channel) -> None:
    try:
        while len(message := channel.receive(0)):
            if (reply := answer(drafters, message)) is not None:
                channel.send(reply, 0)
    except Exception as error:
        if not is_broken(error):  # a lost rank is detected by whatever runs passes
            logger.exception("messages of rank 0 cannot be answered any more")
            os._exit(1)  # rank 0 would wait for an answer; this way it is notified at once
