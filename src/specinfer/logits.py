"""From a model's logits to the law a token is chosen by, for target and drafters.

Two halves. `adjust` needs the history: what may not be said (allowed tokens, grammar, bad words, ends that come
too early), biases and penalties. `truncate` needs the scores alone: temperature, min-p, top-k and top-p. The order
is vLLM's. Each row of logits belongs to one node of a token tree, and its history runs along that node's own path.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.request import Request
from specinfer.sampling import SamplingParams


def is_adjusted(request: Request) -> bool:
    """Whether `adjust` may change anything."""
    return request.params.adjusts_logits or request.grammar is not None or bool(request.bad_words_ids)


def process_logits(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> Tensor:
    """Processed logits of one request's nodes; their softmax is the law of the next token.

    Args:
        logits: [num_nodes, vocab] float32; not changed.
        paths: For each row, the guessed tokens from the root (left out) to the node.

    Returns:
        [num_nodes, vocab] float32, -inf where a token cannot be said. At temperature 0 only the argmax
        has a meaning.
    """
    return truncate(adjust(logits, request, paths), request.params)


def adjust(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> Tensor:
    """Logits after constraints, biases and penalties.

    Args:
        logits: [num_nodes, vocab] float32; not changed.
        paths: For each row, the guessed tokens from the root (left out) to the node.

    Returns:
        [num_nodes, vocab] float32, -inf where a token cannot be said; the input itself if nothing applies.
    """
    params = request.params
    if not is_adjusted(request):
        return logits
    logits = logits.clone()
    output_ids = request.output_ids  # a copy each time it is asked for
    if params.allowed_token_ids is not None:
        if request.forbidden is None:  # made once: there may be as many as the vocabulary has
            request.forbidden = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
            request.forbidden[list(params.allowed_token_ids)] = False
        logits.masked_fill_(request.forbidden, -torch.inf)
    if request.grammar is not None:
        legal = torch.stack([request.grammar.mask(path) for path in paths])
        logits.masked_fill_(~legal.to(logits.device), -torch.inf)
    if request.bad_words_ids:
        _forbid_bad_words(logits, request.bad_words_ids, output_ids, paths)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[:, ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if len(output_ids) < params.min_tokens:
        _hold_back_ends(logits, request, paths)
    if params.has_penalties:
        _penalise(logits, params, request.prompt_ids, output_ids, paths)
    return logits


def truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits after temperature, min-p, top-k and top-p; the input itself at temperature 0.

    Args:
        logits: [rows, k] float32 of all tokens or of some; not changed.

    Returns:
        [rows, k] float32, -inf where a token is dropped.
    """
    if params.is_greedy:
        return logits
    if params.temperature != 1.0:
        logits = logits / params.temperature
    if params.min_p > 0.0:
        # p >= min_p * p_max, said in logits: no softmax is needed.
        floor = logits.max(dim=-1, keepdim=True).values + torch.log(torch.tensor(params.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        best, order = _most_probable(logits.softmax(dim=-1), params.top_p)
        drop = functional.pad(best.cumsum(dim=-1)[:, :-1] >= params.top_p, (1, 0))  # the best token always stays
        kept = logits.gather(-1, order).masked_fill(drop, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, order, kept)
    return logits


def _most_probable(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities in descending order and their tokens, [rows, some]: at least those that top-p keeps."""
    count = probs.shape[-1]
    if probs.device.type == "cpu":  # elsewhere sorting costs less than waiting for a count
        # All the less probable ones together have no more than what is dropped: they need not be sorted.
        is_candidate = probs >= (1.0 - top_p) / count
        count = max(int(is_candidate.sum(dim=-1).max()), 1)
    return probs.topk(count, dim=-1)


def top_logprobs(row: Tensor, token: int, count: int, others: Sequence[int] = ()) -> dict[int, float]:
    """Token id -> log-probability, before any processing: this token first, then the best, then the others asked for.

    Args:
        row: [vocab] float32, logits as the model gave them.
    """
    logprobs = torch.log_softmax(row, dim=-1)
    best = logprobs.topk(min(count, logprobs.shape[-1]))
    found = {token: logprobs[token].item()} | dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    if others:
        found |= dict(zip(others, logprobs[list(others)].tolist(), strict=True))
    return found


def _forbid_bad_words(
    logits: Tensor,
    words: Sequence[Sequence[int]],
    output_ids: Sequence[int],
    paths: Sequence[Sequence[int]],
) -> None:
    """The last token of a word, wherever the output along the path ends with the others."""
    reach = max(map(len, words)) - 1
    recent = list(output_ids[max(0, len(output_ids) - reach) :])
    for row, path in enumerate(paths):
        history = [*recent, *path]
        ends = [word[-1] for word in words if _ends_with(history, word[:-1])]
        if ends:
            logits[row, torch.tensor(ends, device=logits.device)] = -torch.inf


def _ends_with(history: Sequence[int], start: Sequence[int]) -> bool:
    if not start:
        return True
    # Most words are told apart by one token.
    return bool(history) and history[-1] == start[-1] and list(history[-len(start) :]) == list(start)


def _hold_back_ends(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> None:
    """No end before `min_tokens`, unless the grammar allows nothing else: then it has the last word."""
    params, num_output = request.params, request.num_output
    early = [row for row, path in enumerate(paths) if num_output + len(path) < params.min_tokens]
    ends = torch.tensor([*request.eos_token_ids, *params.stop_tokens], dtype=torch.int64, device=logits.device)
    if not early or not len(ends):
        return
    rows = torch.tensor(early, device=logits.device).unsqueeze(1)
    if request.grammar is not None:
        others = logits[rows.squeeze(1)].index_fill(1, ends, -torch.inf)
        rows = rows[(others > -torch.inf).any(dim=1)]
    logits[rows, ends] = -torch.inf


def _penalise(
    logits: Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    paths: Sequence[Sequence[int]],
) -> None:
    vocab = logits.shape[-1]
    said = torch.bincount(torch.tensor(output_ids, dtype=torch.int64), minlength=vocab)
    counts = said.float().repeat(len(paths), 1).to(logits.device)  # [num_nodes, vocab]
    for row, path in enumerate(paths):
        if path:
            ids = torch.tensor(path, device=logits.device)
            counts[row].index_add_(0, ids, torch.ones(len(path), device=logits.device))
    if params.repetition_penalty != 1.0:
        seen = counts > 0
        seen[:, list(prompt_ids)] = True
        scale = torch.where(logits > 0, 1.0 / params.repetition_penalty, params.repetition_penalty)
        logits.mul_(torch.where(seen, scale, 1.0))
    logits.sub_(counts, alpha=params.frequency_penalty)
    logits.sub_((counts > 0).float(), alpha=params.presence_penalty)
