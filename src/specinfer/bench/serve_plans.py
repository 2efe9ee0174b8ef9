"""Configuration of a serving run: the load, the arms, and the arrival times of requests."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specinfer.bench.options import PLAIN, check_models, check_once, check_seed, check_whole, rotated
from specinfer.client import server_url
from specinfer.core.config import check_device
from specinfer.core.tree_shape import parse_tree

DEFAULT = "default"  # the arm whose requests name no tree, so that the server uses its own setting
METRICS = ("ttft", "tpot", "itl", "e2el")
ENDPOINTS = ("completions", "chat")
TRACE = "trace"  # the trace that comes with the package
DATASETS = ("heldout", "random", TRACE)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Options of the serving benchmark.

    Attributes:
        model: Model to start a server with for this run. With `base_url`, the model name in requests, or None for the
            server's first.
        base_url: URL of an existing server, or None to start one.
        endpoint: "completions" or "chat".
        trees: Arms: "default", "off", or a tree that each request names.
        dataset: "heldout", "random", "trace", or a file of prompts or of a trace: JSON lines, or JSON of conversations.
        request_rates: Requests per second, each measured separately. Infinity sends all at once.
        burstiness: 1 is a Poisson process. Lower values give bursts, higher ones more even arrivals, and infinity gives
            fixed intervals.
        find_rate: Percentage of requests that must meet their targets in a search for the highest rate, which begins
            with the only one of `request_rates`; None measures the rates given.
        self_timed: Send requests at the times of the dataset, at a finite rate scaled to it.
        sends_slo: Send the latency targets of requests to the server.
        max_concurrency: Most concurrent requests, or None for no limit.
        max_tokens: Tokens generated for each request. The end-of-text token does not end the output.
        repeats: Rounds. In each, all arms receive the same requests at the same times, in a rotating order.
        warmups: Unmeasured requests of each arm before the rounds.
        goodput: Limit of each metric in milliseconds that a request must keep to count as good.
        percentiles: Percentiles of each metric to report in addition to mean and median.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str | None = None
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    endpoint: str = "completions"
    trees: tuple[str, ...] = (DEFAULT, PLAIN)
    dataset: str = "heldout"
    num_prompts: int = 32
    prompt_chars: int = 600
    max_tokens: int = 64
    temperature: float = 0.0
    request_rates: tuple[float, ...] = (math.inf,)
    find_rate: float | None = None
    burstiness: float = 1.0
    self_timed: bool = False
    sends_slo: bool = True
    max_concurrency: int | None = None
    repeats: int = 3
    warmups: int = 1
    seed: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)
    metrics: tuple[str, ...] = METRICS
    percentiles: tuple[float, ...] = (99.0,)
    measures_overhead: bool = False
    drafters: str | tuple[str, ...] = "auto"
    grow: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    max_num_seqs: int = 32
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("prompt_chars", 1), ("max_tokens", 2), ("repeats", 1), ("warmups", 0)):
            check_whole(name, getattr(self, name), least)
        check_whole("max_num_seqs", self.max_num_seqs, 1)
        if self.max_concurrency is not None:
            check_whole("max_concurrency", self.max_concurrency, 1)
        check_seed(self.seed)
        check_models(self)
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
            if self.grow is not None:
                raise ValueError("grow: the server has its model already; leave grow or base_url out")
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint must be one of {', '.join(ENDPOINTS)}, not {self.endpoint!r}")
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
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise ValueError(f"temperature must be from 0 to 100, not {self.temperature:g}")

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


class Turn(NamedTuple):
    """One round at one rate: all arms, in this order."""

    rate: float
    repeat: int
    arms: tuple[str, ...]


def schedule(config: ServeConfig, rates: Sequence[float]) -> Iterator[Turn]:
    """Yield all rates in each repeat, so that a slower machine affects all of them alike."""
    for repeat in range(config.repeats):
        for place, rate in enumerate(rates):
            yield Turn(rate, repeat, rotated(config.trees, repeat + place))


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the send times in seconds from the start. At a finite rate the last is count / rate."""
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    return at_rate(np.cumsum(gaps).tolist(), rate)


def at_rate(times: Sequence[float], rate: float) -> list[float]:
    """Return ascending times scaled so that their mean rate is this one; as they are if it is infinite.

    vLLM's benchmark does so with random times, since the actual rate would otherwise be random.
    """
    if math.isinf(rate) or not times[-1]:
        return list(times)
    return [time * (len(times) / rate / times[-1]) for time in times]
