"""Masks, biases and penalties of requests, applied to the logits of the nodes of their trees."""

import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.logits import Adjustments, Paths

_CHUNK = 2048


@triton.jit(do_not_specialize=["num_nodes", "num_tokens", "first", "num_ends"])
def adjust_program(
    logits, is_adjusted, bias, seen, repeated_positive, repeated_negative, frequency, presence,
    num_early, ends, numbers, tokens, parents, vocab, stride, num_nodes, num_tokens, first, num_ends,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Adjust a chunk of a node's logits. Grid: [rows, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = row // num_nodes
    if tl.load(is_adjusted + request) > 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        valid = ids < vocab
        known = tl.load(seen + request * vocab + ids, valid, other=0)
        node = tl.load(numbers + row)
        depth = tl.full((), 0, tl.int32)
        while node >= first:
            depth += 1
            place = request * num_tokens + node
            known += tl.where(tl.load(tokens + place).to(tl.int32) == ids, 2, 0)
            node = tl.load(parents + place)
        counts = (known >> 1).to(tl.float32)
        values = tl.load(logits + row * stride + ids, valid, other=0.0)
        values += tl.load(bias + request * vocab + ids, valid, other=0.0)
        positive, negative = tl.load(repeated_positive + request), tl.load(repeated_negative + request)
        values = tl.where(known > 0, values * tl.where(values > 0, positive, negative), values)
        values -= counts * tl.load(frequency + request)
        values -= tl.where(counts > 0, 1.0, 0.0) * tl.load(presence + request)
        if depth < tl.load(num_early + request):
            for i in range(num_ends):
                values = tl.where(tl.load(ends + request * num_ends + i) == ids, float("-inf"), values)
        tl.store(logits + row * stride + ids, values, valid)


def adjust_logits(logits: Tensor, adjustments: Adjustments, paths: Paths) -> None:
    """Apply biases and penalties, as if the output continued with the path to each node.

    Args:
        logits: [requests * nodes, vocab] float32, written to.
    """
    rows, vocab = logits.shape
    requests, nodes = paths.numbers.shape
    each = (
        adjustments.is_adjusted, adjustments.bias, adjustments.seen, adjustments.repeated_positive,
        adjustments.repeated_negative, adjustments.frequency, adjustments.presence,
        adjustments.num_early, adjustments.ends,
    )  # fmt: skip
    assert logits.stride(1) == 1
    assert rows == requests * nodes
    assert adjustments.seen.shape == (requests, vocab)
    assert all(tensor.is_contiguous() for tensor in (*each, paths.numbers, paths.tokens, paths.parents))
    # Without fused operations, so that sums are rounded as in PyTorch.
    adjust_program[(rows, triton.cdiv(vocab, _CHUNK))](
        logits, *each, paths.numbers, paths.tokens, paths.parents,
        vocab, logits.stride(0), nodes, paths.tokens.shape[1], paths.first, adjustments.ends.shape[1],
        CHUNK=_CHUNK, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["words"])
def mask_program(logits, bits, is_masked, vocab, stride, words, CHUNK: tl.constexpr):
    """Mask a chunk of a row's logits. Grid: [rows, chunks]."""
    row, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if tl.load(is_masked + row) > 0:
        valid = ids < vocab
        word = tl.load(bits + row * words + ids // 32, valid, other=0)
        tl.store(logits + row * stride + ids, float("-inf"), valid & ((word >> ids % 32 & 1) == 0))


def mask_logits(logits: Tensor, bits: Tensor, is_masked: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf.

    Args:
        logits: [rows, vocab] float32, written to.
        bits: [rows, words] int32, the bits of 32 tokens in each word, set for allowed ones.
        is_masked: [rows] int32; 0 where all tokens are allowed, and no bits are read.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == bits.stride(1) == 1
    assert is_masked.is_contiguous()
    assert len(bits) == len(is_masked) == rows
    mask_program[(rows, triton.cdiv(vocab, _CHUNK))](
        logits, bits, is_masked, vocab, logits.stride(0), bits.stride(0), CHUNK=_CHUNK
    )
