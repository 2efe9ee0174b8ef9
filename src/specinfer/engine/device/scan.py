"""DeviceScan: the order in which layers without attention compute the tokens of a step on a device.

Each step keeps the state after its root. So the next one first recomputes the tokens of the path accepted since, from
what is stored of them, and then computes the root and the nodes:

    tokens of a request    [ - - path | root nodes - ]

Each request writes the state after its root to one of two rows, and reads the other.
"""

import torch
from torch import Tensor

from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.state import DeviceState
from specinfer.model.recurrent.layers import num_taps
from specinfer.model.recurrent.scan import PaddedScan
from specinfer.model.runner import ModelRunner
from specinfer.ops.scan_order import ScanOrder
from specinfer.ops.trees import DeviceTrees


class DeviceScan:
    """The scans of steps of one size, over the rows of requests.

    Args:
        target: The runner of a model that has layers without attention.
    """

    def __init__(self, size: LaunchSize, state: DeviceState, target: ModelRunner) -> None:
        self._rows, self._nodes, self._recomputed = size.num_rows, size.num_nodes, size.num_recomputed
        self._state, self._taps, device = state, num_taps(target.loaded.model), target.loaded.device
        width = self._recomputed + self._nodes
        with torch.inference_mode(mode=False):
            self._numbers = torch.arange(self._nodes, device=device)
            num_before = self._recomputed + self._taps - 1  # the first token of a path reads some more
            self._before = torch.arange(-num_before, 0, device=device)  # distances from the root
            self._above = torch.arange(num_before, device=device).sub(1).clamp(min=0)
            self._scanned = torch.arange(self._taps - 1, num_before + self._nodes, device=device)
            of_rows = torch.arange(self._rows, device=device).unsqueeze(1)
            self._first = of_rows * width + self._recomputed  # of the roots
            self._places = (torch.arange(self._rows * self._nodes, device=device)).view(-1, self._nodes)
            self._none = torch.full((self._rows, self._recomputed), -1, dtype=torch.int64, device=device)
            self._no_place = torch.full((self._rows,), -1, dtype=torch.int64, device=device)
            self._new = (self._first + self._numbers).flatten()
            self._is_root = torch.arange(width, device=device) == self._recomputed
            self._results = self._after_path(self._places)

    def of_step(self, trees: DeviceTrees, slots: Tensor, is_live: Tensor) -> PaddedScan:
        """Return the scan of a step.

        Args:
            trees: Trees of the requests; those that are not live have no nodes.
            slots: [rows, nodes] int32 slots of the nodes, -1 for rows without a request.
            is_live: [rows] bool, True for requests that go on.
        """
        state, rows = self._state, self._rows
        known, slots, parents = state.known[:rows].long().unsqueeze(1), slots.long(), trees.parents.long()
        read, written = state.states[:rows].unbind(dim=1)
        num_recomputed = torch.where(is_live, known.squeeze(1) - state.scanned[:rows], 0).clamp(max=self._recomputed)
        is_used = self._numbers < trees.sizes.unsqueeze(1)
        goes_back = is_used & (parents != self._numbers - 1) & (self._numbers > 0)
        # Whether a node other than the next one continues from a node; the last column collects the rest.
        is_origin = torch.zeros((rows, self._nodes + 1), dtype=torch.bool, device=slots.device)
        is_origin.scatter_(1, torch.where(goes_back, parents, self._nodes), True)
        kept = torch.where(self._is_root & is_live.unsqueeze(1), written.unsqueeze(1), -1)
        paths = self._paths(known, slots, parents)
        origins = torch.where(goes_back, self._places - self._numbers + parents, -1)
        places = torch.where(is_origin[:, :-1], self._places, -1)
        order = ScanOrder(
            num_results=rows * self._nodes,
            num_places=rows * self._nodes if self._nodes > 1 else 0,
            starts=self._first.squeeze(1) - num_recomputed,
            ends=self._first.squeeze(1) + trees.sizes,
            first_rows=torch.where(is_live, read, -1),
            first_places=self._no_place,
            slots=paths[:, -1].clamp(min=0),
            origins=self._after_path(origins),
            places=self._after_path(places),
            rows=kept.flatten(),
            results=self._results,
        )
        return PaddedScan(order, paths, self._new)

    def _after_path(self, of_nodes: Tensor) -> Tensor:
        """Return [scanned] numbers of nodes [rows, nodes], with -1 for tokens of the path."""
        return torch.cat([self._none, of_nodes], dim=1).flatten()

    def _paths(self, known: Tensor, slots: Tensor, parents: Tensor) -> Tensor:
        """Return [scanned, taps] slots of the last tokens on the path of each token, itself last; -1 before the first.

        Args:
            known: [rows, 1] tokens before the roots.
            slots, parents: [rows, nodes] of the nodes.
        """
        table, num_before = self._state.slots[: self._rows], len(self._before)
        places = known + self._before
        before = table.gather(1, places.clamp(0, table.shape[1] - 1)).long().masked_fill(places < 0, -1)
        tokens = torch.cat([before, slots], dim=1)
        above = torch.where(self._numbers > 0, parents + num_before, num_before - 1)
        above = torch.cat([self._above.expand(self._rows, -1), above], dim=1)
        at, columns = self._scanned.expand(self._rows, -1), list[Tensor]()
        for _ in range(self._taps):
            at = above.gather(1, at) if columns else at
            columns.append(tokens.gather(1, at))
        return torch.stack(columns[::-1], dim=2).flatten(0, 1)

    def advance(self, is_live: Tensor) -> None:
        """Swap the rows of live requests, and record what the new states cover.

        Call it before paths are committed, while `known` is still that of the step.
        """
        state, rows = self._state, self._rows
        state.scanned[:rows].copy_(torch.where(is_live, state.known[:rows] + 1, state.scanned[:rows]))
        states = state.states[:rows]
        states.copy_(torch.where(is_live.unsqueeze(1), states.flip(1), states))
