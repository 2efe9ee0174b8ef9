"""Token trees as JSON: for clients that ask for their own, and in a file with those of all requests (docs/trace.md).

The engine's thread only puts steps into a bounded queue. A thread of this module decodes the tokens and writes the
file. Steps that do not fit into the queue are skipped and counted: a slow disk must not slow the engine.
"""

import dataclasses
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from specinfer.async_llm import AsyncLLM
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.speculation import StepTrace
from specinfer.core.step_record import StepRecord
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.core.tree import TokenTree
from specinfer.engine.emission import target_probs, trace_step
from specinfer.generation import Generation
from specinfer.server.background import BackgroundWriter
from specinfer.server.config import open_private
from specinfer.verify import Acceptance

VERSION = 1
logger = logging.getLogger(__name__)
_MAX_LINES_WAITING = 4096
_MAX_NODES_WAITING = 100_000  # about 20 MB
_DEFAULTS = SamplingParams()


class TokenDecoder:
    """The text of single tokens, by token id; each is decoded once. Any thread may call it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        # Some tokenizers drop the space at the start of a text, so tokens are decoded after another one.
        self._before: list[int] = [] if tokenizer is None else tokenizer.encode("a", add_special_tokens=False)
        self._length = len(self._decode([]))

    def __call__(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token])[self._length :]
        return text

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a sequence of tokens."""
        return self._decode(tokens)[self._length :]

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode([*self._before, *tokens], skip_special_tokens=False)
        return text


def step_record(step: StepTrace, decode: Callable[[int], str]) -> dict[str, Any]:
    """Return one step as a JSON object. Node indices count from 1; 0 is the root.

    Args:
        decode: Returns the text of one token.
    """
    return {
        "time": step.time,
        "position": step.position,
        "root": {"token": step.root, "text": decode(step.root)},
        "nodes": [
            {
                "token": node.token,
                "text": decode(node.token),
                "parent": node.parent,
                "drafters": list(node.drafters),
                "q": _rounded(node.q),
                "p": _rounded(node.p),
                "accepted": node.accepted,
            }
            for node in step.nodes
        ],
        "path": list(step.path),
        "next": None
        if step.next_token is None
        else {"token": step.next_token, "text": decode(step.next_token), "p": _rounded(step.next_p)},
    }


def _rounded(chance: float | None) -> float | None:
    """Round a probability to six digits; None for a value that is not finite, which JSON cannot hold."""
    return None if chance is None or not math.isfinite(chance) else float(f"{chance:.6g}")


class TraceFile:
    """A writer of the token trees of all requests to a file, which is overwritten.

    Args:
        engine: The engine whose requests are traced from now on.
        names: The names of the model; the first is written to the file.

    Raises:
        ValueError: The file cannot be written.
    """

    reads_logits = True

    def __init__(self, path: str, engine: AsyncLLM, names: Sequence[str]) -> None:
        self._file = open_private(path, "w")
        self._path, self._engine = path, engine
        self._model = names[0] if names else ""
        self._texts = TokenDecoder(engine.llm.tokenizer)
        self._lock = threading.Lock()
        self._num_nodes_waiting = 0
        self._begun: set[str] = set()
        self._has_failed = self._is_closed = False
        self._write({"type": "trace", "version": VERSION, "model": self._model, "time": time.time()})
        self._writer = BackgroundWriter("specinfer-trace", _MAX_LINES_WAITING)
        engine.llm.engine.observers.append(self)
        engine.on_end.append(self._ended)

    def close(self) -> None:
        """Write what is queued, then stop."""
        if self._is_closed:
            return
        self._is_closed = True
        self._engine.on_end.remove(self._ended)
        self._engine.llm.engine.observers.remove(self)
        self._writer.close()
        try:
            if self._writer.num_dropped:
                self._write({"type": "left_out", "lines": self._writer.num_dropped})
            self._file.close()
        except OSError as error:
            self._fail(error)

    # ------------------------------------------------------------------------- in the engine's thread

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        """Queue a step for writing; nothing of it is stored with the request."""
        if not self._is_closed:
            probs = target_probs(tree, acceptance, logits)
            step = trace_step(request, tree, acceptance, probs, num_generated)
            self._put(functools.partial(self._write_step, request, step), len(step.nodes))

    def on_step(self, record: StepRecord) -> None:
        pass

    # ------------------------------------------------------------------------------- in the event loop

    def _ended(self, generation: Generation) -> None:
        for request in generation.requests:
            self._put(functools.partial(self._write_end, request), 0)

    def _put(self, action: Callable[[], None], num_nodes: int) -> None:
        """Queue a line for the writer, or skip it if too much is queued."""

        def write() -> None:
            with self._lock:
                self._num_nodes_waiting -= num_nodes
            try:
                action()
                if self._writer.is_idle and not self._has_failed:
                    self._file.flush()
            except Exception as error:  # includes a tokenizer's errors: `close` waits for this thread
                self._fail(error)

        with self._lock:
            has_dropped = self._writer.num_dropped > 0
            if self._num_nodes_waiting + num_nodes > _MAX_NODES_WAITING:
                self._writer.num_dropped += 1
            elif self._writer.put(write):
                self._num_nodes_waiting += num_nodes
                return
        if not has_dropped:
            logger.warning("trace: %s is written too slowly; some lines are skipped", self._path)

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            reason = getattr(error, "strerror", None) or error
            logger.warning("trace: %s cannot be written any more: %s; serving goes on", self._path, reason)
        self._has_failed = True

    def _begin(self, request: Request) -> None:
        if request.request_id in self._begun:
            return
        self._begun.add(request.request_id)
        self._write(
            {
                "type": "request",
                "request": request.request_id,
                "time": request.times.arrival,
                "model": self._model,
                "prompt": self._texts.text(request.prompt_ids) or None,
                "prompt_token_ids": request.prompt_ids,
                "seed": request.seed,
                "params": changed_params(request.params),
            }
        )

    def _write_step(self, request: Request, step: StepTrace) -> None:
        self._begin(request)
        self._write({"type": "step", "request": request.request_id, **step_record(step, self._texts)})

    def _write_end(self, request: Request) -> None:
        self._begin(request)
        self._begun.discard(request.request_id)
        self._write(
            {
                "type": "end",
                "request": request.request_id,
                "time": request.times.finished,
                "finish_reason": request.finish_reason,
                "stop_reason": request.stop_reason,
                "error": request.error,
                "first_token_time": request.times.first_token,
                "speculative_decoding": request.speculation.as_dict(),
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        if not self._has_failed:
            self._file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


def changed_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from the defaults, as JSON values."""
    changed = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != getattr(_DEFAULTS, field.name):
            changed[field.name] = dataclasses.asdict(value) if isinstance(value, StructuredOutputsParams) else value
    return json.loads(json.dumps(changed, default=str))  # type: ignore[no-any-return]
