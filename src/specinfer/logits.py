"""From a model's logits to the law a token is chosen by: one function for target and drafters.

The order is vLLM's: constraints and biases, penalties, temperature, min-p, top-k and top-p. Each row of
logits belongs to one node of a token tree, so penalties are counted along that node's own path.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.sampling import SamplingParams


def process_logits(
    logits: Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    paths: Sequence[Sequence[int]],
    eos_token_ids: Sequence[int] = (),
) -> Tensor:
    """Processed logits of one request's nodes; their softmax is the law of the next token.

    Args:
        logits: [num_nodes, vocab] float32; not changed.
        paths: For each row, the guessed tokens from the root (left out) to the node.

    Returns:
        [num_nodes, vocab] float32, -inf where a token cannot be said. At temperature 0 only the argmax
        has a meaning.
    """
    if params.is_plain_greedy:
        return logits
    logits = logits.clone()
    _constrain(logits, params, len(output_ids), paths, eos_token_ids)
    if params.has_penalties:
        _penalise(logits, params, prompt_ids, output_ids, paths)
    if params.is_greedy:
        return logits
    logits /= params.temperature
    return _truncate(logits, params)


def _constrain(
    logits: Tensor,
    params: SamplingParams,
    num_output: int,
    paths: Sequence[Sequence[int]],
    eos_token_ids: Sequence[int],
) -> None:
    if params.allowed_token_ids is not None:
        allowed = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        allowed[list(params.allowed_token_ids)] = True
        logits.masked_fill_(~allowed, -torch.inf)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[:, ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    early = [row for row, path in enumerate(paths) if num_output + len(path) < params.min_tokens]
    ends = [*eos_token_ids, *params.stop_tokens]
    if early and ends:
        logits[torch.tensor(early).unsqueeze(1), torch.tensor(ends)] = -torch.inf


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


def _truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    if params.min_p > 0.0:
        # p >= min_p * p_max, said in logits: no softmax is needed.
        floor = logits.max(dim=-1, keepdim=True).values + torch.log(torch.tensor(params.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        mass_up_to = ascending.softmax(dim=-1).cumsum(dim=-1)
        drop = mass_up_to <= 1.0 - params.top_p
        drop[:, -1] = False  # the most probable token always stays
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    return logits
