"""A token tree on a terminal: the accepted path bold, rejected tokens dim."""

from collections.abc import Callable

from rich.text import Text
from rich.tree import Tree

from specinfer.cli.recording import EmittedToken, Node, Step
from specinfer.cli.screen import TARGET_COLOR, printable

_MARKS = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"})


def render_tree(step: Step, color: Callable[[str], str]) -> Tree:
    """Return the tree of one step, with the token that the target generated after it.

    Args:
        color: Returns the colour of a drafter.
    """
    tree = Tree(Text(_visible(step.root)), guide_style="dim")
    branches, accepted = [tree], set(step.path)
    by_parent: dict[int, list[int]] = {}
    for place, node in enumerate(step.nodes, start=1):
        by_parent.setdefault(node.parent, []).append(place)
        label = _label(node, color(next(iter(node.drafters), "?")), is_accepted=place in accepted)
        branches.append(Tree(label, guide_style="bold" if place in accepted else "dim"))
    last = step.path[-1] if step.path else 0
    for parent, places in by_parent.items():
        # The accepted path comes first.
        places.sort(key=lambda place: place not in accepted)
        branches[parent].children += [branches[place] for place in places]
    if step.next is not None:
        label = Text.assemble(
            (_visible(step.next), f"bold {TARGET_COLOR}"), (_numbers("target", None, step.next.p), TARGET_COLOR)
        )
        branches[last].children.insert(0, Tree(label))
    return tree


def _label(node: Node, color: str, *, is_accepted: bool) -> Text:
    weight = "bold" if is_accepted else "dim"
    numbers = _numbers("+".join(node.drafters) or "?", node.q, node.p)
    return Text.assemble((_visible(node), f"{weight} {color}"), (numbers, "" if is_accepted else "dim"))


def _numbers(label: str, q: float | None, p: float | None) -> str:
    shown = f"  {label}"
    shown += "" if q is None else f"  q {q:.2f}"
    return shown + ("" if p is None else f"  p {p:.2f}")


def _visible(node: Node | EmittedToken) -> str:
    shown = node.text.translate(_MARKS)
    return printable(shown) if shown else f"#{node.token}"
