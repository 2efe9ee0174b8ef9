"""The mask and the positions of a chain with a token tree on its last token, made in one native call."""

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import Ints
from specinfer.core.tree import TokenTree
from specinfer.ops.cpu.library import address, library


def tree_mask(num_chain: int, tree: TokenTree, start: int) -> tuple[npt.NDArray[np.bool_], Ints]:
    """Return the mask of chain and drafted nodes, [tokens, tokens], and the positions of these tokens.

    A token sees the chain up to itself, its ancestors and itself. The tree's root is the last token of the chain.

    Args:
        start: Position of the chain's first token.
    """
    num_new = num_chain + tree.num_guessed
    visible = np.zeros((num_new, num_new), dtype=np.bool_)
    loaded = library()
    parents, positions = tree.arrays.parents, np.empty(num_new, dtype=np.int64)
    loaded.specinfer_tree_mask(address(parents), len(parents), num_chain, start, address(visible), address(positions))
    return visible, positions
