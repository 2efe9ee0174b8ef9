"""Options of the serving benchmark: the server, the load, and the arms. Nothing here needs torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specinfer.bench.options import PLAIN, SharedSettings, check_once, parse_numbers
from specinfer.client import KEY_VARIABLE, server_url
from specinfer.core.config import check_device
from specinfer.core.options import Flag, check_settings, setting, setting_of
from specinfer.core.tree_shape import parse_tree
from specinfer.engine_args import EngineArgs

DEFAULT = "default"  # the arm whose requests name no tree, so that the server uses its own setting
METRICS = ("ttft", "tpot", "itl", "e2el")
ENDPOINTS = ("completions", "chat")
TRACE = "trace"  # the trace that comes with the package
DATASETS = ("heldout", "random", TRACE)
_SERVER, _LOAD, _OUTPUT = "Server", "Load", "Output"


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """Return limits in vLLM's format: a name, a colon, milliseconds."""
    limits = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            limits[name] = float(number)
        except ValueError as error:
            raise ValueError(f"goodput: {word!r:.60} cannot be read; give such as ttft:100") from error
    return limits


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Options of the serving benchmark.

    In each round all arms receive the same requests at the same times, in a rotating order. The end-of-text token does
    not end an output.

    Attributes:
        model: Model to start a server with for this run. With `base_url`, the model name in requests, or None for the
            server's first.
        goodput: Limit of each metric in milliseconds that a request must keep to count as good.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str | None = None
    base_url: str | None = setting(None, _SERVER, "Benchmark the server at this URL.", metavar="URL")
    api_key: str | None = field(
        default=None,
        repr=False,
        metadata={"flag": Flag(_SERVER, "API key of the server.", metavar="KEY", variable=KEY_VARIABLE)},
    )
    endpoint: str = setting("completions", _SERVER, "Endpoint: {choices}.", choices=ENDPOINTS)
    trees: tuple[str, ...] = setting(
        (DEFAULT, PLAIN),
        "Speculation",
        "Token tree to request: off, auto, 1,1,3,1, ..., or default (none requested; the only choice for other "
        "servers). May be repeated. (default: default and off)",
        name="tree",
    )
    dataset: str = setting(
        "heldout",
        _LOAD,
        "Prompts: heldout, random, trace (two classes of requests with targets), or a file (JSON lines, also of a "
        "trace, or JSON of ShareGPT).",
        short="--dataset-path",
    )
    num_prompts: int = setting(32, _LOAD, "Number of requests of each arm in each round.", low=1)
    prompt_chars: int = setting(600, _LOAD, "Approximate length of held-out and random prompts, in characters.", low=1)
    max_tokens: int = setting(64, _LOAD, "Number of tokens to generate for each request.", short="--output-len", low=2)
    temperature: float = setting(0.0, _LOAD, "Temperature; 0 is greedy.", low=0, high=100)
    request_rates: tuple[float, ...] = setting(
        (math.inf,), _LOAD, "Requests per second. May be repeated. (default: inf, all at once)", name="request_rate"
    )
    find_rate: float | None = setting(
        None,
        _LOAD,
        "Search for the highest rate at which this percentage of requests meets its targets, for each tree; begins "
        "with --request-rate.",
        metavar="PERCENT",
    )
    burstiness: float = setting(
        1.0,
        _LOAD,
        "Burstiness of arrivals: 1 is a Poisson process, less is burstier, more is more even, inf is fixed intervals.",
    )
    self_timed: bool = setting(
        False,
        _LOAD,
        "Send requests at the times of the dataset, which is a trace; scaled if --request-rate is given.",
    )
    sends_slo: bool = setting(True, _LOAD, "Send the latency targets of a trace to the server.", name="send_slo")
    max_concurrency: int | None = setting(
        None, _LOAD, "Maximum number of concurrent requests. (default: unlimited)", low=1
    )
    repeats: int = setting(3, _LOAD, "Number of rounds; in each round all arms take turns.", low=1)
    warmups: int = setting(1, _LOAD, "Number of warm-up requests of each arm.", name="num_warmups", low=0)
    seed: int = setting_of(SharedSettings, "seed")
    goodput: Mapping[str, float] = field(
        default_factory=dict,
        metadata={
            "flag": Flag(
                _OUTPUT,
                "Service level objective for goodput, such as ttft:100 or tpot:20, in ms. May be repeated.",
                metavar="NAME:MS",
                repeats=True,
                read=parse_limits,
            )
        },
    )
    metrics: tuple[str, ...] = setting(
        METRICS,
        _OUTPUT,
        f"Metrics to report percentiles of. (default: {','.join(METRICS)})",
        name="percentile_metrics",
        read=lambda text: tuple(text.split(",")),
    )
    percentiles: tuple[float, ...] = setting(
        (99.0,),
        _OUTPUT,
        "Percentiles to report. (default: 99)",
        name="metric_percentiles",
        read=lambda text: parse_numbers("metric_percentiles", text),
    )
    measures_overhead: bool = setting(
        False, _OUTPUT, "Also compare the time of each streamed token with the same in one process.", name="overhead"
    )
    drafters: str | tuple[str, ...] = setting_of(EngineArgs, "drafters")
    dtype: str = setting_of(EngineArgs, "dtype")
    quantization: str | None = setting_of(EngineArgs, "quantization")
    drafter_quantization: str | None = setting_of(EngineArgs, "drafter_quantization")
    drafter_token_map: int | str | Path = setting_of(EngineArgs, "drafter_token_map")
    drafter_window: str = setting_of(EngineArgs, "drafter_window")
    kv_cache_dtype: str = setting_of(EngineArgs, "kv_cache_dtype")
    device: str = setting_of(EngineArgs, "device")
    max_num_seqs: int = setting(32, _SERVER, "Maximum number of requests in a batch of a server started here.", low=1)
    json: str | Path | None = setting_of(SharedSettings, "json")
    plot: str | Path | None = setting_of(SharedSettings, "plot")

    def __post_init__(self) -> None:
        check_settings(self)
        check_device(self.device)
        self._check_server()
        self._check_load()
        self._check_numbers()

    def _check_server(self) -> None:
        if self.base_url is None and self.model is None:
            raise ValueError("model: name one to serve, or a server with base_url")
        if self.base_url is not None:
            server_url(self.base_url)
            if self.measures_overhead:
                raise ValueError("overhead: it is measured against the model in this process; leave base_url out")
        check_once("trees", self.trees)
        for tree in set(self.trees) - {DEFAULT}:
            parse_tree(tree)

    def _check_load(self) -> None:
        rates = self.request_rates
        if not rates or len(set(rates)) < len(rates) or not all(rate > 0 for rate in rates):
            raise ValueError(f"request_rates must be numbers above 0 or inf, at least one, none twice, not {rates}")
        if self.find_rate is not None:
            if not 0 < self.find_rate <= 100:
                raise ValueError(f"find_rate must be a percentage above 0 and at most 100, not {self.find_rate:g}")
            if len(rates) > 1 or math.isinf(rates[0]):
                raise ValueError("find_rate: the search begins with one finite rate; give one request_rate")
        if not self.burstiness > 0:
            raise ValueError(f"burstiness must be above 0, not {self.burstiness:g}")

    def _check_numbers(self) -> None:
        for name, values in (("metrics", self.metrics), ("goodput", self.goodput)):
            if unknown := sorted(set(values) - set(METRICS)):
                raise ValueError(f"{name}: {unknown[0]!r} is not known; use {', '.join(METRICS)}")
        if "itl" in self.goodput:
            raise ValueError("goodput: itl is of tokens, not of requests; use ttft, tpot or e2el")
        if not all(0 < limit < math.inf for limit in self.goodput.values()):
            raise ValueError("goodput: limits must be milliseconds above 0")
        if not all(0 < percentile <= 100 for percentile in self.percentiles):
            raise ValueError(f"percentiles must be above 0 and at most 100, not {self.percentiles}")

    @property
    def sends_again(self) -> bool:
        """True if a prompt is sent more than once, so that requests need a cache salt against prefix caching."""
        num_rounds = len(self.trees) * self.repeats * len(self.request_rates)
        return num_rounds + self.warmups > 1 or self.find_rate is not None

    def fields_of(self, arm: str, prompt: str) -> dict[str, Any]:
        """Return the body of a request without its model and cache salt."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        fields |= (
            {"prompt": prompt}
            if self.endpoint == "completions"
            else {"messages": [{"role": "user", "content": prompt}]}
        )
        if self.temperature:
            fields["seed"] = self.seed
        if arm != DEFAULT:
            fields["speculative"] = {"tree": arm}
        return fields
