"""The trace of a step: the token tree of one request, and what became of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracedNode:
    """One draft token of a traced step.

    Attributes:
        parent: Index of its parent; 0 is the root, and the first node of `StepTrace.nodes` is 1.
        drafters: Names of the drafters that proposed it.
        q: Confidence as the drafters reported it, from 0 to 1.
        p: Target probability of the token after its parent, before processing.
    """

    token: int
    parent: int
    drafters: tuple[str, ...]
    q: float
    p: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The token tree of one request in one step, and the result of its verification.

    Attributes:
        time: Seconds since the epoch.
        position: Position of the root in prompt and output, from 0.
        nodes: Draft tokens in tree order, without the root.
        path: Indices of the accepted nodes.
        next_token: Token emitted by the target after the path, or None if the output ended inside the path.
    """

    time: float
    position: int
    root: int
    nodes: tuple[TracedNode, ...]
    path: tuple[int, ...]
    next_token: int | None
    next_p: float | None
