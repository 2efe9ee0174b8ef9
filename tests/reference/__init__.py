"""The slow twins: each says in the plainest way what a fast path of SpecInfer must say.

Nothing here uses SpecInfer's own code beyond `SamplingParams`, a cache, a batch or a tree.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specinfer.core.sampling import SamplingParams

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15

# ------------------------------------------------------------------------------------------- greedy


def greedy(model: Any, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy output of transformers' own `generate`."""
    prompt = torch.tensor([list(prompt_ids)])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    return output[0, len(prompt_ids) :].tolist()


@torch.no_grad()
def last_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[vocab] logits after these tokens: a whole pass, no cache."""
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1].float()


@torch.no_grad()
def last_logits_of_each(model: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """[texts, vocab] logits after each text: whole passes, one for all texts of a length."""
    found: dict[tuple[int, ...], Tensor] = {}
    for length in set(map(len, texts)):
        same = [tuple(text) for text in texts if len(text) == length]
        rows = model(input_ids=torch.tensor(same), use_cache=False).logits[:, -1].float()
        found |= zip(same, rows, strict=True)
    return torch.stack([found[tuple(text)] for text in texts])


# -------------------------------------------------------------------------------------------- noise


def splitmix64(x: int) -> int:
    """The finaliser of splitmix64, in integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def unsplitmix64(y: int) -> int:
    """Its inverse: the x with splitmix64(x) = y."""

    def unshift(value: int, bits: int) -> int:
        result = value
        for _ in range(64 // bits + 1):
            result = value ^ (result >> bits)
        return result

    y = unshift(y, 31)
    y = unshift((y * pow(0x94D049BB133111EB, -1, 2**64)) & _MASK, 27)
    return unshift((y * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & _MASK, 30)


def gumbel(seed: int, position: int, token: int) -> float:
    key = splitmix64(splitmix64((seed + _GAMMA) & _MASK) ^ ((position * _GAMMA) & _MASK))
    bits = splitmix64((key + (token + 1) * _GAMMA) & _MASK)
    uniform = ((bits >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(uniform))


# ------------------------------------------------------------------------------------------- logits


def probabilities(logits: Sequence[float]) -> list[float]:
    best = max(logits)
    if best == -math.inf:
        return [0.0] * len(logits)
    weights = [math.exp(x - best) for x in logits]
    return [w / sum(weights) for w in weights]


def process(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    legal: Callable[[Sequence[int]], Collection[int]] | None = None,
    forced: int | None = None,
) -> list[float]:
    """Logits after constraints, bias, penalties, temperature, min-p, top-k and top-p, token by token.

    `legal` tells the tokens that a grammar has after an output, `forced` the one that must end a thought.
    """
    out = list(logits)
    never = -math.inf
    for token in range(len(out)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            out[token] = never
        if legal is not None and token not in legal(output_ids):
            out[token] = never
        for word in bad_words:
            if [*output_ids, token][-len(word) :] == list(word):
                out[token] = never
        out[token] += params.logit_bias.get(token, 0.0)
    ends = {*eos_token_ids, *params.stop_token_ids}
    others = [x for token, x in enumerate(out) if token not in ends and x > never]
    if len(output_ids) < params.min_tokens and (others or legal is None):
        out = [never if token in ends else x for token, x in enumerate(out)]
    for token in range(len(out)):
        count = list(output_ids).count(token)
        if count or token in prompt_ids:
            factor = params.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= params.frequency_penalty * count
        if count:
            out[token] -= params.presence_penalty
    if forced is not None and (legal is None or forced in legal(output_ids)):
        out = [0.0 if token == forced else never for token in range(len(out))]
    if params.temperature == 0:
        return out
    out = [x / params.temperature for x in out]
    if params.min_p > 0:
        p = probabilities(out)
        out = [x if p[i] >= params.min_p * max(p) else never for i, x in enumerate(out)]
    if 0 < params.top_k < len(out):
        kth = sorted(out, reverse=True)[params.top_k - 1]
        out = [x if x >= kth else never for x in out]
    if params.top_p < 1:
        p = probabilities(out)
        kept, mass = set(), 0.0
        for token in sorted(range(len(out)), key=lambda t: -p[t]):
            if mass >= params.top_p:
                break
            kept.add(token)
            mass += p[token]
        out = [x if i in kept else never for i, x in enumerate(out)]
    return out


def forced_token(
    output_ids: Sequence[int], budget: int, end: str, end_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """The only token that may follow an output which begins within a thought and is legal so far, if there is one."""
    output = list(output_ids)
    if len(output) < budget or any(end in decode(output[:length]) for length in range(budget + 1)):
        return None
    spelled = (n for n in range(len(end_ids) - 1, 0, -1) if output[:budget][-n:] == list(end_ids[:n]))
    ending = list(end_ids)[next(spelled, 0) :]
    after = output[budget:]
    return ending[len(after)] if ending[: len(after)] == after and len(after) < len(ending) else None


def scores(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    seed: int,
    eos_token_ids: Sequence[int] = (),
    forced: int | None = None,
) -> list[float]:
    """Processed logits plus noise: the next token is their argmax."""
    out = process(logits, params, prompt_ids, output_ids, eos_token_ids, forced=forced)
    if params.temperature == 0:
        return out
    position = len(prompt_ids) + len(output_ids)
    return [x + gumbel(seed, position, token) if x > -math.inf else x for token, x in enumerate(out)]


def generate(
    model: Any,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    eos_token_ids: Sequence[int] = (),
    forced: Callable[[Sequence[int]], int | None] = lambda _: None,
) -> list[int]:
    """Coupled sampling of one request as a plain loop: one token, one whole pass. `forced` is as of `forced_token`."""
    output: list[int] = []
    assert params.max_tokens is not None
    while len(output) < params.max_tokens:
        logits = last_logits(model, [*prompt_ids, *output]).tolist()
        row = scores(logits, params, prompt_ids, output, seed, eos_token_ids, forced(output))
        token = row.index(max(row))
        output.append(token)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        if token in ends and len(output) >= params.min_tokens:
            break
    return output


def guess_losses(
    model: Any,
    token_ids: Sequence[int],
    num_prompt: int,
    start: int,
    params: SamplingParams,
    seed: int,
    *,
    chosen: bool,
    noisy: bool,
) -> list[float]:
    """How far a drafter is from guessing each token from `start` on, one whole pass for each.

    Args:
        chosen: Its guess is its best token, not a draw.
        noisy: The best one with the target's noise.
    """
    losses = []
    for place in range(start, len(token_ids)):
        logits = last_logits(model, token_ids[:place]).tolist()
        prompt_ids, output_ids = token_ids[:num_prompt], token_ids[num_prompt:place]
        if place < num_prompt:
            row = [x / (params.temperature or 1.0) for x in logits]
        elif chosen and noisy:
            row = scores(logits, params, prompt_ids, output_ids, seed)
        else:
            row = process(logits, params, prompt_ids, output_ids)
        if chosen:
            losses.append(float(max(range(len(row)), key=row.__getitem__) != token_ids[place]))
        else:
            losses.append(1.0 - probabilities(row)[token_ids[place]])
    return losses


# ------------------------------------------------------------------------------------ trees, attention


def walk(says: Mapping[tuple[int, ...], int]) -> tuple[int, ...]:
    """Tokens said, when the tree is the set of token paths `says` and says[path] follows each path."""
    path: tuple[int, ...] = ()
    while (*path, says[path]) in says:
        path = (*path, says[path])
    return (*path, says[path])


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """[heads, value_dim]: the last token of a path attends to the path, one head at a time, in double precision.

    `query` [heads, dim]; `keys`, `values` [path, kv_heads, dim]; key i stands at position i.
    """
    heads, kv_heads, length = query.shape[0], keys.shape[1], keys.shape[0]
    first = 0 if window is None else max(0, length - window)
    out = []
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = keys[first:, kv_head].double() @ query[head].double() * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if key_bias is not None:
            scores = scores + key_bias[head, first:length].double()
        weights = scores.exp()
        total = weights.sum() + (sinks[head].double().exp() if sinks is not None else 0.0)
        out.append(weights / total @ values[first:, kv_head].double())
    return torch.stack(out).to(values.dtype)


# ------------------------------------------------------------------------------------- quantization


def subtree_yield(
    parents: Sequence[int],
    makers: Sequence[frozenset[int]],
    path_prob: Sequence[float],
    path: Sequence[int],
    asked: frozenset[int],
    max_nodes: int,
    max_depth: int,
    least: float,
) -> tuple[int, int]:
    """(accepted guesses, nodes) of the best-first tree that a part of the drafters would have made.

    Grown node by node: of those that may be hung, the one worth most, and of equals the one that came first.

    Args:
        parents, makers, worth: Of the nodes 1, 2, ... of the large tree; `path` are its accepted ones.
    """
    depth = {0: 0}
    while len(depth) - 1 < max_nodes:
        open_nodes = [
            node
            for node, parent in enumerate(parents, 1)
            if node not in depth and parent in depth and makers[node - 1] & asked
            and depth[parent] < max_depth and path_prob[node - 1] >= least
        ]  # fmt: skip
        if not open_nodes:
            break
        best = max(open_nodes, key=lambda node: (path_prob[node - 1], -node))
        depth[best] = depth[parents[best - 1]] + 1
    return sum(node in depth for node in path), len(depth) - 1


# ------------------------------------------------------------------------------------------- tuning


def divergence(target: Sequence[float], drafter: Sequence[float], kept: Sequence[int]) -> float:
    """KL from one distribution to another over the tokens kept and, as one more outcome, all others."""
    outcomes = [(target[i], drafter[i]) for i in kept]
    others = [i for i in range(len(target)) if i not in kept]
    outcomes.append((sum(target[i] for i in others), sum(drafter[i] for i in others)))
    return sum(p * math.log(p / q) for p, q in outcomes if p > 0)


def token_weights(accepted: Sequence[Sequence[float]], depth: int, likely: float, least: float) -> list[float]:
    """What tokens count for the next drafter; `accepted[drafter][token]`."""
    num = len(accepted[0])
    weights, most = [0.0] * num, [0.0] * num
    for first in range(num):
        for last in range(first, min(first + depth, num)):
            nobody = math.prod(1 - math.prod(of_one[first : last + 1]) for of_one in accepted)
            for token in range(first, last + 1):
                weights[token] += likely ** (last - first) * nobody
                most[token] += likely ** (last - first)
    return [least + (1 - least) * weight / full for weight, full in zip(weights, most, strict=True)]


def residual(target: Sequence[float], drafters: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """What multi-step sampling goes on with after a guess of each drafter was refused, and the chance of that."""
    distribution, reached = list(target), 1.0
    for drafter in drafters:
        above = [max(p - q, 0.0) for p, q in zip(distribution, drafter, strict=True)]
        reached *= sum(above)
        if reached == 0:
            break
        distribution = [x / sum(above) for x in above]
    return distribution, reached


def together(accepted: Sequence[Sequence[float]], depth: int, likely: float) -> list[float]:
    """Of the chains that come to each token, the share that comes with a chain of a drafter before."""
    shares = []
    for token in range(len(accepted[0])):
        chains = [(first, likely ** (token - first)) for first in range(max(token - depth + 1, 0), token + 1)]
        with_one = [
            weight * (1 - math.prod(1 - math.prod(of_one[first:token]) for of_one in accepted) if first < token else 1)
            for first, weight in chains
        ]
        shares.append(sum(with_one) / sum(weight for _, weight in chains))
    return shares
