"""Transfer of verified tokens to a request: tokens, their log-probabilities, those of its prompt, and traces."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specinfer.core.clock import epoch_seconds
from specinfer.core.logprob import Logprob, by_token, with_texts
from specinfer.core.request import Request, Span
from specinfer.core.speculation import StepTrace, TracedNode
from specinfer.core.tree import TokenTree
from specinfer.ops import computing_alone
from specinfer.ops.cpu import transfers
from specinfer.ops.cpu.transfers import send
from specinfer.ops.token_scores import TokenScores, score_tokens
from specinfer.verify import Acceptance


class AskedLogprobs(NamedTuple):
    """Places of one request at which log-probabilities are asked for.

    Attributes:
        logits: [rows, vocab] float32, the model's unprocessed logits.
        places: A row of each place.
        tokens: The emitted token of each place.
        num_best: Number of best tokens.
        others: Further token ids, the same for all places.
    """

    logits: Tensor
    places: Sequence[int]
    tokens: Sequence[int]
    num_best: int
    others: Sequence[int] = ()

    @property
    def wanted(self) -> list[list[int]]:
        """The tokens of each place but the best ones."""
        return [[token, *self.others] for token in self.tokens]

    def scores(self) -> TokenScores:
        """Return the scores on the device of the logits, which nobody waits for."""
        device, count = self.logits.device, min(self.num_best, self.logits.shape[1])
        out = TokenScores.empty(len(self.places), 1 + len(self.others), count, device)
        score_tokens(self.logits, send(np.array(self.places), device), send(np.array(self.wanted), device), out)
        return out


@computing_alone()
def top_logprobs(asked: Sequence[AskedLogprobs]) -> list[list[dict[int, Logprob]]]:
    """Return log-probabilities before processing after each place of each request, without texts.

    They are of its token, then of the best, then of the others, by token id. Of tokens that are equally probable the
    first is the best. A device is waited for once.
    """
    arrays = iter(transfers.on_host([score for logprobs in asked for score in logprobs.scores()]))
    logprobs = []
    for own in asked:
        values, ranks, best, best_values = (next(arrays).tolist() for _ in TokenScores._fields)
        logprobs.append(list(map(by_token, own.wanted, values, ranks, best, best_values)))
    return logprobs


def emit(
    request: Request,
    tree: TokenTree,
    acceptance: Acceptance,
    logits: Tensor,
    logprobs: Sequence[dict[int, Logprob]] = (),
) -> int:
    """Append the accepted path and the next token, up to where the request ends; return the number of tokens.

    Args:
        request: The request that emits the tokens.
        tree: Its tree.
        acceptance: The accepted path and the next token.
        logits: [len(tree), vocab] the target's logits at each node.
        logprobs: Log-probabilities of each token, if they are known already: then `logits` is not read.
    """
    path = acceptance.path
    origins = tree.drafters() if path else []
    tokens = [*(tree.tokens[node] for node in path), acceptance.next_token]
    guessed_by = [*(origins[node] for node in path), None]
    if request.times.first_token is None:
        request.times.first_token = epoch_seconds()
    params, before = request.params, request.num_output
    if params.logprobs is not None:
        with request.scoring.measured(request.num_scored * len(tokens)):
            logprobs = logprobs or top_logprobs([asked_logprobs(request, tree, acceptance, logits)])[0]
            logprobs = [with_texts(known, request.decode) for known in logprobs]
    for i, (token, origin) in enumerate(zip(tokens, guessed_by, strict=True)):
        if params.logprobs is not None:
            request.logprobs.append(logprobs[i])
        request.append(token, origin)
        if request.is_finished:
            break
    num_generated = request.num_output - before
    num_accepted = min(num_generated, len(acceptance.path))  # fewer if the request ended inside the path
    request.speculation.record(tree.num_guessed, tree.max_depth, num_accepted, num_generated)
    return num_generated


def asked_logprobs(request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor) -> AskedLogprobs:
    """Return what a request that wants log-probabilities asks for in a step; arguments as for `emit`."""
    places, params = (0, *acceptance.path), request.params
    assert params.logprobs is not None
    tokens = [*(tree.tokens[node] for node in acceptance.path), acceptance.next_token]
    return AskedLogprobs(logits, places, tokens, params.logprobs, params.scored_tokens)


def step_logprobs(
    decoding: Sequence[tuple[Span, TokenTree]], accepted: Sequence[Acceptance], logits: Sequence[Tensor]
) -> list[list[dict[int, Logprob]]]:
    """Return the log-probabilities of each request, for which an accelerator is waited for once; none on a CPU.

    There the tokens are known when they are emitted, one request after the other.
    """
    logprobs = [list[dict[int, Logprob]]() for _ in decoding]
    if not decoding or not transfers.is_apart(logits[0]):
        return logprobs
    asking = [
        i
        for i, ((span, _), acceptance) in enumerate(zip(decoding, accepted, strict=True))
        if span.request.params.logprobs is not None and acceptance.next_token >= 0
    ]
    asked = [asked_logprobs(decoding[i][0].request, decoding[i][1], accepted[i], logits[i]) for i in asking]
    for i, own in zip(asking, top_logprobs(asked) if asked else (), strict=True):
        logprobs[i] = own
    return logprobs


def scores_prompt(span: Span) -> bool:
    """Return whether the rows of this span give log-probabilities of prompt tokens that the request asked for."""
    request = span.request
    return request.lacks_prompt_logprobs and len(request.prompt_logprobs) <= span.end


def note_prompt(span: Span, logits: Tensor) -> None:
    """Append the log-probabilities of prompt tokens. `logits` [span, vocab]: row i follows the span's token i."""
    request, count = span.request, span.request.params.prompt_logprobs
    assert count is not None
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)  # the first token has no prediction
    # Some of them are known already after a preemption, or from another output of the prompt.
    unknown = range(len(request.prompt_logprobs), min(span.end + 1, len(request.prompt_ids)))
    if unknown:
        tokens = request.prompt_ids[unknown.start : unknown.stop]
        places = [place - 1 - span.start for place in unknown]
        with request.scoring.measured(request.num_scored * len(unknown)):
            (logprobs,) = top_logprobs([AskedLogprobs(logits, places, tokens, count)])
            request.prompt_logprobs.extend([with_texts(known, request.decode) for known in logprobs])


def target_probs(tree: TokenTree, acceptance: Acceptance, logits: Tensor) -> list[float]:
    """Return the target's probabilities of each node's token after its parent; the first is that of the next token.

    Args:
        logits: [len(tree), vocab] before processing.
    """
    parents, tokens = list(tree.parents), list(tree.tokens)
    parents[0], tokens[0] = (0, *acceptance.path)[-1], acceptance.next_token
    places, chosen = (torch.tensor(ids, device=logits.device) for ids in (parents, tokens))
    probs: list[float] = torch.log_softmax(logits.float(), -1)[places, chosen].exp().tolist()
    return probs


def trace_step(
    request: Request, tree: TokenTree, acceptance: Acceptance, probs: Sequence[float], num_generated: int
) -> StepTrace:
    """Return the trace of a step of a request that just emitted `num_generated` tokens.

    Args:
        probs: What `target_probs` returns.
    """
    makers: list[list[str]] = [[] for _ in tree.tokens]
    confidence = [0.0] * len(tree)
    for draw in tree.draws:
        if draw.drafter not in makers[draw.node]:
            makers[draw.node].append(draw.drafter)
        confidence[draw.node] = max(confidence[draw.node], draw.confidence)
    path = acceptance.path[:num_generated]
    ended_inside = num_generated <= len(acceptance.path)
    nodes = [
        TracedNode(tree.tokens[i], tree.parents[i], tuple(makers[i]), confidence[i], probs[i], i in path)
        for i in range(1, len(tree))
    ]
    return StepTrace(
        time=epoch_seconds(),
        position=len(request.token_ids) - num_generated - 1,
        root=tree.tokens[0],
        nodes=tuple(nodes),
        path=tuple(path),
        next_token=None if ended_inside else acceptance.next_token,
        next_p=None if ended_inside else probs[0],
    )
