"""The programs of a step on a device: draft loop, and verification with walk and commit, over static buffers.

Rows are those of `DeviceState`. All shapes are fixed: a request's tree has a slot for each node. Unused nodes see their
ancestors but are seen by none, and their slots are freed. Requests beyond `num` have slots -1 and lengths 0, and
nothing is written for them, so that a program can be run, and captured, without any request.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.engine.device.growth import DraftShape, Frontier, Grown, Limits, Sampling, grow
from specinfer.engine.device.state import DeviceState, Exchange
from specinfer.kernels import tree_ops
from specinfer.kernels.tree_layout import TreeLayout, pack_bits
from specinfer.model.batch import ForwardBatch
from specinfer.model.forward import forward
from specinfer.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class LaunchSize:
    """The fixed sizes of a step: rows of requests, and the shape of their trees, or None for plain decoding."""

    num_rows: int
    shape: DraftShape | None

    @property
    def num_nodes(self) -> int:
        """Nodes of a tree, with the root."""
        return 1 + (self.shape.num_nodes if self.shape else 0)

    @property
    def max_depth(self) -> int:
        return self.shape.num_levels if self.shape else 1

    @property
    def num_columns(self) -> int:
        return self.shape.num_columns if self.shape else 0

    def holds(self, other: "LaunchSize") -> bool:
        """Return whether a step of the other size can run in this one, with the same trees."""
        if self.shape is None or other.shape is None:
            return self.shape is other.shape and self.num_rows >= other.num_rows
        return self.num_rows >= other.num_rows and self.shape.holds(other.shape)

    def inputs(self, device: torch.device) -> Exchange:
        rows, levels = self.num_rows, self.shape.num_levels if self.shape else 0
        return Exchange(
            {
                "num": (1,),
                "slots": (rows, self.num_nodes),
                "draft_slots": (rows, self.num_columns),
                "drafts": (rows,),  # 1 if the drafter has read the request
                "max_nodes": (rows,),
                "max_depth": (rows,),
                "widths": (rows, levels),
                "least_float32": (rows,),
            },
            device,
        )

    def results(self, device: torch.device) -> Exchange:
        rows, levels = self.num_rows, self.shape.num_levels if self.shape else 0
        return Exchange(
            {
                "lengths": (rows,),  # lengths of paths; -1 if no token was emitted
                "next": (rows,),
                "path": (rows, self.max_depth),
                "draft_lengths": (rows,),  # number of columns that the drafter keeps, without the first
                "draft_path": (rows, self.max_depth + 1),
                "sizes": (rows,),
                "tokens": (rows, self.num_nodes),
                "parents": (rows, self.num_nodes),
                "confidence_float32": (rows, self.num_nodes),
                "worth_float32": (rows, levels),
            },
            device,
        )


@dataclass(frozen=True, slots=True)
class _Trees:
    """The trees of a launch, passed from the first program to the second."""

    grown: Grown

    @classmethod
    def empty(cls, size: LaunchSize, device: torch.device) -> "_Trees":
        rows, nodes, levels = size.num_rows, size.num_nodes, size.shape.num_levels if size.shape else 0

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        with torch.inference_mode(mode=False):
            grown = Grown(
                zeros(rows, nodes), zeros(rows, nodes), zeros(rows) + 1, zeros(rows, nodes, dtype=torch.float32),
                zeros(rows, nodes), zeros(rows, levels, dtype=torch.float32),
            )  # fmt: skip
        return cls(grown)

    def take(self, grown: Grown) -> None:
        mine = self.grown
        for place, value in (
            (mine.tokens, grown.tokens), (mine.parents, grown.parents), (mine.sizes, grown.sizes),
            (mine.confidence, grown.confidence), (mine.columns, grown.columns), (mine.path_prob, grown.path_prob),
        ):  # fmt: skip
            place.copy_(value)


class Programs:
    """The two programs of one size, and their inputs and results.

    Args:
        size: Rows and tree shape of the step.
        state: Rows of the requests.
        target: The runner of the target.
        drafter: The runner of the drafter; None only with a size without a tree.
        to_target: Function that maps drafter logits [rows, drafter_vocab] to the target's vocabulary.
    """

    def __init__(
        self,
        size: LaunchSize,
        state: DeviceState,
        target: ModelRunner,
        drafter: ModelRunner | None,
        to_target: Callable[[Tensor], Tensor],
    ) -> None:
        assert drafter is not None or size.shape is None
        self.size = size
        device = target.loaded.device
        self.inputs, self.results = size.inputs(device), size.results(device)
        self._state, self._target, self._drafter, self._to_target = state, target, drafter, to_target
        self._trees = _Trees.empty(size, device)
        self._numbers = torch.arange(size.num_rows + 1, device=device)

    @property
    def _is_row(self) -> Tensor:
        """[rows], True for rows that have a request."""
        return self._numbers[:-1] < self.inputs.there["num"]

    def _starts(self, each: int) -> Tensor:
        """Return the start of each request's tokens, [rows + 1] int32, with this many tokens for each."""
        return torch.minimum(self._numbers, self.inputs.there["num"]).mul(each).int()

    # ------------------------------------------------------------------------------------- draft loop

    def draft(self) -> None:
        """Grow the trees. The drafter reads the root, and the token before it if it has not yet."""
        shape, drafter, state, rows = self.size.shape, self._drafter, self._state, self.size.num_rows
        assert shape is not None
        assert drafter is not None
        inputs = self.inputs.there
        known, num_left, has_two = state.known[:rows].long(), state.num_left[:rows], state.has_two[:rows]
        drafts = self._is_row & (num_left > 0) & (inputs["drafts"] > 0)
        last = drafter.loaded.max_position - 1
        limits = Limits(
            torch.where(drafts, inputs["max_nodes"], 0).long(),
            # The token after the path needs no draft token.
            torch.minimum(torch.minimum(inputs["max_depth"].long(), num_left - 1), last - known),
            inputs["least_float32"],
            inputs["widths"].long(),
        )
        distribution = Sampling(state.seeds[:rows], state.temperatures[:rows], known)
        slots = torch.where(drafts.unsqueeze(1), inputs["draft_slots"], -1)
        first_two = state.draft_known[:rows].long().unsqueeze(1) + torch.arange(2, device=known.device)
        below = [(known + i).unsqueeze(1).expand(-1, width) for i, width in enumerate(shape.frontiers) if i]
        places = torch.cat([first_two, *below], dim=1).clamp(max=last)  # [rows, columns] positions

        def score(frontier: Frontier) -> Tensor:
            level, width = frontier.level, frontier.tokens.shape[1]
            first = shape.first_columns[level]
            if level == 0:
                root, before = state.roots[:rows], state.before[:rows]
                pair = [torch.where(has_two, before, root), torch.where(has_two, root, 0)]
                tokens, width = torch.stack(pair, dim=1), 2
                wanted = self._numbers[:-1] * 2 + has_two
            else:
                tokens = frontier.tokens
                wanted = torch.arange(rows * width, device=tokens.device)
            end = first + width
            layout = TreeLayout(
                slot_table=state.draft_slots[:rows],
                prefix_lens=state.draft_known[:rows],
                starts=self._starts(width),
                node_slots=slots[:, :end].clamp(min=0),
                node_positions=places[:, :end].int(),
                node_lens=drafts.int() * end,
                visible=pack_bits(frontier.sees.flatten(0, 1)) if level else self._chain_bits(rows * width),
                positions=places[:, first:end].flatten().int(),
                max_new=width,
                is_chain=level == 0,
            )
            batch = ForwardBatch(
                token_ids=tokens.clamp(max=drafter.loaded.vocab_size - 1).flatten(),
                positions=places[:, first:end].flatten(),
                slots=slots[:, first:end].flatten().long(),
                logit_rows=wanted,
                pieces=(),
                store=drafter.tensors,
                allows_native=False,
                layout=layout,
            )
            logits: Tensor = self._to_target(forward(drafter.loaded.model, batch)).unflatten(0, (rows, -1))
            return logits

        self._trees.take(grow(shape, state.roots[:rows], has_two, score, distribution, state.chances, limits))

    def _chain_bits(self, num_tokens: int) -> Tensor:
        return torch.zeros((num_tokens, 1), dtype=torch.int32, device=self._numbers.device)

    # ----------------------------------------------------------------------------------- verification

    def verify(self) -> None:
        """Run one target pass over all trees, walk down each, and list the slots of accepted tokens."""
        state, rows, nodes = self._state, self.size.num_rows, self.size.num_nodes
        trees, inputs, loaded = self._trees.grown, self.inputs.there, self._target.loaded
        num_left = state.num_left[:rows]
        is_live = self._is_row & (num_left > 0)
        tokens = torch.cat([state.roots[:rows].unsqueeze(1), trees.tokens[:, 1:]], dim=1)
        ancestry = self._ancestry(trees.parents)
        positions = state.known[:rows].long().unsqueeze(1) + ancestry.sum(dim=2) - 1
        # Nodes of a request that may emit no more may lie beyond the model's last position, for which it has no values.
        positions = positions.clamp(max=loaded.max_position - 1)
        slots = torch.where(self._is_row.unsqueeze(1), inputs["slots"], -1)
        starts = self._starts(nodes)
        layout = TreeLayout(
            slot_table=state.slots[:rows],
            prefix_lens=state.known[:rows],
            starts=starts,
            node_slots=slots.clamp(min=0),
            node_positions=positions.int(),
            node_lens=self._is_row.int() * nodes,
            visible=pack_bits(ancestry.flatten(0, 1)),
            positions=positions.flatten().int(),
            max_new=nodes,
            is_chain=nodes == 1,
        )
        batch = ForwardBatch(
            token_ids=tokens.flatten(),
            positions=positions.flatten(),
            slots=slots.flatten().long(),
            logit_rows=torch.arange(rows * nodes, device=tokens.device),
            pieces=(),
            store=self._target.tensors,
            allows_native=False,
            layout=layout,
        )
        logits = forward(loaded.model, batch)
        choices = tree_ops.choose(
            logits,
            state.seeds[:rows].repeat_interleave(nodes),
            positions.flatten() + 1,
            state.temperatures[:rows].repeat_interleave(nodes),
        )
        sizes = torch.where(is_live, trees.sizes, 0)
        path, lengths, following = tree_ops.walk(
            choices, starts[:-1], tokens, trees.parents, sizes, max_depth=self.size.max_depth
        )
        tree_ops.commit(state.slots[:rows], state.known[:rows], slots, path, lengths)
        self._write_results(tokens, sizes, path, lengths, following)
        if self.size.shape is not None:
            self._keep_drafted(tokens, is_live, path, lengths)
        state.roots[:rows].copy_(torch.where(is_live, following.clamp(min=0), state.roots[:rows]))
        left = torch.where(following < 0, 0, num_left - lengths - 1)  # a request with invalid logits ends here
        state.num_left[:rows].copy_(torch.where(is_live, left, num_left))

    def _ancestry(self, parents: Tensor) -> Tensor:
        """Return the ancestor mask: [rows, nodes, nodes] bool, True if the second node is the first or its ancestor."""
        own = torch.eye(self.size.num_nodes, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
        found, above = own, parents.unsqueeze(2).expand(-1, -1, own.shape[2])
        for _ in range(self.size.num_nodes > 1 and self.size.max_depth):
            found = own | found.gather(1, above)
        return found

    def _write_results(self, tokens: Tensor, sizes: Tensor, path: Tensor, lengths: Tensor, following: Tensor) -> None:
        results, trees = self.results.there, self._trees.grown
        for name, values in (
            ("lengths", lengths), ("next", following), ("path", path), ("sizes", sizes), ("tokens", tokens),
            ("parents", trees.parents), ("confidence_float32", trees.confidence), ("worth_float32", trees.path_prob),
        ):  # fmt: skip
            results[name].copy_(values)

    def _keep_drafted(self, tokens: Tensor, is_live: Tensor, path: Tensor, lengths: Tensor) -> None:
        """Commit what the drafter computed of the accepted path: all of it, or all but the last node."""
        state, rows, inputs = self._state, self.size.num_rows, self.inputs.there
        drafts = is_live & (inputs["drafts"] > 0)
        has_two = state.has_two[:rows]
        nodes = path.clamp(min=0).long()
        columns = torch.where(path >= 0, self._trees.grown.columns.gather(1, nodes), -1)
        num_computed = (columns >= 0).sum(dim=1)
        one = torch.ones_like(columns[:, :1])
        two, alone = torch.cat([one, columns], dim=1), torch.cat([columns, -one], dim=1)
        kept = torch.where(has_two.unsqueeze(1), two, alone).int()
        num_kept = torch.where(drafts, num_computed + has_two, -1).int()
        tree_ops.commit(state.draft_slots[:rows], state.draft_known[:rows], inputs["draft_slots"], kept, num_kept)
        self.results.there["draft_path"].copy_(kept)
        self.results.there["draft_lengths"].copy_(num_kept)
        last = nodes.gather(1, (lengths.long() - 1).clamp(min=0).unsqueeze(1))
        state.before[:rows].copy_(torch.where(drafts, tokens.gather(1, last).squeeze(1), state.before[:rows]))
        state.has_two[:rows].copy_(torch.where(drafts, num_computed < lengths, has_two))
