"""The state of a request, and its part in one step."""

import enum
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from specinfer.core.grammar.state import Grammar
from specinfer.core.limits import SLO
from specinfer.core.logprob import Logprob
from specinfer.core.lora import Adapter
from specinfer.core.noise import UniformStream, derive_seed
from specinfer.core.sampling import SamplingParams
from specinfer.core.speculation import SpeculationStats, StepTrace
from specinfer.core.text import TextBuffer
from specinfer.core.thought import Thought
from specinfer.core.token_counts import TokenCounts
from specinfer.core.tree import TokenTree

DRAWS_EACH = 2**20  # draw numbers reserved for each tree; no tree takes more


class FinishReason(enum.StrEnum):
    """Reason why a request ended: the OpenAI API's values, and `error` for a failure of the server."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Fault(enum.Enum):
    """Kind of error that ended a request; callers react differently to each."""

    NO_VALID_TOKEN = enum.auto()  # the request's own constraints allow no token
    LATE_START = enum.auto()  # it waited longer than its limit
    LATE_END = enum.auto()  # it took longer than its limit
    STOPPED = enum.auto()  # the engine stopped
    BROKEN = enum.auto()  # an internal failure


@dataclass(slots=True)
class DraftState:
    """The state of drafting for a request.

    Attributes:
        num_draws: For each drafter, by name, a counter that numbers its draws, so that no noise is used twice.
        is_allowed: False once a draft token made the model compute NaN.
        is_read: True if a drafter that is a model has read the tokens so far.
        num_nodes: Draft tokens of the last tree.
        num_wanted: Draft tokens that the last budget asked for, before it was cut to the room of the step.
        num_crowded_steps: Passes whose tree has lost all draft tokens to the parts of other tenants.
        num_unread_steps: Those of them for which a model had no time to read the tokens.
        reserved_seconds: Seconds that the step under way has counted for a model's reading, until the model reads.
    """

    num_draws: dict[str, int] = field(default_factory=dict)
    is_allowed: bool = True
    is_read: bool = False
    num_nodes: int = 0
    num_wanted: int = 0
    num_crowded_steps: int = 0
    num_unread_steps: int = 0
    reserved_seconds: float = 0.0

    def note_read(self) -> None:
        """Note that a drafter that is a model reads the tokens so far."""
        self.is_read, self.reserved_seconds = True, 0.0

    def begin_draws(self, drafter: str) -> int:
        """Start a new tree of a drafter and return the number of its first draw, beyond those of all its earlier trees.

        So the draws of a drafter do not depend on how many draws another drafter made, or where.
        """
        first = (self.num_draws.get(drafter, 0) // DRAWS_EACH + 1) * DRAWS_EACH
        self.num_draws[drafter] = first
        return first


@dataclass(slots=True)
class LogitsState:
    """The state of the processing of a request's logits.

    Attributes:
        forbidden: [vocab] bool, True for tokens that are not in `allowed_token_ids`.
        token_counts: Counts for the penalties.
    """

    forbidden: Tensor | None = None
    token_counts: TokenCounts | None = None


@dataclass(slots=True)
class ScoringTime:
    """Seconds that log-probabilities of a request have taken since its last step was charged, and their number."""

    seconds: float = 0.0
    count: int = 0

    @contextmanager
    def measured(self, count: int) -> Iterator[None]:
        """Count the seconds of a block that makes so many log-probabilities."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begun
            self.count += count


@dataclass(slots=True)
class RequestTimes:
    """When a request arrived, its first token was computed and emitted, and it ended, in seconds since the epoch."""

    arrival: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def durations(self, now: float) -> dict[str, float]:
        """Return the seconds of each phase that has begun; the last one ends now if the request has not ended."""
        end, seconds = self.finished or now, dict[str, float]()
        if self.arrival:
            seconds["e2e"] = end - self.arrival
        if self.scheduled is not None:
            seconds |= {"queue": self.scheduled - self.arrival, "inference": end - self.scheduled}
        if self.scheduled is not None and self.first_token is not None:
            seconds |= {
                "first_token": self.first_token - self.arrival,
                "prefill": self.first_token - self.scheduled,
                "decode": end - self.first_token,
            }
        return seconds


@dataclass(slots=True, eq=False)
class Request:
    """The known tokens of a request, how many of them are cached, and its parameters.

    Attributes:
        token_ids: Token ids of the prompt, then of the output.
        num_computed: Number of tokens from the start whose keys and values are in the target's cache. While the
            request runs it is below `len(token_ids)`: the last known token is always still to be computed.
        prompt_logprobs: One list for all outputs of a prompt; whichever computes a token first adds to it.
        seed: Seed of the noise. Together with the position it determines every sampled token.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = 2**31
    text: TextBuffer | None = None  # None without a tokenizer, and so without stop strings
    decode: Callable[[int], str] | None = None  # text of a token alone, for log-probabilities
    grammar: Grammar | None = None  # constraint on the output
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    thought: Thought | None = None  # that may precede the answer
    prediction_ids: tuple[int, ...] = ()  # tokens that the output is likely to resemble
    adapter: Adapter | None = None  # LoRA adapter of the target; `cache_salt` has its salt in it
    cache_salt: str | None = ""  # prefixes are shared only between requests with the same salt; None shares with none
    tenant: str = ""  # client name; tenants with waiting requests share the engine evenly
    priority: int = 0  # lower values are served first
    deadline: float = float("inf")  # `time.monotonic` value at which an unfinished request is ended
    start_deadline: float = float("inf")  # the same for a request that has not been started
    token_ids: list[int] = field(init=False)
    uniforms: UniformStream = field(init=False)  # for rules that use random numbers
    drafting: DraftState = field(default_factory=DraftState)
    logits_state: LogitsState = field(default_factory=LogitsState)
    times: RequestTimes = field(default_factory=RequestTimes)
    scoring: ScoringTime = field(default_factory=ScoringTime)
    is_prioritized: bool = False  # the step under way computes its first token before others take their parts
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens whose keys and values were already cached
    num_prompt_computed: int = 0  # prompt tokens computed so far, with cached ones; a preemption does not lower it
    origins: list[str | None] = field(default_factory=list)  # for each output token, the drafter that proposed it
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    fault: Fault | None = None  # the kind of `error`
    verification: str | None = None  # verification rule of this request, or None for the engine's
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    trace: list[StepTrace] | None = None  # a list if the steps are to be recorded

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.uniforms = UniformStream(self.seed)

    @property
    def is_plain_greedy(self) -> bool:
        """True if the next token is the argmax of the unprocessed logits."""
        return self.params.is_plain_greedy and not self.restricts_tokens(0)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def num_unread(self) -> int:
        """Number of known tokens that are not computed yet; one for a decoding request."""
        return len(self.token_ids) - self.num_computed

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """True if log-probabilities of prompt tokens were asked for and are not all known."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def due(self) -> float:
        """Time at which the next token is due by the SLO, in seconds since the epoch; infinite without a target."""
        slo = self.params.slo
        if slo is None:
            return math.inf
        assert isinstance(slo, SLO)
        if self.times.first_token is None:
            return math.inf if slo.ttft is None else self.times.arrival + slo.ttft / 1000
        return math.inf if slo.tpot is None else self.times.first_token + self.num_output * slo.tpot / 1000

    @property
    def max_new_tokens(self) -> int:
        """Number of tokens that this request may still emit."""
        num_left = self.max_model_len - len(self.token_ids)
        if self.params.max_tokens is None:
            return num_left
        return min(num_left, self.params.max_tokens - self.num_output)

    @property
    def num_scored(self) -> int:
        """Log-probabilities of each token that is asked for them: of the output, or of a prompt that is read."""
        if self.lacks_prompt_logprobs:
            return 1 + (self.params.prompt_logprobs or 0)
        return 0 if self.params.logprobs is None else 1 + self.params.logprobs + len(self.params.scored_tokens)

    def restricts_tokens(self, depth: int) -> bool:
        """Return whether the text decides which tokens may follow it, now or after a path of up to this length."""
        if self.grammar is not None or self.bad_words_ids:
            return True
        return self.thought is not None and self.thought.may_force(depth)

    def note_computed(self, end: int) -> int:
        """Note that the known tokens up to `end` are computed, and return how many prompt tokens of them are new.

        At the first call, cached tokens are.
        """
        before = self.num_prompt_computed
        self.num_prompt_computed = max(min(end, len(self.prompt_ids)), before)
        return self.num_prompt_computed - before

    def reseed(self, number: int) -> None:
        """Give the request a seed of its own, derived from its seed and this number, before anything was sampled."""
        assert not self.num_output
        self.seed = derive_seed(self.seed, number)
        self.uniforms = UniformStream(self.seed)

    def append(self, token: int, origin: str | None) -> None:
        """Append one token and finish the request if it ends with this token."""
        assert not self.is_finished
        self.token_ids.append(token)
        self.origins.append(origin)
        self.follow(token)
        is_complete = self.grammar is not None and self.grammar.is_finished
        may_stop = self.num_output >= self.params.min_tokens
        if may_stop and token in self.params.stop_tokens:
            if self.text is not None and self.params.include_stop_str_in_output:
                self.text.push(token, may_stop=False)
            self.finish(FinishReason.STOP, token)
        elif (may_stop or is_complete) and token in self.eos_token_ids and not self.params.ignore_eos:
            self.finish(FinishReason.STOP)
        elif self.text is not None and (stop := self.text.push(token, may_stop=may_stop)):
            self.finish(FinishReason.STOP, stop)
        elif is_complete:
            self.finish(FinishReason.STOP)
        elif self.max_new_tokens <= 0:
            self.finish(FinishReason.LENGTH)

    def follow(self, token: int) -> None:
        """Let what restricts the tokens know of one that was emitted."""
        if self.grammar is not None:
            self.grammar.advance(token)
        if self.thought is not None:
            self.thought.advance(token)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        # After an error, decoding the text may be what failed, and must not fail again during cleanup.
        if self.text is not None and not isinstance(stop_reason, str) and reason is not FinishReason.ERROR:
            self.text.finish()


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a request in one step: the half-open range of known tokens to compute.

    If `end` is the number of known tokens, the step also emits new tokens, and a tree may grow from the last
    known token, its root. Otherwise this is one chunk of a longer prompt.
    """

    request: Request
    start: int
    end: int

    @property
    def tokens(self) -> list[int]:
        return self.request.token_ids[self.start : self.end]

    @property
    def produces_token(self) -> bool:
        return self.end == len(self.request.token_ids)

    def tree(self) -> TokenTree | None:
        """Return a tree without draft tokens, or None if this span emits no token."""
        return TokenTree.root(self.request.token_ids[-1]) if self.produces_token else None
