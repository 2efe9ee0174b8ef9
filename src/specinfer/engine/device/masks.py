"""Masks of tokens in steps on a device: what the text allows after each node of the trees, as by a grammar.

The host computes them from the trees while the device computes the target's pass, and sends them before the walk. Those
of the roots are sent before the draft loop, so that the first draft tokens are allowed ones.
"""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specinfer.core.grammar.state import Bits
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree
from specinfer.ops.tree_layout import WORD
from specinfer.verify.logits import write_allowed

logger = logging.getLogger(__name__)


def write_masks(bits: Bits, request: Request, paths: Sequence[tuple[int, ...]]) -> None:
    """Write which tokens a request may have after each path; none after a failure.

    Args:
        bits: [paths, vocab / 8] to write to.
    """
    try:
        write_allowed(bits, request, paths)
    except Exception:
        logger.exception("masks of request %s failed; it goes on without draft tokens", request.request_id)
        bits[:] = 0  # so that an ordinary verification finds out what is wrong


class TokenMasks:
    """Masks of all nodes of a step, a bit for each token, on the host and on the device; and logits that wait for them.

    Only one step may use them at a time.

    Args:
        logits: [largest number of nodes of a step, vocab] float32 memory for those of the target's pass.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits, device = logits, logits.device
        num_rows, vocab = logits.shape
        words, pins = -(-vocab // WORD), device.type == "cuda"
        with torch.inference_mode(mode=False):
            self._bits = torch.zeros((num_rows, words), dtype=torch.int32, device=device)
            self._is_masked = torch.zeros(num_rows, dtype=torch.int32, device=device)
            self._host_bits = torch.zeros((num_rows, words), dtype=torch.int32, pin_memory=pins)
            self._host_is_masked = torch.zeros(num_rows, dtype=torch.int32, pin_memory=pins)
        self._num_bytes = -(-vocab // 8)
        self._here = self._host_bits.numpy().view("uint8")

    def of_roots(self, requests: int, nodes: int) -> tuple[Tensor, Tensor]:
        """Return the masks of the roots of trees, and whether they are used, as `mask_logits` takes them."""
        bits, used = self.of_nodes(requests * nodes)
        return bits[::nodes], used[::nodes].contiguous()

    def of_nodes(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the masks of all nodes, and whether they are used, as `mask_logits` takes them."""
        return self._bits[:count], self._is_masked[:count]

    def send_roots(self, requests: Iterable[Request], nodes: int) -> None:
        """Send the masks of the roots of the next step; from here on no others are used.

        Args:
            nodes: Nodes of each tree of the step.
        """
        self._host_is_masked.zero_()
        for row, request in enumerate(requests):
            if request.restricts_tokens(0):
                self._write(row * nodes, request, [()])
        self._copy(self._is_masked, self._host_is_masked)

    def send(self, requests: Iterable[Request], trees: Iterable[TokenTree], nodes: int) -> None:
        """Send the masks of the other nodes of the trees; what was sent before need not have arrived."""
        for row, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            if tree.num_guessed and request.restricts_tokens(tree.max_depth):
                self._write(row * nodes + 1, request, [tree.path_tokens(node) for node in range(1, len(tree))])
        self._copy(self._is_masked, self._host_is_masked)

    def _write(self, first: int, request: Request, paths: Sequence[tuple[int, ...]]) -> None:
        """Send the masks after some paths, from this row on."""
        rows = slice(first, first + len(paths))
        write_masks(self._here[rows, : self._num_bytes], request, paths)
        self._host_is_masked[rows] = 1
        self._copy(self._bits[rows], self._host_bits[rows])

    def _copy(self, on_device: Tensor, on_host: Tensor) -> None:
        on_device.copy_(on_host, non_blocking=True)
