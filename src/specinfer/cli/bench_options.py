"""Options that the bench commands share: what is measured, on which texts, and where the report goes."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from specinfer.cli.options import (
    DEBUG,
    DEVICE,
    DRAFTER_QUANTIZATION,
    DRAFTERS,
    DTYPE,
    GROW,
    JSON,
    KV_CACHE_DTYPE,
    KV_CACHE_MEMORY_BYTES,
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
from specinfer.demo.chat_model import CODE, usual_temperature
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
    kv_cache_memory_bytes: KV_CACHE_MEMORY_BYTES = None
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
                "kv_cache_memory_bytes", "num_prompts", "repeats")  # fmt: skip
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
