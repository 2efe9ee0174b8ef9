"""Shapes of token trees, as the `tree` option names them."""

from dataclasses import dataclass

MAX_TREE_NODES = 1024
BEST_FIRST = "best-first"
BEST_FIRST_DEPTH = 8  # the depth of the paper's trees
_TREE_FORMS = 'use "auto", "off", children per level such as "1,1,3,1", or "best-first:32" (nodes, or nodes:depth)'


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The parsed `tree` option: a fixed expansion, best first within limits, or neither of them for "off"."""

    widths: tuple[int, ...] = ()
    max_nodes: int = 0
    max_depth: int = 0
    is_auto: bool = False

    @property
    def is_off(self) -> bool:
        return not (self.is_auto or self.max_nodes)


def parse_tree(tree: str) -> TreeShape:
    """Return the tree shape that a `tree` option stands for.

    Raises:
        ValueError: The option has none of the forms, or the tree is too large.
    """
    if tree == "auto":
        return TreeShape(is_auto=True)
    if tree == "off":
        return TreeShape()
    if not isinstance(tree, str):
        raise ValueError(f"tree: {tree!r} is not a string; {_TREE_FORMS}")
    if tree.startswith(f"{BEST_FIRST}:"):
        return _parse_best_first(tree)
    parts = [part.strip() for part in tree.strip().removeprefix("<").removesuffix(">").split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(f"tree: {tree[:60]!r} is not understood; {_TREE_FORMS}")
    widths = tuple(map(parse_count, parts))
    if 0 in widths:
        raise ValueError(f'tree: a level of {tree[:60]!r} has no children; each needs at least 1, or use "off"')
    nodes, level = 0, 1
    for width in widths:
        level *= width
        nodes += level
        if nodes > MAX_TREE_NODES:
            raise ValueError(f"tree: {tree[:60]!r} has more than {MAX_TREE_NODES} nodes; make it smaller")
    return TreeShape(widths, nodes, len(widths))


def _parse_best_first(tree: str) -> TreeShape:
    parts = [part.strip() for part in tree.removeprefix(f"{BEST_FIRST}:").split(":")]
    if len(parts) > 2 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(f"tree: {tree[:60]!r} is not understood; {_TREE_FORMS}")
    nodes, depth = parse_count(parts[0]), parse_count(parts[1]) if len(parts) == 2 else BEST_FIRST_DEPTH
    if not 1 <= nodes <= MAX_TREE_NODES:
        raise ValueError(f'tree: {tree[:60]!r} must have from 1 to {MAX_TREE_NODES} nodes, or use "off"')
    if not 1 <= depth <= MAX_TREE_NODES:
        raise ValueError(f"tree: the depth of {tree[:60]!r} must be from 1 to {MAX_TREE_NODES}")
    return TreeShape((), nodes, min(depth, nodes))


def parse_count(digits: str) -> int:
    """Return the number, or 10**6 (too large for any tree) for a long one, since Python limits the digits it parses."""
    return int(digits[-6:]) if not digits[:-6].strip("0") else 10**6
