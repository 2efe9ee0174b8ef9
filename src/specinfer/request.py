"""A request's state, its part in one step, and the counters of its speculation."""

import enum
from dataclasses import dataclass, field

from torch import Tensor

from specinfer.grammar import Grammar
from specinfer.noise import UniformStream
from specinfer.sampling import SamplingParams
from specinfer.text import TextBuffer
from specinfer.token_counts import TokenCounts
from specinfer.tree import TokenTree

DRAWS_EACH = 2**20  # numbers for the draws of one tree: more than any takes


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are the OpenAI API's, and `error` for a failure of ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Fault(enum.Enum):
    """Why a request ended with an error: what its caller can do about it differs."""

    NO_VALID_TOKEN = enum.auto()  # no token may follow, by what it asked for itself
    LATE_START = enum.auto()  # it waited longer than it may
    LATE_END = enum.auto()  # it took longer than it may
    STOPPED = enum.auto()  # the engine ended
    BROKEN = enum.auto()  # something of ours failed


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one request. Keys of `as_dict` are vLLM's."""

    max_depth: int = 0
    num_spec_steps: int = 0  # target passes with at least one guess
    num_plain_steps: int = 0  # target passes that said a token with no guess
    num_draft_tokens: int = 0
    num_generated: int = 0
    histograms: dict[int, dict[int, int]] = field(default_factory=dict)  # depth of the tree -> accepted -> steps

    def record(self, num_guessed: int, depth: int, num_accepted: int, num_generated: int) -> None:
        """One pass: its tree, and the guessed tokens and all tokens that the request took."""
        self.num_generated += num_generated
        if not num_guessed:
            self.num_plain_steps += 1
            return
        self.max_depth = max(self.max_depth, depth)
        self.num_spec_steps += 1
        self.num_draft_tokens += num_guessed
        histogram = self.histograms.setdefault(depth, {})
        histogram[num_accepted] = histogram.get(num_accepted, 0) + 1

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        histograms = {
            depth: _summed(self.histograms.get(depth, {}), other.histograms.get(depth, {}))
            for depth in sorted({*self.histograms, *other.histograms})
        }
        return SpeculationStats(
            max(self.max_depth, other.max_depth),
            self.num_spec_steps + other.num_spec_steps,
            self.num_plain_steps + other.num_plain_steps,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_generated + other.num_generated,
            histograms,
        )

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Accepted -> steps."""
        return _summed(*self.histograms.values())

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(accepted * steps for accepted, steps in self.acceptance_histogram.items())

    @property
    def num_target_passes(self) -> int:
        """Passes that said tokens; prompt passes before the first token are not among them."""
        return self.num_spec_steps + self.num_plain_steps

    @property
    def tokens_per_pass(self) -> float:
        """Tokens committed per target pass; 1.0 is plain decoding."""
        passes = self.num_target_passes
        return self.num_generated / passes if passes else 0.0

    def as_dict(self) -> dict[str, object]:
        accepted, steps = self.num_accepted_draft_tokens, self.num_spec_steps
        all_depths = self.acceptance_histogram
        return {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            "acceptance_histogram": [all_depths.get(i, 0) for i in range(self.max_depth + 1)],
            "acceptance_histogram_by_draft_length": {
                str(depth): [histogram.get(i, 0) for i in range(depth + 1)]
                for depth, histogram in sorted(self.histograms.items())
            },
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.max_depth,
            "num_target_passes": self.num_target_passes,
            "tokens_per_pass": self.tokens_per_pass,
        }


def _summed(*histograms: dict[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for histogram in histograms:
        for accepted, steps in histogram.items():
            found[accepted] = found.get(accepted, 0) + steps
    return found


@dataclass(frozen=True, slots=True)
class TracedNode:
    """One guess of a traced step.

    Attributes:
        parent: Place of its parent; 0 is the root, and the first node of `StepTrace.nodes` is 1.
        drafters: Who guessed it.
        q: The drafters' own measure of how sure they were, from 0 to 1.
        p: How probable the target finds it after its parent, before processing.
    """

    token: int
    parent: int
    drafters: tuple[str, ...]
    q: float
    p: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The token tree of one request in one step, and what the target made of it.

    Attributes:
        time: Seconds since the epoch.
        position: Of the root among prompt and output, from 0.
        nodes: In tree order, without the root.
        path: The accepted nodes, by place.
        next_token: What the target said itself after the path; None: the output ended inside the path.
    """

    time: float
    position: int
    root: int
    nodes: tuple[TracedNode, ...]
    path: tuple[int, ...]
    next_token: int | None
    next_p: float | None


@dataclass(slots=True, eq=False)
class Request:
    """Tokens known, how many of them are in the cache, and what the user asked.

    Attributes:
        token_ids: Prompt, then output.
        num_computed: How many tokens from the start have keys and values in the target's cache. While
            running it is below `len(token_ids)`: the last known token is always still to be computed.
        seed: Of the noise; with the position it decides every sampled token.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = 2**31
    text: TextBuffer | None = None  # None: no tokenizer, and so no stop strings
    grammar: Grammar | None = None  # what the output has to keep to
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    prediction_ids: tuple[int, ...] = ()  # what the output is likely to resemble
    cache_salt: str | None = ""  # only requests with the same one share what was computed; None: with nobody
    tenant: str = ""  # who asks: those who wait share the engine evenly
    priority: int = 0  # lower goes first
    deadline: float = float("inf")  # of `time.monotonic`: what is not finished by then is ended
    start_deadline: float = float("inf")  # the same for what nobody has begun to compute by then
    token_ids: list[int] = field(init=False)
    uniforms: UniformStream = field(init=False)  # for rules that toss them
    # Of each drafter, by name: numbers the noise of its drawn guesses, so that none is used twice.
    num_draws: dict[str, int] = field(default_factory=dict)
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens whose keys and values were there already
    origins: list[str | None] = field(default_factory=list)  # for each output token, who guessed it
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    fault: Fault | None = None  # of which kind the error is
    forbidden: Tensor | None = None  # [vocab] bool, all that `allowed_token_ids` leaves out
    token_counts: TokenCounts | None = None  # what penalties are made of
    may_guess: bool = True  # False once a guess made the model compute NaN
    drafter_knows: bool = False  # whether the drafter has read what came before
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    trace: list[StepTrace] | None = None  # a list: its steps are to be noted
    arrival_time: float = 0.0
    scheduled_time: float | None = None  # when its first token was computed
    first_token_time: float | None = None
    finished_time: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.uniforms = UniformStream(self.seed)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the logits as they are."""
        return self.params.is_plain_greedy and self.grammar is None and not self.bad_words_ids

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def max_new_tokens(self) -> int:
        """How many more tokens this request may still say."""
        room = self.max_model_len - len(self.token_ids)
        if self.params.max_tokens is None:
            return room
        return min(room, self.params.max_tokens - self.num_output)

    def begin_draws(self, drafter: str) -> int:
        """A drafter begins a tree: the number of its first draw, beyond those of all its trees before.

        So no drafter's draws depend on how many another made, or where.
        """
        first = (self.num_draws.get(drafter, 0) // DRAWS_EACH + 1) * DRAWS_EACH
        self.num_draws[drafter] = first
        return first

    def append(self, token: int, origin: str | None) -> None:
        """Takes one token and notes whether the request ends with it."""
        assert not self.is_finished
        self.token_ids.append(token)
        self.origins.append(origin)
        if self.grammar is not None:
            self.grammar.advance(token)
        is_complete = self.grammar is not None and self.grammar.is_finished
        may_stop = self.num_output >= self.params.min_tokens
        if may_stop and token in self.params.stop_tokens:
            self.finish(FinishReason.STOP, token)
        elif (may_stop or is_complete) and token in self.eos_token_ids and not self.params.ignore_eos:
            self.finish(FinishReason.STOP)
        elif self.text is not None and (stop := self.text.push(token, may_stop=may_stop)):
            self.finish(FinishReason.STOP, stop)
        elif is_complete:
            self.finish(FinishReason.STOP)
        elif self.max_new_tokens <= 0:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        # A failure may be that of its very text, and must not happen once more while the request is cleared away.
        if self.text is not None and not isinstance(stop_reason, str) and reason is not FinishReason.ERROR:
            self.text.finish()


@dataclass(frozen=True, slots=True)
class Span:
    """A request's part in one step: the half-open range of known tokens to compute.

    If `end` is the number of known tokens the step also says new ones, and a tree may hang on the last
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
        """The tree without guesses, or None if this span says no token."""
        return TokenTree.root(self.request.token_ids[-1]) if self.produces_token else None
