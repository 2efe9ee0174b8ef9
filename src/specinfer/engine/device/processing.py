"""Processing of logits in steps on a device: what requests need of it, and their parameters as tensors."""

import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.ops import tree_ops
from specinfer.ops.cpu.transfers import send
from specinfer.ops.logits import MAX_ENDS, Adjustments, Paths, Truncation
from specinfer.verify.logits import log_min_p, temperature_of, top_k_of

logger = logging.getLogger(__name__)


class Processing(enum.IntEnum):
    """Kind of processing of logits in a step, before tokens are chosen; each includes those before it."""

    NONE = 0
    TRUNCATION = 1  # min-p, top-k and top-p
    ADJUSTMENT = 2  # biases and penalties

    @classmethod
    def from_params(cls, params: SamplingParams) -> "Processing":
        if params.has_penalties or params.logit_bias or params.allowed_token_ids is not None:
            return cls.ADJUSTMENT
        return cls.TRUNCATION if params.truncates and not params.is_greedy else cls.NONE

    @classmethod
    def from_request(cls, request: Request) -> "Processing":
        """Return what a request needs for its next token: until `min_tokens` ends are held back."""
        return cls.ADJUSTMENT if request.num_output < request.params.min_tokens else cls.from_params(request.params)


def can_adjust(request: Request) -> bool:
    """Return whether all adjustments of a request can be applied on a device."""
    is_early = request.num_output < request.params.min_tokens
    return not is_early or (request.grammar is None and len(_ends(request)) <= MAX_ENDS)


def _ends(request: Request) -> tuple[int, ...]:
    return (*request.eos_token_ids, *request.params.stop_tokens)


def write_truncation(truncation: Truncation, row: int, params: SamplingParams, vocab: int) -> None:
    """Write what a request samples from to a row; a temperature that counts as greedy is stored as 0."""
    truncation.temperatures[row].fill_(temperature_of(params))
    truncation.log_min_p[row].fill_(log_min_p(params))
    truncation.top_k[row].fill_(top_k_of(params, vocab))
    truncation.top_p[row].fill_(params.top_p)


class ReservedAdjustments:
    """Rows of biases and penalties, for which memory is reserved when it is first needed."""

    def __init__(self, num_rows: int, vocab: int, device: torch.device) -> None:
        self._sizes, self._lacks_memory = (num_rows, vocab, device), False
        self.rows: Adjustments | None = None

    def are_there(self) -> bool:
        """Return whether there is memory for them; without any, this is logged once."""
        if self.rows is None and not self._lacks_memory:
            try:
                self.rows = Adjustments.empty(*self._sizes)
            except torch.OutOfMemoryError:
                self._lacks_memory, (num_rows, vocab, _) = True, self._sizes
                logger.warning(
                    "no %d MiB are left for penalties on the device: host steps apply them",
                    8 * num_rows * vocab >> 20,
                )
        return self.rows is not None


class LogitProcessor(NamedTuple):
    """The processing of logits of a launch, for drafters and target."""

    truncation: Truncation | None  # None keeps all tokens
    adjustments: Adjustments | None = None
    # Function that returns the masks of tokens after the roots, as `mask_logits` takes them. Drafts are masked there
    # alone: of deeper levels the host does not know the path, and tokens that are not allowed are rejected.
    root_masks: Callable[[], tuple[Tensor, Tensor]] | None = None

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor | None:
        """Adjust logits [requests * nodes, vocab] float32 in place; return the least scores of tokens that may follow.

        None is returned if all may.
        """
        if self.root_masks is not None and not paths.max_depth:
            tree_ops.mask_logits(logits, *self.root_masks())
        if self.adjustments is not None:
            tree_ops.adjust_logits(logits, self.adjustments, paths)
        return None if self.truncation is None else tree_ops.least_kept(logits, self.truncation)


def write_adjustments(
    adjustments: Adjustments, row: int, request: Request, send_there: Callable[[npt.NDArray[Any]], Tensor]
) -> None:
    """Write a request's biases, penalties and tokens to a row.

    Args:
        send_there: Function that copies an array to the device.
    """
    params, vocab = request.params, adjustments.seen.shape[1]
    bias = np.zeros(vocab, dtype=np.float32)
    if params.allowed_token_ids is not None:
        bias.fill(-np.inf)
        bias[list(params.allowed_token_ids)] = 0.0
    if params.logit_bias:
        bias[list(params.logit_bias)] += np.asarray(list(params.logit_bias.values()), dtype=np.float32)
    seen = 2 * np.bincount(request.output_ids, minlength=vocab)
    if params.repetition_penalty != 1.0:
        seen[request.prompt_ids] += 1
    adjustments.bias[row].copy_(send_there(bias))
    adjustments.seen[row].copy_(send_there(seen.astype(np.int32)))
    adjustments.repeated_positive[row].fill_(1.0 / params.repetition_penalty)
    adjustments.repeated_negative[row].fill_(params.repetition_penalty)
    adjustments.frequency[row].fill_(params.frequency_penalty)
    adjustments.presence[row].fill_(params.presence_penalty)
    adjustments.num_early[row].fill_(params.min_tokens - request.num_output)
    ends = np.full(MAX_ENDS, -1, dtype=np.int32)
    if request.num_output < params.min_tokens:
        ends[: len(_ends(request))] = _ends(request)
    adjustments.ends[row].copy_(send_there(ends))
    adjustments.is_adjusted[row].fill_(1)


class AdjustedRows:
    """Rows of biases and penalties, the last of which has none.

    Args:
        num_rows: Largest number of requests of a step.
        vocab: Number of tokens of the target.
    """

    def __init__(self, num_rows: int, vocab: int, device: torch.device) -> None:
        self._no_row, self._vocab, self._device = num_rows, vocab, device
        self._reserved = ReservedAdjustments(num_rows + 1, vocab, device)
        self._free: list[int] = []
        # Row of each request, and its output tokens that are counted there; the least recently used first.
        self._rows: OrderedDict[Request, tuple[int, int]] = OrderedDict()
        self.forget()

    def can_adjust(self) -> bool:
        """Return whether there is memory, which is reserved when it is first needed."""
        return self._reserved.are_there()

    @property
    def _adjustments(self) -> Adjustments:
        assert self._reserved.rows is not None
        return self._reserved.rows

    def forget(self) -> None:
        """Discard what is known of the rows, which may not have been written."""
        self._rows.clear()
        self._free = list(range(self._no_row))

    def update(self, requests: Sequence[Request]) -> list[int]:
        """Bring the rows of these requests up to date, and return them."""
        for request in [request for request in self._rows if request.is_finished]:
            self._free.append(self._rows.pop(request)[0])
        rows, no_row, vocab = [], self._no_row, self._vocab
        emitted = list[int]()  # cells of the table of tokens that were seen
        for request in requests:
            if Processing.from_request(request) < Processing.ADJUSTMENT:
                rows.append(no_row)
                continue
            if request not in self._rows:
                self._add(request)
            row, num_counted = self._rows[request]
            emitted += [row * vocab + token for token in request.output_ids[num_counted:]]
            self._rows[request] = row, request.num_output
            self._rows.move_to_end(request)
            if request.params.min_tokens:
                self._adjustments.num_early[row].fill_(request.params.min_tokens - request.num_output)
            rows.append(row)
        if emitted:
            cells = send(np.array(emitted), self._device)
            twice = torch.full((), 2, dtype=torch.int32, device=self._device)
            self._adjustments.seen.view(-1).index_add_(0, cells, twice.expand(len(emitted)))
        return rows

    def _add(self, request: Request) -> None:
        """Give a request a row, that of the request that was not drafted for the longest if there is no other."""
        row = self._free.pop() if self._free else self._rows.popitem(last=False)[1][0]
        write_adjustments(self._adjustments, row, request, lambda values: send(values, self._device))
        self._rows[request] = row, request.num_output

    def of(self, rows: Tensor) -> Adjustments:
        """Return those of some rows, [requests] int64."""
        return Adjustments(
            *(getattr(self._adjustments, field.name).index_select(0, rows) for field in fields(Adjustments))
        )
