"""The network of the learned speculation policy: the expected tokens of trees of several configurations.

It predicts from the features of a request, and is small and computed with numpy, because one request is decided on at a
time. `specinfer tune --policy` trains it, and `--speculation-policy` reads its file. Source: the matching-length
predictor of SpecInfer's first version (arXiv 2305.09781v1).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specinfer.core.errors import ModelError
from specinfer.core.lookups import LOOKUPS
from specinfer.core.tree import TreeBudget
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.policy.features import feature_names
from specinfer.policy.optimizer import ExpectedYield

Floats = npt.NDArray[np.float64]
VERSION = 2
_KEY = "specinfer"
# Distance beyond the training range that a feature may have, as a fraction of that range.
_SLACK = 0.25


@dataclass(frozen=True, slots=True)
class Configuration:
    """Drafters and limits of a best-first tree.

    Attributes:
        slots: Slots of the drafters that are used, named by `features.find_slots`; empty for plain decoding.
        min_path_prob: Draft tokens with a smaller path probability are left out.
    """

    slots: tuple[str, ...] = ()
    max_nodes: int = 0
    max_depth: int = 0
    min_path_prob: float = 0.0

    @property
    def uses_model(self) -> bool:
        return any(slot not in LOOKUPS for slot in self.slots)

    def budget(self, names: Mapping[str, str]) -> TreeBudget:
        """Return the budget of such a tree, given the names of the drafters by slot."""
        drafters = frozenset(names[slot] for slot in self.slots) if self.slots else None
        return TreeBudget(self.max_nodes, self.max_depth, min_path_prob=self.min_path_prob, drafters=drafters)

    def __str__(self) -> str:
        return f"{'+'.join(self.slots)} {self.max_nodes}:{self.max_depth}" if self.slots else "off"


_MIN_PATH_PROB = 0.02
# (nodes, depth) for each kind of drafters. With the root they fill a pass over 8, 16, 32 or 48 rows.
_LOOKUP_SIZES = ((3, 3), (7, 7), (15, 15), (31, 31), (47, 47))
_MODEL_SIZES = ((3, 3), (7, 6), (11, 8), (15, 8), (23, 10), (31, 12))
_MERGED_SIZES = ((7, 7), (11, 8), (15, 8), (23, 12), (31, 12), (47, 16))


def make_configurations(slots: Sequence[str]) -> tuple[Configuration, ...]:
    """Return the configurations to choose from: off first, then lookups alone, models alone, and all together."""
    lookups = tuple(slot for slot in slots if slot in LOOKUPS)
    models = tuple(slot for slot in slots if slot not in LOOKUPS)
    configurations = [Configuration()]
    kinds = [(lookups, _LOOKUP_SIZES), (models, _MODEL_SIZES)]
    if lookups and models:
        kinds.append((tuple(slots), _MERGED_SIZES))
    for used, sizes in kinds:
        if used:
            configurations += [Configuration(used, nodes, depth, _MIN_PATH_PROB) for nodes, depth in sizes]
    return tuple(configurations)


SMALL_NODES = 7


def token_weight(small_accepted: npt.ArrayLike) -> Floats:
    """Return the weight of a token in a step in which small trees have this many draft tokens accepted.

    Tokens of easy text come quickly in any case, so a large tree that is right there saves little time, and one that is
    wrong in other text loses much. So a token counts as the number of steps of a small tree that it stands for.
    """
    return np.asarray(1.0 / (1.0 + np.asarray(small_accepted, dtype=np.float64)))


@dataclass(frozen=True, slots=True, eq=False)
class PolicyNetwork:
    """A network that predicts the yield of each configuration from features.

    Attributes:
        slots: The drafters it was trained with.
        names: Names of the features.
        configurations: Those to choose from; the first is off.
        low, high: [features] range seen in training.
        mean, scale: [features] values that the features are normalized by.
        layers: (weight [inputs, outputs], bias [outputs]) of each; between them max(0, x). The last gives logarithms
            of accepted draft tokens, of nodes and of levels, [3 * configurations].
        about: Information on the training.
    """

    slots: tuple[str, ...]
    names: tuple[str, ...]
    configurations: tuple[Configuration, ...]
    low: Floats
    high: Floats
    mean: Floats
    scale: Floats
    layers: tuple[tuple[Floats, Floats], ...]
    about: Mapping[str, Any]

    def expect(self, features: Floats) -> ExpectedYield:
        """Return what is expected of each request with each configuration, tokens weighted by `token_weight`.

        Args:
            features: [requests, features], NaN where unknown.
        """
        hidden = (features - self.mean) / self.scale
        hidden[np.isnan(hidden)] = 0.0
        for weight, bias in self.layers[:-1]:
            hidden = np.maximum(hidden @ weight + bias, 0.0)
        weight, bias = self.layers[-1]
        means = np.exp(np.minimum(hidden @ weight + bias, math.log(MAX_TREE_NODES)))
        gain, nodes, levels = means.reshape(len(features), 3, len(self.configurations)).transpose(1, 0, 2)
        most_nodes = np.asarray([configuration.max_nodes for configuration in self.configurations])
        depth = np.asarray([configuration.max_depth for configuration in self.configurations])
        model_depth = np.asarray(
            [configuration.max_depth if configuration.uses_model else 0 for configuration in self.configurations]
        )
        return ExpectedYield(
            1.0 + np.minimum(gain, depth),
            np.minimum(nodes, most_nodes),
            np.minimum(np.maximum(levels, model_depth > 0), model_depth),
        )

    def knows(self, features: Floats) -> npt.NDArray[np.bool_]:
        """Return whether the features of each request are within the range seen in training: [requests]."""
        slack = _SLACK * (self.high - self.low) + 1e-6
        outside = (features < self.low - slack) | (features > self.high + slack) | np.isinf(features)
        return np.asarray(~outside.any(axis=1))

    def save(self, path: str | Path) -> None:
        """Write the network to a file. Raises OSError."""
        tensors: dict[str, npt.NDArray[np.float32]] = {
            name: getattr(self, name).astype(np.float32) for name in ("low", "high", "mean", "scale")
        }
        for i, (weight, bias) in enumerate(self.layers):
            tensors[f"{i}.weight"] = np.ascontiguousarray(weight, dtype=np.float32)
            tensors[f"{i}.bias"] = np.ascontiguousarray(bias, dtype=np.float32)
        header = {
            "version": VERSION,
            "slots": self.slots,
            "names": self.names,
            "menu": [asdict(configuration) for configuration in self.configurations],
            "num_layers": len(self.layers),
            "about": dict(self.about),
        }
        save_file(tensors, path, metadata={_KEY: json.dumps(header)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ModelError: The file is missing, damaged or of another format; the message says what to do.
        """
        if not Path(path).is_file():
            raise ModelError(f"speculation_policy: no file {path}; make one with specinfer tune --policy")
        try:
            with safe_open(path, framework="np") as file:
                header = json.loads((file.metadata() or {})[_KEY])
                tensors = {name: file.get_tensor(name).astype(np.float64) for name in file.keys()}  # noqa: SIM118
            if header["version"] != VERSION:
                raise ValueError(f"version {header['version']}")
            made = cls(
                slots=tuple(header["slots"]),
                names=tuple(header["names"]),
                configurations=tuple(
                    Configuration(
                        tuple(entry["slots"]),
                        int(entry["max_nodes"]),
                        int(entry["max_depth"]),
                        float(entry["min_path_prob"]),
                    )
                    for entry in header["menu"]
                ),
                low=tensors["low"],
                high=tensors["high"],
                mean=tensors["mean"],
                scale=tensors["scale"],
                layers=tuple((tensors[f"{i}.weight"], tensors[f"{i}.bias"]) for i in range(int(header["num_layers"]))),
                about=dict(header["about"]),
            )
            made._check()
        except (SafetensorError, OSError, LookupError, ArithmeticError, TypeError, ValueError, RecursionError) as error:
            raise ModelError(
                f"speculation_policy: {path} is damaged or no file of specinfer tune --policy ({error}); make it again"
            ) from error
        return made

    def _check(self) -> None:
        """Check that the parts fit together. Raises ValueError if they do not."""
        size = len(self.names)
        sizes = [size, *(weight.shape[1] for weight, _ in self.layers if weight.ndim == 2)]
        fits = (
            self.names == feature_names(self.slots)
            and len(set(self.slots)) == len(self.slots)
            and all(values.shape == (size,) for values in (self.low, self.high, self.mean, self.scale))
            and len(sizes) == len(self.layers) + 1 > 1
            and all(
                weight.shape == (before, after) and bias.shape == (after,)
                for (weight, bias), before, after in zip(self.layers, sizes[:-1], sizes[1:], strict=True)
            )
            and sizes[-1] == 3 * len(self.configurations)
            and self.configurations[0] == Configuration()
            and all(
                configuration.slots
                and set(configuration.slots) <= set(self.slots)
                and 1 <= configuration.max_depth <= configuration.max_nodes <= MAX_TREE_NODES
                and 0 <= configuration.min_path_prob < 1
                for configuration in self.configurations[1:]
            )
        )
        if not fits:
            raise ValueError("its parts do not match")
        numbers = (self.low, self.high, self.mean, self.scale, *(part for layer in self.layers for part in layer))
        if not all(np.isfinite(values).all() for values in numbers) or not (self.scale > 0).all():
            raise ValueError("it has values that are not finite")
