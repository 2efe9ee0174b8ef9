"""Training of the network of a speculation policy on logged steps, and evaluation of its choices.

Accepted tokens, nodes and levels are counts, so the network outputs the logarithms of their means. It is trained with
the Poisson deviance, where the logged tree was large enough to show them.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from specinfer.learning.loop import Trainer, train
from specinfer.learning.policy.tree_outcomes import TreeOutcomes
from specinfer.policy.cost_model import CostModel
from specinfer.policy.network import SMALL_NODES, Configuration, PolicyNetwork, token_weight

Floats = npt.NDArray[np.float64]
_RATE, _DECAY = 3e-3, 1e-3
_BATCH = 256
_CHECK = 50  # training steps between evaluations on held-out steps
_HELD_OUT_ONE_IN = 8  # steps
_LEAST_SCALE = 0.05  # a feature that hardly varied must not be scaled up


def train_network(
    outcomes: TreeOutcomes,
    menu: Sequence[Configuration],
    hidden: Sequence[int],
    *,
    seed: int,
    num_steps: int,
    left_out: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
) -> PolicyNetwork:
    """Return a trained network with hidden layers of these sizes.

    Args:
        num_steps: The largest number of training steps; the weights that did best on held-out steps are returned.
        left_out: Groups of features that it does not see, such as "target".
    """
    log, features = outcomes.log, outcomes.log.features
    unknown = np.isnan(features)
    assert len(features), "nothing was logged"
    low, high = np.nanmin(features, axis=0), np.nanmax(features, axis=0)
    mean, scale = np.nanmean(features, axis=0), np.maximum(np.nanstd(features, axis=0), _LEAST_SCALE)
    seen = np.asarray([name.split(".")[0] not in left_out for name in log.names], dtype=np.float64)
    inputs = np.where(unknown, 0.0, (features - mean) / scale) * seen
    goals = np.stack([outcomes.accepted, outcomes.nodes, outcomes.levels], axis=1)  # [steps, 3, configurations]
    weights = np.repeat(outcomes.known[:, None, :].astype(np.float64), 3, axis=1)
    weights[:, 0] *= token_weight(small_accepted(outcomes, menu))[:, None]
    layers = _train(
        torch.tensor(inputs, dtype=torch.float32),
        torch.tensor(goals, dtype=torch.float32),
        torch.tensor(weights, dtype=torch.float32),
        hidden,
        seed,
        num_steps,
    )
    # Features that are not seen have no weight, whatever their values are.
    layers[0] = (layers[0][0] * seen[:, None], layers[0][1])
    return PolicyNetwork(log.slots, log.names, tuple(menu), low, high, mean, scale, tuple(layers), dict(about or {}))


def small_accepted(outcomes: TreeOutcomes, menu: Sequence[Configuration]) -> Floats:
    """Return the number of accepted tokens of the best of the small trees, [steps]."""
    small = [configuration.max_nodes <= SMALL_NODES for configuration in menu]
    return np.asarray(outcomes.accepted[:, small].max(axis=1))


def _train(
    inputs: Tensor, goals: Tensor, known: Tensor, hidden: Sequence[int], seed: int, num_steps: int
) -> list[tuple[Floats, Floats]]:
    """Return (weight [inputs, outputs], bias [outputs]) of each layer, as they did best on held-out steps."""
    source = torch.Generator().manual_seed(seed)
    sizes = [inputs.shape[1], *hidden, goals.shape[1] * goals.shape[2]]
    linears = [_linear(before, after, source) for before, after in pairwise(sizes)]
    with torch.no_grad():  # start from the means
        means = (goals * known).sum(0) / known.sum(0).clamp(min=1e-6)
        linears[-1].weight.mul_(0.1)
        linears[-1].bias.copy_(means.clamp(min=1e-3).log().flatten())
    network = nn.Sequential(*[part for linear in linears for part in (linear, nn.ReLU())][:-1])
    held_out = torch.arange(len(inputs)) % _HELD_OUT_ONE_IN == _HELD_OUT_ONE_IN - 1
    if not held_out.any():
        held_out[-1] = True
    learning = (~held_out).nonzero()[:, 0] if len(inputs) > 1 else torch.zeros(1, dtype=torch.long)

    def loss(rows: Tensor) -> Tensor:
        return _deviance(network(inputs[rows]), goals[rows], known[rows])

    def batches(_: int) -> Iterator[tuple[Tensor, int]]:
        while True:
            yield learning[torch.randint(len(learning), (_BATCH,), generator=source)], _BATCH

    trainer = Trainer(network, [torch.optim.AdamW(network.parameters(), weight_decay=_DECAY)], loss)
    lowest, best = float("inf"), deepcopy(linears)
    for progress in train(trainer, batches, num_steps, lambda step: _RATE * (1 + cos(pi * step / num_steps)) / 2):
        if progress.step % _CHECK == 0 or progress.step == num_steps:
            with torch.no_grad():
                held_out_loss = float(loss(held_out))
            if held_out_loss < lowest:
                lowest, best = held_out_loss, deepcopy(linears)
    parts = ((linear.weight.detach().T, linear.bias.detach()) for linear in best)
    return [(weight.numpy().astype(np.float64), bias.numpy().astype(np.float64)) for weight, bias in parts]


def _linear(before: int, after: int, source: torch.Generator) -> nn.Linear:
    linear = nn.Linear(before, after)
    with torch.no_grad():
        linear.weight.copy_((torch.randn((before, after), generator=source) * (1.0 / before) ** 0.5).T)
        linear.bias.zero_()
    return linear


def _deviance(logs: Tensor, goals: Tensor, known: Tensor) -> Tensor:
    """Return the mean Poisson deviance, without the terms that do not depend on `logs` [steps, 3 * configurations]."""
    logs = logs.view_as(goals).clamp(max=7.0)
    return ((logs.exp() - goals * logs) * known).sum() / known.sum().clamp(min=1e-6)


@dataclass(frozen=True, slots=True)
class NetworkQuality:
    """The quality of a network on steps that it was not trained on.

    Attributes:
        name: Its architecture, and the features that it does not see.
        error: The mean absolute error of expected tokens, over steps and configurations.
        rate: The tokens per second that its choices would yield, one request at a time.
        num_weights: The number of its weights.
    """

    name: str
    error: float
    rate: float
    num_weights: int


def evaluate_network(network: PolicyNetwork, outcomes: TreeOutcomes, costs: CostModel) -> NetworkQuality:
    """Evaluate a network on steps whose trees were large enough to show all configurations."""
    expected = network.expect(outcomes.log.features)
    chosen = expected.rates(costs, 1).argmax(axis=1)
    error = np.abs(expected.tokens - 1.0 - outcomes.accepted)[outcomes.known].mean()
    num_weights = sum(weight.size + bias.size for weight, bias in network.layers)
    name = str(network.about.get("architecture", ""))
    return NetworkQuality(name, float(error), rate_of(outcomes, chosen, costs), num_weights)


def rate_of(outcomes: TreeOutcomes, chosen: npt.NDArray[np.int64], costs: CostModel) -> float:
    """Return the tokens per second if these configurations had been chosen, `chosen` [steps].

    Each step that shows all configurations stands for as many tokens of text as its large tree emitted. Smaller trees
    emit them in several steps, and each of these is assumed to have the same cost and yield.
    """
    full = outcomes.known.all(axis=1)
    each = np.arange(len(chosen))
    tokens = 1.0 + outcomes.accepted[each, chosen]
    seconds = costs.step(1, outcomes.nodes[each, chosen], outcomes.levels[each, chosen])
    emitted = 1.0 + outcomes.accepted.max(axis=1)
    return float(emitted[full].sum() / (emitted * seconds / tokens)[full].sum())


def fixed_rates(outcomes: TreeOutcomes, costs: CostModel) -> list[float]:
    """Return the tokens per second of each configuration if chosen in every step."""
    num_steps, num_configurations = outcomes.accepted.shape
    return [rate_of(outcomes, np.full(num_steps, number), costs) for number in range(num_configurations)]
