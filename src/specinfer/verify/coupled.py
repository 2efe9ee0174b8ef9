"""Coupled verification: the walk along the tokens that plain decoding emits.

Sources: greedy walk and naive sampling, SpecInfer (arXiv 2305.09781, Algorithm 2 and section 4.3); shared noise, Daliri
et al. (arXiv 2408.07978) and GLS (arXiv 2506.05632).
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from specinfer.core.tree import TokenTree
from specinfer.verify.acceptance import Acceptance

Place: TypeAlias = tuple[int, int]  # index of a tree, and a node of it


def verify_coupled(
    trees: Sequence[TokenTree], choose_tokens: Callable[[Sequence[Place]], Sequence[int]]
) -> list[Acceptance]:
    """Walk down every tree while the target's token at a node is one of its children, a level of all trees at a time.

    Args:
        trees: The trees.
        choose_tokens: Function from the current places of the walks to the target's token at each of them.
    """
    paths: list[list[int]] = [[] for _ in trees]
    last = [0] * len(trees)
    places = [(i, 0) for i in range(len(trees))]
    while places:
        below = []
        for (i, node), token in zip(places, choose_tokens(places), strict=True):
            child = trees[i].children[node].get(token)
            if child is None:
                last[i] = token
            else:
                paths[i].append(child)
                below.append((i, child))
        places = below
    return [Acceptance(tuple(path), token) for path, token in zip(paths, last, strict=True)]
