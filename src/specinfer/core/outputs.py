"""Results that a caller receives. Names are vLLM's, with additions for speculation."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap

from specinfer.core.logprob import Logprob
from specinfer.core.request import Request
from specinfer.core.speculation import SpeculativeDecodingMetrics, StepTrace


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a prompt.

    Attributes:
        logprobs: For each token: token id -> `Logprob`; None if not asked for.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: Stop string or token id that ended the output, if one did.
        token_origins: For each token the drafter that proposed it, or None if the target emitted it.
        reasoning: Thought that precedes the answer, or None if there is none.
        content: Answer without the thought; None in an output that still grows.
        num_reasoning_tokens: Number of tokens of the thought.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_origins: list[str | None] = field(default_factory=list)
    reasoning: str | None = None
    content: str | None = None
    num_reasoning_tokens: int = 0

    @classmethod
    def from_request(cls, index: int, request: Request) -> "CompletionOutput":
        asked, text = request.params.logprobs is not None, request.text.text if request.text is not None else ""
        pairs = zip(request.output_ids, request.logprobs, strict=asked)
        return cls(
            index=index,
            text=text,
            token_ids=request.output_ids,
            cumulative_logprob=sum(logprobs[token].logprob for token, logprobs in pairs) if asked else None,
            logprobs=list(request.logprobs) if asked else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            token_origins=list(request.origins),
            content=text,
            num_reasoning_tokens=0 if request.thought is None else request.thought.num_tokens,
        )

    @classmethod
    def from_chunk(cls, chunk: "TextChunk", logprob: float | None) -> "CompletionOutput":
        """Make the output from a part of it, and the log-probability of all tokens up to its end."""
        return cls(
            chunk.index, chunk.text, chunk.token_ids, logprob, chunk.logprobs, chunk.finish_reason, chunk.stop_reason,
            chunk.origins,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds since the epoch, and vLLM's per-request counters of speculation."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All outputs of one prompt.

    Attributes:
        outputs: The outputs, or an empty list if the request failed.
        error: Reason why the request failed while it ran, or None if it was served.
        prompt_logprobs: For each token of the prompt: token id -> `Logprob`, None for the first; None if not
            asked for.
        num_cached_tokens: Prompt tokens that were not computed because they were in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @classmethod
    def from_requests(cls, request_id: str, prompt: str | None, requests: list[Request]) -> "RequestOutput":
        """Make the output from the requests (one for each of `n`) that served a prompt."""
        first = requests[0]
        starts = [r.times.first_token for r in requests if r.times.first_token is not None]
        ends = [r.times.finished for r in requests if r.times.finished is not None]
        error = next((r.error for r in requests if r.error is not None), None)
        total = first.speculation
        for request in requests[1:]:
            total = total + request.speculation
        return cls(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=first.prompt_ids,
            outputs=[] if error is not None else list(starmap(CompletionOutput.from_request, enumerate(requests))),
            finished=all(request.is_finished for request in requests),
            metrics=RequestMetrics(
                first.times.arrival, min(starts, default=None), max(ends, default=None), total.as_dict()
            ),
            error=error,
            prompt_logprobs=list(first.prompt_logprobs) if first.params.prompt_logprobs is not None else None,
            num_cached_tokens=first.num_cached,
        )

    @classmethod
    def growing(
        cls, request_id: str, prompt: str | None, request: Request, outputs: list[CompletionOutput]
    ) -> "RequestOutput":
        """Make the unfinished output of a prompt from one of its requests."""
        return cls(
            request_id, prompt, request.prompt_ids, outputs, finished=False,
            metrics=RequestMetrics(request.times.arrival, request.times.first_token),
            prompt_logprobs=list(request.prompt_logprobs) if request.params.prompt_logprobs is not None else None,
            num_cached_tokens=request.num_cached,
        )  # fmt: skip

    def warn_of_error(self, stacklevel: int) -> None:
        """Emit a Python warning if the request failed, so that nobody overlooks `error`."""
        if self.error is not None:
            warnings.warn(f"request {self.request_id} failed: {self.error}", RuntimeWarning, stacklevel + 1)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that one or more accepted tokens added to a streamed output.

    Attributes:
        text: New text; may be empty while a character or a stop string is unfinished.
        token_ids: New tokens. A token whose text may be the start of a stop string is withheld until that is decided.
        origins: For each new token, the drafter that proposed it, or None if the target emitted it.
        output: Complete output; set on the last chunk of a prompt.
        index: Number of the output among the prompt's outputs.
        logprobs: For each new token: token id -> `Logprob`; None if not asked for.
        finish_reason: "stop", "length", "abort" or "error", on the last chunk of an output.
        stop_reason: Stop string or token id that ended the output, if one did.
        steps: Token trees of the steps that made the chunk, if the request is traced.
    """

    text: str
    token_ids: list[int]
    origins: list[str | None]
    output: RequestOutput | None = None
    index: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    steps: list[StepTrace] = field(default_factory=list)

    @property
    def logprob(self) -> float | None:
        """Log-probability of the tokens together; None if not asked for."""
        if self.logprobs is None:
            return None
        return sum(best[token].logprob for token, best in zip(self.token_ids, self.logprobs, strict=True))

    @classmethod
    def joined(cls, chunks: Sequence["TextChunk"]) -> "TextChunk":
        """Return several chunks of one output joined into one."""
        last = chunks[-1]
        assert all(chunk.index == last.index for chunk in chunks)
        scored = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
        return (
            last
            if len(chunks) == 1
            else replace(
                last,
                text="".join(chunk.text for chunk in chunks),
                token_ids=[token for chunk in chunks for token in chunk.token_ids],
                origins=[origin for chunk in chunks for origin in chunk.origins],
                steps=[step for chunk in chunks for step in chunk.steps],
                logprobs=[best for logprobs in scored for best in logprobs] if len(scored) == len(chunks) else None,
            )
        )


class OutputCursor:
    """The position in a growing output up to which its reader has received it."""

    def __init__(self, request: Request, index: int = 0) -> None:
        self._request, self._index = request, index
        self._num_characters = self._num_tokens = 0

    def advance(self) -> TextChunk:
        """Return the new text and tokens since the last call that are final; the chunk may be empty."""
        request, start = self._request, self._num_tokens
        text, end = "", request.num_output
        if request.text is not None:
            text = request.text.text
            if not request.is_finished:
                text = request.text.settled()
                while end > start and request.text.ends[end - 1] > len(text):
                    end -= 1
        shown, self._num_characters = self._num_characters, max(self._num_characters, len(text))
        self._num_tokens = end
        steps = request.trace or []
        if steps:
            request.trace = []  # a long output has many, and nothing else needs them
        return TextChunk(
            text=text[shown:],
            token_ids=request.output_ids[start:end],
            origins=request.origins[start:end],
            index=self._index,
            logprobs=request.logprobs[start:end] if request.params.logprobs is not None else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            steps=steps,
        )
