"""The commands bench latency, throughput and acceptance, and options that the bench commands share."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from specinfer.bench.acceptance_options import AcceptanceConfig
from specinfer.bench.options import BATCH_SIZES, LatencyConfig, ThroughputConfig
from specinfer.cli.commands import UsageError, checking
from specinfer.cli.options import (
    DEBUG,
    DEVICE,
    DRAFTER_QUANTIZATION,
    DRAFTERS,
    DTYPE,
    GROW,
    JSON,
    KV_CACHE_DTYPE,
    MODEL,
    PIPELINE_PARALLEL_SIZE,
    PLOT,
    QUANTIZATION,
    SEED,
    SELECT,
    SPECULATION_POLICY,
    TENSOR_PARALLEL_SIZE,
    VERIFICATION,
    check_models,
    flag,
    one_name,
)
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.cli.values import parse_drafters
from specinfer.demo.chat_model import CHAT, CHAT_TEMPERATURE, CODE, usual_temperature
from specinfer.reporting.files import check_files

MEASURED = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Target model, as in generate. (default: demo)", show_default=False),
]
KIND = Annotated[
    list[str] | None,
    flag(
        "Sampling",
        "Kind of chat prompts: questions, rewriting, code, lists or stories. May be repeated. (default: all kinds for "
        "demo-chat, and held-out texts for other models)",
        metavar="KIND",
    ),
]
TREES = Annotated[list[str] | None, flag("Speculation", "Token tree to measure. May be repeated. (default: auto)")]
TEMPERATURE = Annotated[float | None, flag("Sampling", "Temperature; 0 is greedy. (default: 0, or 0.7 for demo-chat)")]


def drafter_names(names: list[str] | None) -> str | tuple[str, ...]:
    """Return the drafters in the form that the bench configurations take."""
    drafters = parse_drafters(names or ["auto"])
    return drafters if isinstance(drafters, str) else tuple(drafters)


def check_inputs(config: Any) -> None:
    """Check the files and models of a measurement before torch is imported, which takes seconds.

    Raises:
        ModelError, ValueError: A file cannot be written, or a model is missing.
    """
    check_files(config.json, config.plot)
    if config.model is not None:
        check_models(config.model, () if isinstance(config.drafters, str) else config.drafters)


def measured(argument: str | None, option: str | None) -> str:
    """Return the model to measure, named as MODEL or with --model, or the code model."""
    name = one_name(argument, option)
    return CODE if name is None else name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of the models that are measured."""

    drafter: DRAFTERS = None
    dtype: DTYPE = "auto"
    quantization: QUANTIZATION = None
    drafter_quantization: DRAFTER_QUANTIZATION = None
    kv_cache_dtype: KV_CACHE_DTYPE = "auto"

    def settings(self) -> dict[str, Any]:
        """Return the fields of the configuration.

        Raises:
            ValueError: The drafters cannot be used together.
        """
        settings = {each.name: getattr(self, each.name) for each in fields(self)}
        return settings | {"drafters": drafter_names(settings.pop("drafter"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowableOptions(ModelOptions):
    """Options of models that may be grown before they are measured."""

    grow: GROW = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options of every report: its seed, and where it is written."""

    seed: SEED = 0
    as_json: JSON = None
    plot: PLOT = None
    debug: DEBUG = False

    def screen(self) -> Screen:
        """Silence libraries, which takes long where they are not yet imported, and return the terminal."""
        quiet_libraries(debug=self.debug)
        return Screen()

    def settings(self) -> dict[str, Any]:
        """Return the fields of the configuration."""
        return {"seed": self.seed, "json": self.as_json, "plot": self.plot}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of a comparison of token trees with plain decoding."""

    model: MODEL = None
    speculation_policy: SPECULATION_POLICY = None
    device: DEVICE = "auto"
    tensor_parallel_size: TENSOR_PARALLEL_SIZE = 1
    pipeline_parallel_size: PIPELINE_PARALLEL_SIZE = 1
    select: SELECT = None
    tree: TREES = None
    verification: VERIFICATION = "coupled"
    enable_prefix_caching: Annotated[
        bool,
        flag(
            "Sampling",
            "Read each prompt once and not in each run, to compare decoding after long prompts in less time.",
            "--enable-prefix-caching",
        ),
    ] = False
    kind: KIND = None
    num_prompts: Annotated[
        int, flag("Sampling", "Number of held-out texts, or of chat prompts of all kinds; at least the batch size.")
    ] = 8
    temperature: TEMPERATURE = None
    repeats: Annotated[int, flag("Sampling", "Number of measured runs of each tree on each prompt or batch.")] = 3

    def settings(self, argument: str | None) -> dict[str, Any]:
        """Return the fields of the configuration.

        Raises:
            ValueError: Options cannot be used together.
        """
        name = measured(argument, self.model)
        same = ("device", "tensor_parallel_size", "pipeline_parallel_size", "verification", "enable_prefix_caching",
                "num_prompts", "repeats")  # fmt: skip
        return {field: getattr(self, field) for field in same} | {
            "model": name,
            "trees": tuple(self.tree or ["auto"]),
            "select": self.select or "all",
            "scheduler": self.speculation_policy,
            "kinds": tuple(self.kind) if self.kind else None,
            "temperature": usual_temperature(name, 0.0) if self.temperature is None else self.temperature,
        }


PROMPT_CHARS = Annotated[int, flag("Sampling", "Approximate length of held-out texts, in characters.")]
MAX_TOKENS = Annotated[int, flag("Sampling", "Maximum number of tokens to generate for each prompt.")]


def latency(
    argument: MEASURED = None,
    *,
    options: CompareOptions,
    models: GrowableOptions,
    report: ReportOptions,
    prompt_chars: PROMPT_CHARS = 600,
    max_tokens: MAX_TOKENS = 128,
    peer: Annotated[list[str] | None, typer.Option("--peer", hidden=True)] = None,
) -> None:
    """Compare the latency of token trees with that of plain decoding, one request at a time."""
    if peer:
        raise UsageError(f"peer: run python -m benchmarks.latency --peer {peer[0]} in a checkout of the repository")
    screen = report.screen()
    with checking():
        config = LatencyConfig(
            **options.settings(argument),
            **models.settings(),
            **report.settings(),
            prompt_chars=prompt_chars,
            max_tokens=max_tokens,
        )
        check_inputs(config)
        from specinfer.bench.latency import run_latency
        from specinfer.bench.latency_report import print_latency

        result = run_latency(config, screen.err)
    print_latency(result, screen.out)


def throughput(
    argument: MEASURED = None,
    *,
    options: CompareOptions,
    models: GrowableOptions,
    report: ReportOptions,
    batch: Annotated[
        list[int] | None,
        flag("Sampling", "Batch size. May be repeated. (default: 1, 2, 4, 8, 16 and 32)"),
    ] = None,
    prompt_chars: PROMPT_CHARS = 600,
    max_tokens: MAX_TOKENS = 64,
) -> None:
    """Compare the throughput of token trees with that of plain decoding, by batch size."""
    screen = report.screen()
    with checking():
        sizes = tuple(batch or BATCH_SIZES)
        config = ThroughputConfig(
            **options.settings(argument),
            **models.settings(),
            **report.settings(),
            batch_sizes=sizes,
            prompt_chars=prompt_chars,
            max_tokens=max_tokens,
        )
        check_inputs(config)
        from specinfer.bench.throughput import run_throughput
        from specinfer.bench.throughput_report import print_throughput

        result = run_throughput(config, screen.err)
    print_throughput(result, screen.out)


# The settings of --quick; options that are given take precedence.
_QUICK: dict[str, Any] = {"num_prompts": 3, "max_tokens": 24, "temperatures": (0.0, 1.0), "nodes": (16,)}


def acceptance(
    argument: MEASURED = None,
    *,
    model: MODEL = None,
    models: ModelOptions,
    device: DEVICE = "auto",
    part: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "Part to measure: table1, table2, table3, rules, drafters or shift. May be repeated. (default: all but "
            "shift)",
        ),
    ] = None,
    nodes: Annotated[
        list[int] | None, flag("Speculation", "Number of nodes of the trees to compare. May be repeated. (default: 32)")
    ] = None,
    verification: Annotated[
        str | None, flag("Speculation", "Verification rule. (default: multi-step for table2, coupled for drafters)")
    ] = None,
    select: Annotated[
        str | None,
        flag("Speculation", "Selection of drafters that shift compares with all. (default: hedge:1)", "--select"),
    ] = None,
    shift_to: Annotated[
        str | None,
        flag(
            "Sampling",
            "Text of the second domain of shift, after held-out code. (default: the documentation of Python)",
            metavar="FILE",
        ),
    ] = None,
    kind: KIND = None,
    num_prompts: Annotated[
        int | None, flag("Sampling", "Number of held-out texts or chat prompts. (default: 8)")
    ] = None,
    max_tokens: Annotated[
        int | None, flag("Sampling", "Maximum number of tokens to generate for each prompt. (default: 64)")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        flag(
            "Sampling",
            "Temperature for rules and drafters; 0 is greedy. May be repeated. (default: 0, 0.6 and 1; 0 and 0.7 for "
            "demo-chat)",
        ),
    ] = None,
    quick: Annotated[bool, flag("Sampling", "Use few short texts and few trees.", "--quick")] = False,
    report: ReportOptions,
) -> None:
    """Measure tokens per pass: the tables of the paper, and a comparison of rules, trees and drafters."""
    screen = report.screen()
    with checking():
        name = measured(argument, model)
        usual = {"temperatures": (0.0, CHAT_TEMPERATURE)} if name == CHAT else {}
        asked = {
            "parts": tuple(part) if part else None,
            "nodes": tuple(nodes) if nodes else None,
            "temperatures": tuple(temperature) if temperature else None,
            "select": select,
            "shift_to": shift_to,
            "num_prompts": num_prompts,
            "max_tokens": max_tokens,
        }
        given = {field: value for field, value in asked.items() if value is not None}
        config = AcceptanceConfig(
            model=name,
            kinds=tuple(kind) if kind else None,
            verification=verification,
            device=device,
            **models.settings(),
            **report.settings(),
            **(_QUICK if quick else {}) | usual | given,
        )
        check_inputs(config)
        from specinfer.bench.acceptance import run_acceptance
        from specinfer.bench.acceptance_table import print_acceptance

        result = run_acceptance(config, screen.err)
    print_acceptance(result, screen.out)
