"""Benchmark of serving under load: token trees and plain decoding on one server, in alternating rounds.

In each round every arm receives the same requests at the same times. The server already exists, or is started for the
run. Requests have a cache salt, so that no arm benefits from prompts that the server cached for another.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch

from specinfer.bench.loop import Prepare
from specinfer.bench.models import Models, find_models
from specinfer.bench.options import PLAIN, load_options_of
from specinfer.bench.serve_load import PATHS, Turn, arrivals, at_rate, schedule, send_all, send_alone, send_one
from specinfer.bench.serve_options import ServeConfig
from specinfer.bench.serve_page import serve_page
from specinfer.bench.serve_process import ServerAddress, running_server
from specinfer.bench.serve_report import Overhead, RateResult, ServeArm, Served
from specinfer.bench.serve_requests import LoadRequest, load_requests
from specinfer.bench.serve_runs import Round
from specinfer.bench.serve_search import highest_rate, next_rate, targets_met
from specinfer.client import error_text, open_async_client, open_client, server_url
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.llm import LLM
from specinfer.reporting.environment import surroundings
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, reported
from specinfer.reporting.spread import Spread

if TYPE_CHECKING:
    import httpx


@reported
def run_serve(config: ServeConfig, progress: StageBar) -> Report[Served]:
    """Run the benchmark; as `serve_under_load`."""
    return serve_under_load(config, progress)


def serve_under_load(config: ServeConfig, progress: StageBar, prepare: Prepare | None = None) -> Report[Served]:
    """Run the benchmark.

    Args:
        prepare: Function that changes the models before the server is started.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used, or no server answers; the message names it. Nothing was measured.
        RuntimeError: The server failed, or an arm has no served request.
    """
    requests = load_requests(config)
    if config.find_rate is not None and not config.goodput and not any(request.slo for request in requests):
        raise ValueError("find_rate: the requests have no targets; give goodput, or a trace whose lines have slo")
    progress.stage("starting the server")
    models, dtype = _models(config, prepare, progress.stage)
    with _server(config, models, dtype) as address:
        name, version = _look(address, config.model if config.base_url else None)
        load = _Load(config, address, name, requests, progress)
        results = asyncio.run(load.measure())
        overhead = None
        if config.measures_overhead:
            assert models is not None
            progress.stage("the same in this process")
            prompts = [request.prompt for request in requests]
            overhead = _measure_overhead(config, address, name, prompts, str(models.target), dtype)
    _check_served(results)
    highest = None
    if config.find_rate is not None:
        met = targets_met(results, config.goodput, config.find_rate)
        highest = {tree: highest_rate(tree, met) for tree in config.trees}
    environment = surroundings() | {"served_model": name, "server_version": version}
    return serve_page(Served(results, config, name, overhead, highest), environment)


# ------------------------------------------------------------------------------------- the server


def _models(config: ServeConfig, prepare: Prepare | None, report: Callable[[str], None]) -> tuple[Models | None, str]:
    if config.base_url is not None:
        return None, config.dtype
    assert config.model is not None
    models = find_models(config.model, config.drafters)
    return (models, config.dtype) if prepare is None else prepare(models, config.dtype, torch.device("cpu"), report)


@contextmanager
def _server(config: ServeConfig, models: Models | None, dtype: str) -> Iterator[ServerAddress]:
    if models is None:
        assert config.base_url is not None
        yield ServerAddress(server_url(config.base_url), config.api_key)
        return
    flags = [flag for drafter in models.drafters for flag in ("--drafter", drafter)]
    # Requests that arrive together must wait in the queue and not be refused.
    flags += ["--max-num-seqs", str(config.max_num_seqs), "--max-num-queued-reqs", str(config.num_prompts)]
    flags += ["--max-tree-nodes", str(MAX_TREE_NODES)]
    flags += ["--device", config.device, "--served-model-name", Path(str(config.model)).name]
    for name, value in load_options_of(config, dtype).items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    with running_server(str(models.target), flags) as address:
        yield address


def _look(address: ServerAddress, name: str | None) -> tuple[str, str | None]:
    """Return the name of the server's model, and the server's version if it reports one."""
    import httpx

    with open_client(address.url, address.api_key) as client:
        try:
            models, version = client.get("/v1/models"), client.get("/version")
        except httpx.HTTPError as error:
            raise ValueError(f"base_url: no server answers at {address.url} ({error}); start one first") from error
    if models.status_code != 200:
        raise ValueError(f"base_url: {error_text(models.status_code, models.content)}")
    try:
        names = [str(entry["id"]) for entry in models.json()["data"]]
        found = str(version.json()["version"]) if version.status_code == 200 else None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"base_url: what answers at {address.url} has not OpenAI's interface") from error
    if not names or (name is not None and name not in names):
        raise ValueError(f"model: the server has {', '.join(names) or 'none'}, not {name or 'one'}")
    return name or names[0], found


# --------------------------------------------------------------------------------------- the load


class _Load:
    """The load of a run: the same requests for all arms, at each rate.

    Args:
        name: Name of the model in requests.
    """

    def __init__(
        self,
        config: ServeConfig,
        address: ServerAddress,
        name: str,
        requests: Sequence[LoadRequest],
        progress: StageBar,
    ) -> None:
        self._config, self._address, self._name = config, address, name
        self._requests, self._progress = requests, progress
        self._path = PATHS[config.endpoint]

    async def measure(self) -> tuple[RateResult, ...]:
        """Measure the rates of the options, or those of a search."""
        config = self._config
        async with open_async_client(self._address.url, self._address.api_key) as client:
            for tree in config.trees:
                for number in range(config.warmups):
                    request = self._requests[number % len(self._requests)]
                    body = _body(config, self._name, tree, request, f"warmup-{number}-{tree}")
                    await send_one(client, self._path, body, 0, time.perf_counter())
            if config.find_rate is None:
                return await self._at_rates(client, config.request_rates)
            found = list[RateResult]()
            while rate := next_rate(config.request_rates[0], targets_met(found, config.goodput, config.find_rate)):
                found += await self._at_rates(client, (rate,))
            return tuple(sorted(found, key=lambda result: result.rate))

    async def _at_rates(self, client: "httpx.AsyncClient", rates: Sequence[float]) -> tuple[RateResult, ...]:
        """Measure all arms at these rates."""
        config, requests = self._config, self._requests
        total = config.repeats * len(rates) * len(config.trees) * len(requests)
        self._progress.stage("requests" if len(rates) > 1 else f"requests, {rates[0]:.3g} a second", total)
        rounds: dict[tuple[float, str], list[Round]] = {}
        for turn in schedule(config, rates):
            if config.self_timed:
                times = at_rate([request.time or 0.0 for request in requests], turn.rate)
            else:
                times = arrivals(len(requests), turn.rate, config.burstiness, config.seed + turn.repeat)
            for tree in turn.arms:
                bodies = [_body(config, self._name, tree, request, _salt(turn, tree)) for request in requests]
                made = await send_all(client, self._path, bodies, times, config.max_concurrency, self._progress.advance)
                rounds.setdefault((turn.rate, tree), []).append(_with_classes(made, requests))
        return tuple(
            RateResult(rate, tuple(ServeArm(tree, tuple(rounds[rate, tree])) for tree in config.trees))
            for rate in rates
        )


def _salt(turn: Turn, tree: str) -> str:
    return f"{turn.rate}-{turn.repeat}-{tree}"


def _with_classes(made: Round, requests: Sequence[LoadRequest]) -> Round:
    """Return a round whose runs have the classes and the targets of their requests."""
    runs = []
    for run in made.runs:
        request = requests[run.prompt]
        runs.append(replace(run, kind=request.kind, limits=_limits_of(request)))
    return replace(made, runs=tuple(runs))


def _limits_of(request: LoadRequest) -> dict[str, float]:
    return {} if request.slo is None else {name: ms for name, ms in asdict(request.slo).items() if ms is not None}


def _body(config: ServeConfig, name: str, tree: str, request: LoadRequest, salt: str) -> dict[str, Any]:
    body = {"model": name, **config.fields_of(tree, request.prompt)}
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
    if request.slo is not None and config.sends_slo:
        body["slo"] = _limits_of(request)
    return body | {"cache_salt": salt} if config.sends_again else body


def _check_served(results: Sequence[RateResult]) -> None:
    for result in results:
        for arm in result.arms:
            if not arm.served:
                raise RuntimeError(f"tree {arm.name}: no request was served; the first: {arm.runs[0].error}")


# ----------------------------------------------------------------------------------- the overhead


def _measure_overhead(
    config: ServeConfig, address: ServerAddress, name: str, prompts: Sequence[str], model: str, dtype: str
) -> Overhead:
    """Compare streaming over HTTP with the same process, alternating, with plain decoding: one event for each token."""
    added, first, local = [], [], []
    with LLM(model, drafters=[], tree="off", device=config.device, **load_options_of(config, dtype)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=config.max_tokens, ignore_eos=True)
        with closing(HTTPConnection(urlsplit(address.url).netloc)) as connection:
            for number in range(-1, len(prompts)):
                prompt = prompts[number]
                ours = _local_times(llm, prompt, params)
                body = _plain_body(config, name, prompt, f"overhead-{number}")
                run = send_alone(connection, PATHS["completions"], body, address.api_key)
                if not run.is_served:
                    raise RuntimeError(f"overhead: {run.error}")
                if number < 0:
                    continue  # warm-up
                added.append(1000 * (run.tpot - ours[1]))
                first.append(1000 * (run.ttft - ours[0]))
                local.append(1000 * ours[1])
    return Overhead(Spread.from_values(added), Spread.from_values(first), Spread.from_values(local), len(added))


def _local_times(llm: LLM, prompt: str, params: SamplingParams) -> tuple[float, float]:
    """Return the seconds to the first token and the mean seconds of each later one."""
    start = time.perf_counter()
    first, count, now = 0.0, 0, start
    for chunk in llm.stream(prompt, params):
        now = time.perf_counter()
        first = first or now
        count += len(chunk.token_ids)
    return first - start, (now - first) / max(count - 1, 1)


def _plain_body(config: ServeConfig, name: str, prompt: str, salt: str) -> dict[str, Any]:
    fields: Mapping[str, Any] = config.fields_of(PLAIN, prompt) | {"temperature": 0.0, "prompt": prompt}
    body = {key: value for key, value in fields.items() if key != "messages"}
    return body | {"model": name, "cache_salt": salt}
