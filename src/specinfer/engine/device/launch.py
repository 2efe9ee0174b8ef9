"""One step on a device: its requests, and its results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specinfer.core.logprob import Logprob
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Draw, TokenTree, TreeBudget
from specinfer.engine.device.launch_size import LaunchSize, TreeNames, write_budget
from specinfer.engine.device.logprobs import read_logprobs
from specinfer.engine.timer import Marks, StageClock
from specinfer.model.kv_cache import Slots
from specinfer.model.recurrent.states import Loan
from specinfer.verify import Acceptance


@dataclass(slots=True, eq=False)
class DeviceRequest:
    """A request that is served on the device."""

    request: Request
    loan: Loan  # rows for its states while it is served, if layers are recurrent
    num_in_flight: int = 0  # number of steps in flight with it
    read_by: set[str] = field(default_factory=set)  # have read all of its tokens, also those of steps in flight
    lost_by: set[str] = field(default_factory=set)  # drafters that cannot read it
    has_left: bool = False  # results of steps in flight are dropped
    num_steps: int = 0  # launched with it
    num_recomputed: int = 0  # most tokens that the next step may have to recompute before its root

    def next_state_row(self) -> int:
        """Count a step, and return the row that it writes its state to."""
        self.num_steps += 1
        return self.loan.rows[self.num_steps % 2]

    def span(self) -> Span:
        """Return its part in a step, from the tokens that the host knows."""
        end = len(self.request.token_ids)
        return Span(self.request, end - 1, end)


class DraftedTree(NamedTuple):
    """The tree of one drafter, with the proposals of lookups and of the drafters before it."""

    tokens: list[int]  # token ids, the root's first
    parents: list[int]
    confidence: list[float]  # of the drafter; negative for what others alone proposed

    def of(self, drafter: str | None) -> TokenTree:
        """Return the tree with the draws of this drafter; None for none."""
        draws = [
            Draw(node, drafter, None, self.confidence[node])
            for node in range(1, len(self.tokens))
            if drafter is not None and self.confidence[node] >= 0
        ]
        return TokenTree(tuple(self.tokens), (-1, *self.parents[1:]), tuple(draws))


class Answer(NamedTuple):
    """The result of a step for one request."""

    trees: list[DraftedTree]  # of each drafter; the last one is that of all
    path: list[int]
    next_token: int  # negative if no token can be emitted
    draft_columns: list[list[int]]  # of each drafter: columns of the tokens that it computed and keeps, in order
    uniforms: int | None = None  # state of the random numbers, for rules that use them

    def tree(self, drafters: Sequence[str | None], guesses: TokenTree | None = None) -> TokenTree:
        """Return the tree of all with its draws.

        Args:
            drafters: Names of the models that drafted, or None in place of one that did not.
            guesses: What lookups proposed.
        """
        *before, last = [tree.of(name) for tree, name in zip(self.trees, drafters or [None], strict=True)]
        proposed = before if guesses is None else [guesses, *before]
        draws = [draw for tree in proposed for draw in _draws_in(tree, last)]
        return TokenTree(last.tokens, last.parents, (*draws, *last.draws)) if draws else last

    @property
    def tokens(self) -> list[int]:
        return self.trees[-1].tokens

    @property
    def emitted(self) -> list[int]:
        """The tokens of the accepted path and the one that follows."""
        return [*(self.tokens[node] for node in self.path), self.next_token]

    def acceptance(self) -> Acceptance:
        return Acceptance(tuple(self.path), self.next_token)


def _draws_in(part: TokenTree, tree: TokenTree) -> list[Draw]:
    """Return the draws of a part of a tree as those of the whole tree, without those that are not in it."""
    place = {0: 0}  # node of the part -> node of the tree
    for node in range(1, len(part)):
        above = place.get(part.parents[node])
        if above is not None and (child := tree.children[above].get(part.tokens[node])) is not None:
            place[node] = child
    return [draw._replace(node=place[draw.node]) for draw in part.draws if draw.node in place]


class Guess(NamedTuple):
    """The proposal of lookups for a request, and the probability that the path to each node but the root is right."""

    tree: TokenTree
    path_prob: npt.NDArray[np.float32]


class Answers:
    """The results of a launch, in a buffer that is overwritten by the second next launch of its size."""

    def __init__(self, marks: Marks, results: dict[str, npt.NDArray[Any]], num_models: int) -> None:
        self._marks, self._results, self._num_models = marks, results, num_models

    def wait(self) -> tuple[float, float]:
        """Wait for the results; return the seconds that the draft loop and the target took on the device."""
        self._marks.wait()
        draft, target = self._marks.seconds()
        return (draft, target) if self._num_models else (0.0, draft + target)

    def path_prob(self, rows: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the summed path probabilities of the nodes of each level: [rows, levels]."""
        path_prob: npt.NDArray[np.float32] = self._results["path_prob_float32"][list(rows)]
        return path_prob[path_prob[:, :1].any(axis=1)] if len(rows) else path_prob

    def of_row(self, row: int) -> Answer:
        results = self._results
        lengths, states = [int(of_rows[row]) for of_rows in results["draft_lengths"]], results["uniforms"]
        return Answer(
            trees=[self._tree(number, row) for number in range(max(self._num_models, 1))],
            path=results["path"][row, : max(int(results["lengths"][row]), 0)].tolist(),
            next_token=int(results["next"][row]),
            draft_columns=[
                [0, *path[row, :length].tolist()] if length >= 0 else []
                for path, length in zip(results["draft_path"], lengths, strict=True)
            ],
            uniforms=int(states[row].view(np.uint64)[0]) if len(states) else None,
        )

    def tree(self, row: int) -> TokenTree:
        """Return the tree of all drafters, without draws; it may be read before the verification."""
        return self._tree(max(self._num_models, 1) - 1, row).of(None)

    def _tree(self, number: int, row: int) -> DraftedTree:
        names = TreeNames.from_number(number, max(self._num_models, 1))
        size = int(self._results[names.sizes][row])
        return DraftedTree(
            *(self._results[name][row, :size].tolist() for name in (names.tokens, names.parents, names.confidence))
        )

    def probs(self, row: int) -> list[float]:
        """Return what `emission.target_probs` returns for the tree of all."""
        size = int(self._results[TreeNames.from_number(0, 1).sizes][row])
        probs: list[float] = np.exp(self._results["node_logprob_float32"][row, :size]).tolist()
        return probs

    def logprobs(self, row: int, tokens: Sequence[int], params: SamplingParams) -> list[dict[int, Logprob]]:
        """Return the log-probabilities that a request asks for at each of its emitted tokens, by token id."""
        return [] if params.logprobs is None else read_logprobs(self._results, row, tokens, params)


@dataclass(slots=True)
class Launch:
    """A step that is planned, or was launched and has not been read."""

    device_requests: list[DeviceRequest]  # by row
    budgets: list[TreeBudget]  # by row
    size: LaunchSize
    num_read: int
    clock: StageClock
    slots: list[Slots] = field(default_factory=list)  # by row: each [size.shape.num_slots], those of the nodes first
    # Of each drafter, by row: each [columns], or None without drafts.
    draft_slots: list[list[Slots | None]] = field(default_factory=list)
    guesses: list[Guess] = field(default_factory=list)  # by row; none without lookups
    answers: Answers | None = None
    state_rows: list[int] = field(default_factory=list)  # by row: the row of the pool that its state is written to

    @property
    def requests(self) -> list[Request]:
        return [served.request for served in self.device_requests]

    def write(self, inputs: dict[str, npt.NDArray[Any]], drafters: Sequence[str]) -> None:
        """Write the inputs of the programs, but for those of adapters.

        Args:
            drafters: Names of the models that may draft.
        """
        inputs["num"][0] = len(self.device_requests)
        for row, (slots, budget) in enumerate(zip(self.slots, self.budgets, strict=True)):
            inputs["slots"][row] = slots[: self.size.num_nodes]
            for number, name in enumerate(drafters):
                inputs["max_nodes"][number, row] = budget.max_nodes if budget.asks(name) else 0
            write_budget(inputs, row, budget)
        inputs["guess_tokens"][:], inputs["guess_parents"][:], inputs["guess_float32"][:] = 0, -1, -1.0
        for row, (tree, path_prob) in enumerate(self.guesses):
            inputs["guess_tokens"][row, : tree.num_guessed] = tree.tokens[1:]
            inputs["guess_parents"][row, : tree.num_guessed] = np.asarray(tree.parents[1:], dtype=np.int32) - 1
            inputs["guess_float32"][row, : tree.num_guessed] = path_prob
        inputs["drafts"][:] = 0
        for number, of_rows in enumerate(self.draft_slots):
            for row, columns in enumerate(of_rows):
                if columns is not None:
                    inputs["draft_slots"][number, row, : len(columns)] = columns
                    inputs["drafts"][number, row] = 1

    @property
    def results(self) -> Answers:
        assert self.answers is not None, "it was launched"
        return self.answers

    @property
    def best_first_rows(self) -> list[int]:
        """The rows of best-first trees. Nodes of fixed expansions count as certain while they grow."""
        drafted = [any(slots is not None for slots in of_row) for of_row in zip(*self.draft_slots, strict=True)]
        both = enumerate(zip(drafted, self.budgets, strict=False))
        return [row for row, (is_drafted, budget) in both if is_drafted and not budget.widths]
