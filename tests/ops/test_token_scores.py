"""Ranks and log-probabilities of tokens in rows of logits."""

import time

import pytest
import torch

from specinfer.ops.token_scores import TokenScores, score_tokens


def scored(logits: torch.Tensor, tokens: torch.Tensor, count: int = 0) -> TokenScores:
    out = TokenScores.empty(*tokens.shape, count, logits.device)
    score_tokens(logits, torch.arange(len(tokens)), tokens, out)
    return out


@pytest.mark.parametrize("num_tokens", [1, 5, 6, 200])
@pytest.mark.parametrize("steps", [1, 8, 10**6])
def test_a_rank_counts_the_tokens_that_are_more_probable(num_tokens: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = (torch.rand((3, 500), generator=generator) * steps).round()  # few steps: many are equally probable
    logits[1, ::7] = -torch.inf
    tokens = torch.randint(500, (3, num_tokens), generator=generator)
    expected = (logits[:, None, :] > logits.gather(1, tokens)[:, :, None]).sum(dim=2) + 1
    assert torch.equal(scored(logits, tokens).ranks, expected)


def test_ranks_of_many_tokens_cost_little_more_than_those_of_few() -> None:
    logits, tokens = torch.randn((1, 50_000)), torch.arange(129)[None]

    def seconds(count: int) -> float:
        begun = time.process_time()
        scored(logits, tokens[:, :count])
        return time.process_time() - begun

    few, many = (min(seconds(count) for _ in range(30)) for count in (1, 129))
    assert many < 15 * few, "counting for each token took 50 times as long"
