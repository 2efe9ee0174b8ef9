"""Call: an API request with checked fields, whose prompts become running generations."""

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from fastapi import Request

from specinfer.core.errors import ContextLengthError, RequestError, too_long
from specinfer.core.lora import LoRARequest
from specinfer.core.sampling import SamplingParams
from specinfer.core.thought import Reasoning
from specinfer.core.tree_shape import parse_tree
from specinfer.generation import Generation
from specinfer.quotas import OutgoingResponse
from specinfer.server.auth import body_size_of, cache_salt_of, route_path, tenant_of
from specinfer.server.dialects import Dialect, dialect_of
from specinfer.server.errors import too_much_outgoing
from specinfer.server.generations import close_all
from specinfer.server.protocol import SharedFields
from specinfer.server.state import ServerState, state_of

T = TypeVar("T")
Placing: TypeAlias = Callable[[RequestError], RequestError]

# Limits of one request. An entry takes about 100 bytes, and as much again in the response; a prompt's come all at once.
_MAX_PROMPT_LOGPROBS = _MAX_LOGPROBS = 1 << 20
_ENTRY_BYTES = 100
# Nodes and levels of a tree that a request may ask for: the whole batch waits for its largest tree. Passes of a
# streamed target take seconds, so larger trees hardly slow them.
_MAX_TREE, _MAX_STREAMED_TREE = (64, 16), (256, 32)
_SHORT_BYTES = 2048  # of a request whose text is encoded in the event loop
_NAME = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Call:
    """One API request: its fields, its name, and the tenant that sent it."""

    state: ServerState
    fields: SharedFields
    name: str
    tenant: str
    cache_salt: str | None
    body_size: int
    placed: Placing
    dialect: Dialect
    outgoing: OutgoingResponse
    adapter: LoRARequest | None = None

    @classmethod
    def from_request(cls, request: Request, fields: SharedFields, placed: Placing = lambda error: error) -> "Call":
        """Check everything that does not depend on the prompt.

        Args:
            placed: Returns an error about a message as one about the field that the message came from.
        """
        state = state_of(request)
        state.check_model(fields.model)
        state.engine.check_seats(1, tenant_of(request))
        name = fields.request_id
        if name is None:
            name = getattr(request.state, "request_id", None) or uuid.uuid4().hex
        elif not _NAME.fullmatch(name):
            raise RequestError("request_id: use 1 to 128 visible ASCII characters without spaces")
        if fields.speculative is not None and fields.speculative.tree is not None:
            is_streamed = state.engine.llm.target.loaded.stream is not None
            max_nodes, max_depth = _MAX_STREAMED_TREE if is_streamed else _MAX_TREE
            _check_tree(fields.speculative.tree, state.config.max_tree_nodes or max_nodes, max_depth)
        if fields.trace and len(state.config.api_keys) > 1 and state.engine.llm.adaptation is not None:
            raise RequestError(
                "trace: drafters learn from the texts of all keys here (--adapt-drafters), which their draft tokens "
                "could show; leave trace out"
            )
        salt = cache_salt_of(request, state.config, fields.cache_salt)
        adapter, dialect = state.adapters.get(fields.model or ""), dialect_of(route_path(request.scope))
        tenant, outgoing = tenant_of(request), request.state.outgoing
        return cls(state, fields, name, tenant, salt, body_size_of(request), placed, dialect, outgoing, adapter)

    async def read(self, action: Callable[[], T], *, only_encodes: bool = False) -> T:
        """Run an action with the tokenizer, templates or grammars in a thread, when it is the tenant's turn.

        One that `only_encodes` a short text runs in the event loop.
        """
        is_brief = only_encodes and self.body_size <= _SHORT_BYTES
        try:
            return await self.state.engine.read(action, self.tenant, num_bytes=self.body_size, is_brief=is_brief)
        except RequestError as error:
            raise self.named(error) from error

    def named(self, error: RequestError) -> RequestError:
        """Return an error with the names of the fields of the request's API."""
        return self.dialect.named(self.placed(error))

    @property
    def model(self) -> str:
        return self.fields.model or self.state.names[0]

    def check_count(self, num_prompts: int, num_outputs: int) -> None:
        """Refuse more outputs than a key, or the queue for several prompts, can ever have."""
        admission, field = self.state.engine.admission, "n" if num_prompts == 1 else "prompt"
        capacity, limit = admission.capacity_of(self.tenant), admission.quotas.limits_of(self.tenant)
        if num_outputs > capacity and (num_prompts > 1 or limit.max_num_queued_reqs is not None):
            raise RequestError(
                f"{field}: {num_outputs} outputs are more than the {capacity} that may wait; ask for fewer"
            )

    async def submit(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], reasoning: Reasoning | None = None
    ) -> list[Generation]:
        """Queue all prompts, or none of them.

        Args:
            reasoning: The thought of the outputs of a conversation.

        Raises:
            RequestError: One of the prompts cannot be served.
            QueueFullError: The queue has no room for all of them.
        """
        engine = self.state.engine
        extra = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        generations: list[Generation] = []
        try:
            self.check_count(len(prompts), sum(params.n for _, params in prompts))
            self._check_logprobs(prompts)
            for ids, params in prompts:
                generations.append(
                    await engine.submit(
                        {"prompt_token_ids": ids, "reasoning": reasoning, **extra},
                        params,
                        request_id=self.name,
                        priority=self.fields.priority or 0,
                        tenant=self.tenant,
                        trace=bool(self.fields.trace),
                        lora_request=self.adapter,
                    )
                )
        except BaseException as error:
            close_all(generations)
            if isinstance(error, ContextLengthError):
                long = too_long(self.fields.prompt_field, error.num_tokens, error.max_model_len)
                raise self.named(long) from error
            if isinstance(error, RequestError):
                raise self.named(error) from error
            raise
        return generations

    def _check_logprobs(self, prompts: Sequence[tuple[list[int], SamplingParams]]) -> None:
        max_model_len, of_prompts, of_outputs = self.state.engine.llm.max_model_len, 0, 0
        for ids, params in prompts:
            if params.prompt_logprobs is not None:
                of_prompts += params.n * len(ids) * (1 + params.prompt_logprobs)
            if params.logprobs is not None:
                max_tokens = min(params.max_tokens or max_model_len, max_model_len - len(ids))
                of_outputs += params.n * max_tokens * (1 + params.logprobs + len(params.scored_tokens))
        if of_prompts > _MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"prompt_logprobs: {of_prompts} would be returned; ask for {_MAX_PROMPT_LOGPROBS} at most, by shorter "
                "prompts, fewer of them, or fewer for each token"
            )
        if of_outputs > _MAX_LOGPROBS:
            raise RequestError(
                f"logprobs: up to {of_outputs} would be returned; ask for {_MAX_LOGPROBS} at most, by fewer tokens "
                "(max_tokens), outputs (n) or prompts"
            )
        config, count = self.state.config, of_prompts * _ENTRY_BYTES
        if not self.state.quotas.check_outgoing(self.tenant, count, config.max_outgoing_bytes):
            raise too_much_outgoing(config)
        self.outgoing.num_bytes = count


def _check_tree(tree: str, max_nodes: int, max_depth: int) -> None:
    try:
        shape = parse_tree(tree)
    except ValueError as error:
        raise RequestError(f"speculative.{error}") from error
    if shape.max_nodes > max_nodes:
        raise RequestError(
            f"speculative.tree: {tree[:60]!r} has {shape.max_nodes} nodes; use at most {max_nodes} (--max-tree-nodes)"
        )
    if shape.max_depth > max_depth:
        raise RequestError(f"speculative.tree: {tree[:60]!r} has {shape.max_depth} levels; use at most {max_depth}")
