"""Processing of logits into the distribution that a token is sampled from, for target and drafters.

There are two halves. `adjust` needs the history: forbidden tokens (allowed tokens, grammar, bad words, ends that come
too early), biases, penalties, and tokens that must end a thought. `truncate` needs the scores alone: temperature,
min-p, top-k and top-p. The order is vLLM's. Each row of logits belongs to one node of a token tree, and its history is
that node's own path.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specinfer.core.grammar.state import Bits, has_bit, set_bit
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.token_counts import TokenCounts
from specinfer.ops import tree_ops
from specinfer.ops.cpu.choice import most_probable
from specinfer.ops.cpu.transfers import send
from specinfer.ops.tree_layout import num_words
from specinfer.ops.triton import runs_on

_FEW = 128  # number of best tokens that top-p looks at first


def is_adjusted(request: Request, depth: int) -> bool:
    """Return whether `adjust` may change anything after paths of up to this length."""
    return request.params.adjusts_logits or request.restricts_tokens(depth)


def process_logits(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> Tensor:
    """Return the processed logits of one request's nodes; their softmax is the distribution of the next token.

    Args:
        logits: [num_nodes, vocab] float32; not changed.
        request: The request that the nodes belong to.
        paths: For each row, the draft tokens from the root (left out) to the node.

    Returns:
        [num_nodes, vocab] float32, -inf where a token cannot be emitted. At temperature 0 only the argmax
        has a meaning.
    """
    return truncate(adjust(logits, request, paths), request.params)


def adjust(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits after constraints, biases and penalties. Nothing waits for a device.

    Args:
        logits: [num_nodes, vocab] float32; not changed.
        request: The request that the nodes belong to.
        paths: For each row, the draft tokens from the root (left out) to the node.

    Returns:
        [num_nodes, vocab] float32, -inf where a token cannot be emitted; the input itself if nothing applies.
    """
    params, depth = request.params, max(map(len, paths), default=0)
    if not is_adjusted(request, depth):
        return logits
    logits = logits.clone()
    output_ids = request.output_ids  # the property copies, so it is read once
    if params.allowed_token_ids is not None:
        if request.logits_state.forbidden is None:  # made once: the list may be as long as the vocabulary
            forbidden = np.ones(logits.shape[-1], dtype=np.bool_)
            forbidden[list(params.allowed_token_ids)] = False
            request.logits_state.forbidden = send(forbidden, logits.device)
        logits.masked_fill_(request.logits_state.forbidden, -torch.inf)
    if request.restricts_tokens(depth):
        _mask(logits, request, paths)
    if params.logit_bias:
        ids = send(np.array(list(params.logit_bias), dtype=np.int64), logits.device)
        logits[:, ids] += send(np.array(list(params.logit_bias.values()), dtype=np.float32), logits.device)
    if len(output_ids) < params.min_tokens:
        _hold_back_ends(logits, request, paths)
    if params.has_penalties:
        _penalise(logits, request, paths)
    if forced := _forced_tokens(request, paths):
        rows, tokens = (send(np.array(one, dtype=np.int64), logits.device) for one in zip(*forced.items(), strict=True))
        logits[rows, tokens] = logits[rows, tokens].clamp(0.0, 0.0)  # whatever else forbids them; NaN stays
    return logits


def truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the logits after temperature, min-p, top-k and top-p; the input itself at temperature 0.

    Args:
        logits: [rows, k] float32 of all tokens or of some; not changed.
        params: Sampling parameters of the request.

    Returns:
        [rows, k] float32, -inf where a token is dropped.
    """
    if params.is_greedy:
        return logits
    if params.temperature != 1.0:
        logits = logits / params.temperature
    return logits.masked_fill(logits < least_score(logits, params), -torch.inf) if params.truncates else logits


def least_score(scores: Tensor, params: SamplingParams) -> Tensor:
    """Return the score of the least probable token that min-p, top-k and top-p keep; tokens of equal score are kept.

    Args:
        scores: [rows, k] float32, logits divided by the temperature.
        params: Sampling parameters of the request.

    Returns:
        [rows, 1] float32.
    """
    best = scores.amax(dim=-1, keepdim=True)
    least = torch.full_like(best, -torch.inf)
    if params.min_p > 0.0:
        # p >= min_p * p_max, written in logits, needs no softmax.
        least = best + log_min_p(params)
    if 0 < params.top_k < scores.shape[-1]:
        least = torch.maximum(least, most_probable(scores, params.top_k)[0][:, -1:])
    if params.top_p < 1.0:
        least = _nucleus(scores, best, least, params.top_p)
    return least


def temperature_of(params: SamplingParams) -> float:
    """Return the temperature, 0 if it counts as greedy."""
    return 0.0 if params.is_greedy else params.temperature


def top_k_of(params: SamplingParams, vocab: int) -> int:
    """Return top-k, 0 if no token is dropped."""
    return params.top_k if 0 < params.top_k < vocab else 0


def log_min_p(params: SamplingParams) -> float:
    """Return the logarithm of min-p, rounded to float32; -inf if no token is dropped."""
    return torch.log(torch.tensor(params.min_p)).item() if params.min_p > 0.0 else -torch.inf


def _nucleus(scores: Tensor, best: Tensor, least: Tensor, top_p: float) -> Tensor:
    """Return the least score kept by top-p alone among tokens with scores of at least `least`: [rows, 1]."""

    def weights(values: Tensor) -> Tensor:
        return (values - best).exp_().masked_fill_(values < least, 0.0)

    vocab = scores.shape[-1]
    count = min(_FEW, vocab) if scores.device.type == "cpu" else vocab  # on GPUs sorting costs less than waiting
    values = most_probable(scores, count)[0]
    mass_up_to = weights(values).cumsum(dim=-1, dtype=torch.float64)
    wanted = top_p * mass_up_to[:, -1:]
    if count < vocab:
        every = weights(scores)
        total = every.sum(dim=-1, keepdim=True, dtype=torch.float64)
        wanted = top_p * total
        if bool((mass_up_to[:, -1:] < wanted).any()):
            # Together, all tokens less probable than this have no more mass than may be dropped.
            count = int((every >= (1.0 - top_p) / vocab * total).sum(dim=-1).max())
            values = most_probable(scores, max(count, 1))[0]
            mass_up_to = weights(values).cumsum(dim=-1, dtype=torch.float64)
    last = (mass_up_to[:, :-1] < wanted).sum(dim=-1, keepdim=True)
    return torch.maximum(least, values.gather(-1, last))


def write_allowed(bits: Bits, request: Request, paths: Sequence[Sequence[int]]) -> None:
    """Write which tokens the text allows after each path, a bit each: by grammar, bad words and budget of the thought.

    Args:
        bits: [paths, vocab / 8] to write to.
        request: The request.
        paths: Proposed tokens after the output, which need not be legal.
    """
    output_ids = request.output_ids
    bits[:] = 255 if request.grammar is None else [request.grammar.bits(path) for path in paths]
    for row, path in zip(bits, paths, strict=True):
        for token in ends_of_bad_words(request.bad_words_ids, output_ids, path):
            set_bit(row, token, is_set=False)
    for place, token in _forced_tokens(request, paths).items():
        bits[place] = 0
        set_bit(bits[place], token, is_set=True)


def _forced_tokens(request: Request, paths: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return, by index of the path, the tokens that must end a thought, where the grammar allows them."""
    thought, grammar = request.thought, request.grammar
    if thought is None:
        return {}
    forced = {i: token for i, path in enumerate(paths) if (token := thought.forced(path)) is not None}
    if grammar is None:
        return forced
    return {i: token for i, token in forced.items() if has_bit(grammar.bits(paths[i]), token)}


def _mask(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> None:
    """Forbid what the text does not allow."""
    rows, vocab = logits.shape
    words = np.zeros((rows, num_words(vocab)), dtype=np.int32)
    bits = words.view(np.uint8)[:, : -(-vocab // 8)]
    write_allowed(bits, request, paths)
    if runs_on(logits):
        used = torch.ones(rows, dtype=torch.int32, device=logits.device)
        tree_ops.mask_logits(logits, send(words, logits.device), used)
    else:
        is_allowed = np.unpackbits(bits, axis=1, count=vocab, bitorder="little").view(np.bool_)
        logits.masked_fill_(~send(is_allowed, logits.device), -torch.inf)


def ends_of_bad_words(words: Sequence[Sequence[int]], output_ids: Sequence[int], path: Sequence[int]) -> list[int]:
    """Return the last tokens of the bad words whose other tokens end the output along a path."""
    reach = max(map(len, words), default=1) - 1
    history = [*output_ids[max(0, len(output_ids) - reach) :], *path]
    return [word[-1] for word in words if _ends_with(history, word[:-1])]


def _ends_with(history: Sequence[int], start: Sequence[int]) -> bool:
    if not start:
        return True
    # One token is enough to rule out most words.
    return bool(history) and history[-1] == start[-1] and list(history[-len(start) :]) == list(start)


def _hold_back_ends(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> None:
    """Forbid ends before `min_tokens`, except in rows where the grammar allows nothing else."""
    params, num_output = request.params, request.num_output
    early = [row for row, path in enumerate(paths) if num_output + len(path) < params.min_tokens]
    ends = [*request.eos_token_ids, *params.stop_tokens]
    if not early or not ends:
        return
    rows, columns = (send(np.array(one, dtype=np.int64), logits.device) for one in (early, ends))
    places = rows.unsqueeze(1), columns
    if request.grammar is None:
        logits[places] = -torch.inf
    else:
        has_others = (logits[rows].index_fill(1, columns, -torch.inf) > -torch.inf).any(dim=1, keepdim=True)
        logits[places] = logits[places].masked_fill(has_others, -torch.inf)


def _penalise(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> None:
    """Apply the penalties to the tokens seen so far, which are few compared with the vocabulary."""
    params, counted = request.params, request.logits_state.token_counts
    repeats = params.repetition_penalty != 1.0
    if counted is None or counted.num_counted > request.num_output:
        counted = request.logits_state.token_counts = TokenCounts(request.prompt_ids if repeats else ())
    counted.add(request.token_ids[len(request.prompt_ids) + counted.num_counted :])
    along = [counted.along(path) for path in paths]
    # Rows, tokens and counts of all nodes in one transfer.
    rows = np.repeat(np.arange(len(paths)), [len(ids) for ids, _ in along])
    ids, counts = (np.concatenate(parts) for parts in zip(*along, strict=True))
    there = send(np.stack([rows, ids, counts.astype(np.int64)]), logits.device)
    places, occurrences = (there[0], there[1]), there[2].float()
    values = logits[places]
    if repeats:
        values *= torch.where(values > 0, 1.0 / params.repetition_penalty, params.repetition_penalty)
    # The product is rounded before it is subtracted, as on a device.
    values -= occurrences * params.frequency_penalty
    values -= (occurrences > 0).float() * params.presence_penalty
    logits[places] = values
