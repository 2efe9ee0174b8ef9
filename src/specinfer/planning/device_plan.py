"""Plan for a GPU that is not here: expected speed by batch size, and what changes of a step would gain."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specinfer.bench.models import Models, dtype_of, find_models
from specinfer.core.lookups import MTP, SELF_DRAFTERS, is_model, is_self
from specinfer.model.definition import load_config
from specinfer.model.heads.load import find_format
from specinfer.model.recurrent.layers import num_attending
from specinfer.planning.device_costs import StepCosts, StepDesign, designs, weights_of
from specinfer.planning.growth_shape import Shape, drafter_shape, head_dim_of, shape_for
from specinfer.planning.options import ACCELERATORS, PlanConfig
from specinfer.planning.plan import choose, find_acceptance, make_plan
from specinfer.planning.plan_page import acceptance_line, plan_page
from specinfer.planning.plan_report import Choice
from specinfer.planning.target_shape import TargetShape, mean_bytes
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.reporting.plots import Panel, Series, draw_plot
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHAINS = (3, 5)  # lengths of the chains that are shown next to the trees
_GPU = torch.device("cuda")
_ROWS = (1, 8, 32, 64)  # of passes whose time with `batch_invariant` is compared
_COMPARED = (1, 8, 32)  # numbers of requests at which changes of the step are compared


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Expected times and speeds of a batch.

    Attributes:
        choice: The best tree; its speed is over plain decoding on the same GPU.
        pass_ms, level_ms, step_ms: Milliseconds of a plain target pass, of a draft level with a node for each request,
            and of a whole step with the best tree.
        chains: Speed with chains of fixed lengths, over plain decoding.
        fits: Whether weights and KV cache fit into the memory of the GPU.
    """

    choice: Choice
    pass_ms: float
    level_ms: float
    step_ms: float
    chains: tuple[float, ...]
    fits: bool


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan for a GPU; nothing of it was measured there.

    Attributes:
        changes: Tokens per second at each of some batch sizes over those of the present step, by what is changed.
        invariance: Time of a pass with `batch_invariant` over the time without, by its rows; empty without that.
    """

    choices: tuple[DeviceChoice, ...]
    changes: Mapping[str, tuple[float, ...]]
    by_rank: tuple[float, ...]
    target: TargetShape
    drafter: TargetShape | None
    drafter_name: str | None
    config: PlanConfig
    invariance: Mapping[int, float]

    def as_dict(self) -> dict[str, object]:
        """Return the numbers of the report, ready for JSON."""
        rows = [
            one.choice.as_dict()
            | {"pass_ms": one.pass_ms, "draft_level_ms": one.level_ms, "step_ms": one.step_ms, "fits": one.fits}
            | {"chain_speedups": dict(zip(map(str, _CHAINS), one.chains, strict=True))}
            for one in self.choices
        ]
        changes = {name: dict(zip(map(str, _COMPARED), gains, strict=True)) for name, gains in self.changes.items()}
        return {
            "choices": rows,
            "changes": changes,
            "acceptance_by_rank": list(self.by_rank),
            "is_measured": False,
        } | ({"batch_invariant_pass_ratios": dict(self.invariance)} if self.invariance else {})


@reported
def run_any_plan(config: PlanConfig, progress: StageBar) -> Report[Any]:
    """Return the plan for this machine, or for a GPU whose published rates are known; as `make_plan`."""
    if config.device in ACCELERATORS:
        return device_page(plan_device(config, progress))
    return plan_page(make_plan(config, progress))


def plan_device(config: PlanConfig, progress: StageBar) -> DevicePlan:
    """Measure acceptance on this machine unless it is given, and predict steps on the GPU.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used; the message names it.
        RuntimeError: A request failed.
    """
    models = find_models(config.model, config.drafters)
    kv_bytes = 1.0 if config.kv_cache_dtype.startswith("fp8") else 2.0
    present = StepDesign(kv_bytes=kv_bytes, batch_invariant=config.batch_invariant)
    target, drafter, name = _shapes(config, models)
    copy = SELF_DRAFTERS.get(name or "")
    costs = StepCosts(ACCELERATORS[config.device], target, drafter, config.context, present, copy)
    acceptance = find_acceptance(replace(config, device="auto", grow=None, batch_invariant=False), models, progress)
    choices = tuple(_predict(costs, acceptance, size) for size in _BATCHES)
    rates = {
        name: np.array(
            [choose(replace(costs, design=one).of_batch(n), acceptance, n).tokens_per_second for n in _COMPARED]
        )
        for name, one in designs(present, copy)
    }
    built = next(iter(rates.values()))
    changes = {name: tuple((found / built).tolist()) for name, found in rates.items()}
    by_rank = tuple(acceptance.by_rank().tolist())
    invariance = dict(zip(_ROWS, costs.invariance_ratios(_ROWS), strict=True)) if config.batch_invariant else {}
    return DevicePlan(choices, changes, by_rank, target, drafter, name, config, invariance)


def _shapes(config: PlanConfig, models: Models) -> tuple[TargetShape, TargetShape | None, str | None]:
    """Return the shapes of the target and of the largest model among the drafters, grown as for a measurement.

    Returns:
        Both shapes, and the name of the drafter, or None for lookups alone.
    """
    dtype = "bfloat16" if config.grow is not None and config.dtype == "auto" else config.dtype
    grown = {} if config.grow is None else _grown_shapes(config.grow, models)

    def shape_of(name: str, quantization: str | None) -> TargetShape:
        folder = Path(name)
        width = mean_bytes(folder, str(dtype_of(folder, dtype)).removeprefix("torch."), quantization, _GPU)
        return _grown(folder, grown[name], width) if name in grown else TargetShape.from_folder(folder, width)

    target, shapes = str(models.target), dict[str, TargetShape]()
    for name in filter(is_model, models.drafters):
        if is_self(name):
            kind, rounded = SELF_DRAFTERS[name], config.quantization
            if rounded is not None and kind.quantization == rounded:
                raise ValueError(f"drafter: {name} is the target itself, which is {rounded} too; leave it out")
            target_config = load_config(Path(target)).get_text_config()
            if kind.is_sparse and num_attending(target_config) < target_config.num_hidden_layers:
                raise ValueError(f"drafter: {name} leaves out tokens, and the target has layers that need all of them")
            shapes[name] = shape_of(target, kind.quantization or config.quantization)
        elif name == MTP or find_format(Path(name)) is not None:
            raise ValueError(
                f"drafter: {name} reads the target's hidden states; only small models, copies of the target and "
                "lookups are predicted"
            )
        else:
            shapes[name] = shape_of(name, config.drafter_quantization)
    largest = max(shapes, key=lambda name: shapes[name].num_bytes, default=None)
    return shape_of(target, config.quantization), None if largest is None else shapes[largest], largest


def _grown_shapes(size: str, models: Models) -> dict[str, Shape]:
    """Return the shapes of the models that grow with a target to a size, such as "7b", by their folders.

    Raises:
        ValueError: A model cannot grow.
    """
    target = load_config(models.target)
    try:
        shape = shape_for(size, target)
        small = [name for name in models.drafters if is_model(name) and not is_self(name) and name != MTP]
        found = {name: drafter_shape(shape, target, load_config(Path(name))) for name in small}
    except ValueError as error:
        raise ValueError(f"grow: {error}") from error
    return {str(models.target): shape} | {name: one for name, one in found.items() if one is not None}


def _grown(folder: Path, shape: Shape, bytes_per_parameter: float) -> TargetShape:
    """Return the sizes of a model grown to `shape`, of which nothing is written."""
    config = load_config(folder)
    head_dim, embeddings = head_dim_of(config), config.vocab_size * shape.hidden_size
    total = shape.num_parameters(config.vocab_size, head_dim, tied=True)
    return TargetShape(
        num_layers=shape.num_layers,
        width=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        layer_parameters=(total - embeddings) // shape.num_layers,
        kv_parameters=2 * shape.hidden_size * shape.num_kv_heads * head_dim,
        head_parameters=embeddings,
        bytes_per_parameter=bytes_per_parameter,
    )


def _predict(costs: StepCosts, acceptance: AcceptanceModel, num_requests: int) -> DeviceChoice:
    model, first = costs.of_batch(num_requests), float(acceptance.by_rank()[0])
    lengths = np.minimum(_CHAINS, model.most_nodes(num_requests))  # longer ones are cut
    expected = np.array([sum(first**depth for depth in range(length + 1)) for length in lengths])
    plain = 1.0 / float(model.step(num_requests, 0, 0))
    chains = expected / model.step(num_requests, num_requests * lengths, lengths) / plain
    best = choose(model, acceptance, num_requests)
    return DeviceChoice(
        best,
        1e3 * float(model.target(num_requests)),
        1e3 * float(model.draft_level(num_requests)),
        1e3 * float(model.step(num_requests, num_requests * best.num_nodes, best.num_levels)),
        tuple(chains.tolist()),
        costs.fits(num_requests),
    )


def device_page(plan: DevicePlan) -> Report[DevicePlan]:
    """Return the report: the expected speed by batch size, and what changes of the step would gain."""
    device, config = ACCELERATORS[plan.config.device], plan.config
    drafter = "lookups" if plan.drafter is None else f"a drafter of {_billions(plan.drafter)}"
    if plan.drafter_name is not None and is_self(plan.drafter_name):
        drafter = f"{SELF_DRAFTERS[plan.drafter_name].help} as drafter"
    lines = [
        f"[bold]{config.model}[/bold]: target of {_billions(plan.target)} that a pass reads, {drafter}, "
        f"{config.context} tokens of context each; predicted for one {device.name} "
        f"({device.bandwidth / 1e12:g} TB/s, {device.flops / 1e12:g} TFLOP/s), not measured",
        "",
        acceptance_line(plan.by_rank, "measured here" if config.acceptance is None else "assumed"),
    ]
    if plan.invariance:
        ratios = ", ".join(f"{ratio:.2f} with {size}" for size, ratio in plan.invariance.items())
        lines.append(f"batch_invariant: a pass takes {ratios} rows, over the time without it")
    values = (
        Value[DeviceChoice]("batch", lambda row: row.choice.num_requests),
        Value[DeviceChoice]("pass", lambda row: row.pass_ms, "{:.2f}"),
        Value[DeviceChoice]("level", lambda row: row.level_ms, "{:.2f}"),
        Value[DeviceChoice]("step", lambda row: row.step_ms, "{:.2f}"),
        Value[DeviceChoice]("tree", lambda row: _tree(row.choice)),
        Value[DeviceChoice]("tokens/s", lambda row: f"{row.choice.tokens_per_second:.0f}" if row.fits else "no memory"),
        Value[DeviceChoice]("speedup", lambda row: row.choice.speedup, "{:.2f}"),
        *(_chain(place, length) for place, length in enumerate(_CHAINS)),
    )
    changes = (Value[str]("step", str), *(_gain(plan, place, size) for place, size in enumerate(_COMPARED)))
    title = "Times in ms; speed over plain decoding, of auto's trees (nodes/levels) and of chains"
    changed = "Tokens per second with one change of the step, over those as built"
    tables = (Table("", title, values, plan.choices), Table("", changed, changes, list(plan.changes)))
    return Report(lines, tables, plan, numbers=plan.as_dict(), plot=partial(plot_device_plan, plan))


def _chain(place: int, length: int) -> Value[DeviceChoice]:
    return Value(f"chain {length}", lambda row: row.chains[place], "{:.2f}")


def _gain(plan: DevicePlan, place: int, size: int) -> Value[str]:
    return Value(f"{size} request{'s' if size > 1 else ''}", lambda name: plan.changes[name][place], "{:.2f}")


def _tree(choice: Choice) -> str:
    return f"{choice.num_nodes}/{choice.num_levels}" if choice.num_nodes else "off"


def _billions(shape: TargetShape) -> str:
    count = weights_of(shape)
    return f"{count / 1e9:.2f} B weights" if count >= 1e9 else f"{count / 1e6:.1f} M weights"


def plot_device_plan(plan: DevicePlan, path: str | Path) -> None:
    """Draw the expected speed by batch size.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    sizes = [one.choice.num_requests for one in plan.choices]
    trees = [Series("trees of auto", [one.choice.speedup for one in plan.choices], x=sizes)]
    chains = [
        Series(f"chains of {length}", [one.chains[place] for one in plan.choices], x=sizes)
        for place, length in enumerate(_CHAINS)
    ]
    device = ACCELERATORS[plan.config.device]
    panel = Panel(
        "Expected speedup over plain decoding", trees + chains, counts=True, label="speedup",
        place_label="requests that run together", levels=(1.0,), legend="inside",
    )  # fmt: skip
    draw_plot(path, f"{Path(plan.config.model).name} on one {device.name}, predicted", [panel], width=7)
