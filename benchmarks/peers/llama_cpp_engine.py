"""llama.cpp through llama-cpp-python's low-level calls, plain and with token chains from a draft model or a lookup.

The package itself speculates with prompt lookup only, whose search is used here. The loop is that of llama.cpp's own
programs. A draft model proposes its best token repeatedly until its probability is too low. The target scores the chain
in one pass and picks its own token from each row of logits. A draft model reads only tokens that are not in its cache.
"""

import ctypes
import itertools
from typing import Any, Protocol

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.peers.messages import Ask, Generated, Load, Settings, Stopwatch
from benchmarks.process import WorkerError

_COUNTS = (2, 3, 4, 5, 6, 8, 12, 16)  # draft tokens in a chain
_LEAST_PROBS = (0.0, 0.4, 0.75)  # least probability under the drafter at which it proposes a token
_NGRAMS = (2, 3, 4)  # tokens that are looked up; the package's default is 2
_SLOW = ((16, 0.0), (16, 0.4), (8, 0.0))  # (count, probability) to try where a pass costs the same at any size


def create(num_threads: int) -> "LlamaCppEngine":
    return LlamaCppEngine(num_threads)


class LlamaCppEngine:
    """A target and optionally a drafter, each with a cache for one sequence."""

    def __init__(self, num_threads: int) -> None:
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._num_threads = num_threads
        self._target: Sequence | None = None
        self._drafter: Sequence | None = None
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    def load(self, job: Load) -> list[Settings]:
        max_len = job.max_len + max(_COUNTS) + 1
        self._target = self._target or Sequence(job.target, max_len, self._num_threads, is_mapped=job.is_slow)
        if job.looks_up:
            counts = (16,) if job.is_slow else _COUNTS
            return [{"num_draft": count, "ngram_size": size} for count in counts for size in _NGRAMS]
        if job.drafter is None:
            return [{}]
        self._drafter = Sequence(job.drafter, max_len, self._num_threads)
        tried = _SLOW if job.is_slow else itertools.product(_COUNTS, _LEAST_PROBS)
        return [{"num_draft": count, "p_min": least} for count, least in tried]

    def generate(self, ask: Ask) -> Generated:
        assert self._target is not None
        chooser = Chooser(ask.temperature, ask.seed)
        self._target.forget(0)
        if not ask.drafts:
            return _decode(self._target, ask, chooser)
        if "ngram_size" in ask.settings:
            return _speculate(self._target, Lookup(ask.settings), ask, chooser)
        assert self._drafter is not None
        self._drafter.forget(0)
        return _speculate(self._target, DraftModel(self._drafter, ask.settings), ask, chooser)


def _decode(target: "Sequence", ask: Ask, chooser: "Chooser") -> Generated:
    stopwatch = Stopwatch()
    generated = [chooser.token(target.read(ask.token_ids))]
    stopwatch.arrived(1)
    while len(generated) < ask.max_tokens:
        generated.append(chooser.token(target.read(generated[-1:])))
    return stopwatch.stop(generated)


class Drafter(Protocol):
    """A source of draft tokens."""

    def read(self, known: list[int]) -> None:
        """Read the prompt."""

    def draft(self, known: list[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow the known ones."""

    def forget(self, length: int) -> None:
        """Forget all tokens after the first `length`."""


def _speculate(target: "Sequence", drafter: Drafter, ask: Ask, chooser: "Chooser") -> Generated:
    stopwatch = Stopwatch()
    known = list(ask.token_ids)
    drafter.read(known)
    known.append(chooser.token(target.read(known)))
    stopwatch.arrived(1)
    end = len(ask.token_ids) + ask.max_tokens
    while len(known) < end:
        guesses = drafter.draft(known, min(ask.settings["num_draft"], end - len(known) - 1))
        rows = target.read([known[-1], *guesses], all_rows=True)
        for row, guess in zip(rows, [*guesses, None], strict=True):
            known.append(chooser.token(row))
            if known[-1] != guess:
                break
        # Neither model has read the last token. Rejected draft tokens are removed from the caches.
        target.forget(len(known) - 1)
        drafter.forget(len(known) - 1)
    return stopwatch.stop(known[len(ask.token_ids) :])


class DraftModel:
    """Greedy draft tokens of a model, each with at least the probability `p_min` of the settings."""

    def __init__(self, model: "Sequence", settings: Settings) -> None:
        self._model, self._least = model, settings["p_min"]

    def read(self, known: list[int]) -> None:
        self._model.read(known)

    def draft(self, known: list[int], most: int) -> list[int]:
        guesses: list[int] = []
        unread = known[self._model.length :]
        while len(guesses) < most:
            row = self._model.read(unread)
            token = int(row.argmax())
            if self._least > 0 and 1 / np.exp(row - row[token]).sum() < self._least:
                break
            guesses.append(token)
            unread = [token]
        return guesses

    def forget(self, length: int) -> None:
        self._model.forget(min(self._model.length, length))


class Lookup:
    """Tokens that followed the last ones before: llama-cpp-python's own search."""

    def __init__(self, settings: Settings) -> None:
        self._search = LlamaPromptLookupDecoding(settings["ngram_size"], settings["num_draft"])

    def read(self, known: list[int]) -> None: ...

    def draft(self, known: list[int], most: int) -> list[int]:
        found: list[int] = self._search(np.array(known, dtype=np.intc)).tolist()
        return found[: max(most, 0)]

    def forget(self, length: int) -> None: ...


class Chooser:
    """Selection of a token from logits: the best at temperature 0, otherwise sampled."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._random = np.random.default_rng(seed)

    def token(self, row: Any) -> int:  # [vocab]
        if self._temperature == 0:
            return int(row.argmax())
        cumulative = np.cumsum(np.exp((row - row.max()) / self._temperature))
        return int(min(np.searchsorted(cumulative, self._random.random() * cumulative[-1], "right"), len(row) - 1))


class Sequence:
    """A model and its cache, which holds the tokens read so far.

    Args:
        is_mapped: Whether all weights are used from the mapped file. No copy in a faster layout is made, since it might
            not fit into memory.
    """

    def __init__(self, file: str, max_len: int, num_threads: int, *, is_mapped: bool = False) -> None:
        self.length = 0
        choices = llama_cpp.llama_model_default_params()
        choices.use_mmap = True
        choices.use_extra_bufts = not is_mapped
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), choices)
        if not self._model:
            raise WorkerError("llama.cpp cannot load the file written for it")
        params = llama_cpp.llama_context_default_params()  # flash attention is llama.cpp's own choice
        params.n_ctx = params.n_batch = max_len
        params.n_outputs_max = max(_COUNTS) + 1
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise WorkerError(f"llama.cpp has no memory for a context of {max_len} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(max_len, 0, 1)
        for i in range(max_len):
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, 0

    def read(self, token_ids: list[int], *, all_rows: bool = False) -> Any:
        """Run a pass and return the logits after the last token [vocab], or after each token [tokens, vocab].

        The array is valid until the next call.
        """
        batch, last = self._batch, len(token_ids) - 1
        batch.n_tokens = len(token_ids)
        for i, token in enumerate(token_ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, self.length + i, all_rows or i == last
        if status := llama_cpp.llama_decode(self._context, batch):
            raise WorkerError(f"llama_decode returned {status}")
        self.length += len(token_ids)
        rows = len(token_ids) if all_rows else 1
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (rows, self._vocab_size))
        return logits if all_rows else logits[0]

    def forget(self, length: int) -> None:
        """Remove all tokens after the first `length` from the cache."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1)
        self.length = length


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # made by ctypes
def _quiet(level: int, text: bytes, data: Any) -> None:
    pass
