"""What every test shares: small models made once, and a look at all caches after each test."""

import gc
import logging
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's library is imported: tests never use a network

# What runs faster here is not for tests to find out: instructions of number types wherever there are any.
os.environ.setdefault("SPECINFER_NATIVE", "always")

# Threads that read a tiny model take longer to start than to read it: a tenth of each load.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

import numpy as np
import pytest
import torch
import typer

# Triton's kernels run in its interpreter, which must be known before they are defined; on a GPU they are compiled.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import HealthCheck, settings

from reference import device
from specinfer.core.files import cache_folder
from specinfer.core.request import Request
from specinfer.demo import pair
from specinfer.engine.device.executor import DeviceExecutor
from specinfer.engine.engine import Engine
from specinfer.model.kv_cache import KVCache
from specinfer.model.runner import ModelRunner
from tiny import load_runner, save_model, save_tokenizer

device.install()

pytest_plugins = ["covering", "native", "real_models", "small_demo"]

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
gc.disable()  # while modules are imported and tests are collected, which all stay

torch.set_num_threads(1)  # the models are far too small to share
# The same examples on every run: a test of floating-point numbers must not fail by chance.
settings.register_profile(
    "suite",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("suite")

_RUNNERS: "weakref.WeakSet[ModelRunner]" = weakref.WeakSet()
_USED: "weakref.WeakSet[KVCache]" = weakref.WeakSet()  # since they were last found empty


# Files that take long, most of them because they wait for processes of their own: first, so that no worker is left with
# one in the end.
_LONG = (
    "engine/device/test_heads.py", "parallel/test_ranks_health.py", "parallel/test_ranks.py",
    "parallel/test_ranks_adapters.py", "test_other_systems.py", "server/test_supervisor.py", "server/test_serve.py",
    "server/test_openapi.py", "inputs/test_text_reader.py", "learning/test_tune.py", "learning/test_adaptation.py",
    "model/test_real_models.py", "engine/device/test_executor.py", "verify/test_sampling_distribution.py",
    "cli/test_cli.py", "core/test_grammar.py", "verify/test_lossless.py", "test_examples.py",
    "model/offload/test_memory.py", "ops/test_programs.py", "server/test_bad_input_http.py",
    "drafters/test_feature_drafters.py", "ops/test_team.py", "verify/test_exactness.py",
    "learning/test_head_training.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests, last = Path(__file__).parents[1], len(_LONG)
    order = {tests / name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path, last))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of every later collection of garbage, of which there are a tenth of the usual."""
    gc.freeze()
    gc.set_threshold(7000)
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else libraries report what is left as leaks


@pytest.fixture(scope="session", autouse=True)
def _frozen_stays_frozen() -> Iterator[None]:
    """A server that ends thaws whatever is frozen: each full collection would search all tests again, for 0.3 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs and the like are neither taken from the user's cache nor left there; compiled kernels are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR", str(cache_folder() / "triton")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_ceilings() -> Iterator[None]:
    """How fast this machine is, is not for tests to find out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specinfer.bench.ceilings._CPU_BYTES", 2**22)
        patch.setattr("specinfer.bench.ceilings._CPU_SIDE", 64)
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_costs() -> Iterator[None]:
    """Costs of steps are measured in few rounds, without emptying caches: that took most of making an LLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specinfer.policy.cost_measurement._MORE_THAN_CACHED", 1)
        patch.setattr("specinfer.policy.cost_measurement._MOST_ROUNDS", 5)
        yield


@pytest.fixture(scope="session", autouse=True)
def _long_steps() -> Iterator[None]:
    """Triton's interpreter takes half a second for a step. Outputs would take turns, and trees depend on the load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specinfer.engine.fair_steps.ALONE", 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_lines_of_stages() -> Iterator[None]:
    """A stage of loading has a line on standard error if it takes long, which depends on the load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specinfer.cli.loading.LONG", float("inf"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_made_once() -> Iterator[None]:
    """A command line is the same whenever it is run, and takes a tenth of a second to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def _embedded_files_digested_once() -> Iterator[None]:
    """Each use of the embedded models compares all their files with checksums, which takes longer than a short text."""
    digest = pair.digest

    @cache
    def known(path: Path, *_: int) -> str:
        return digest(path)

    def remembered(path: Path) -> str:
        state = path.stat()
        return known(path, state.st_ino, state.st_size, state.st_mtime_ns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "digest", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def _watched_engines() -> Iterator[None]:
    """Every runner is known to the check below; every step of every engine leaves its cache in order."""
    with pytest.MonkeyPatch.context() as patch:
        make, step, reserve = ModelRunner.__init__, Engine.step, KVCache.reserve

        def recorded(self: ModelRunner, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            _RUNNERS.add(self)

        def checked(self: Engine) -> list[Request]:
            said = step(self)
            _check_step(self)
            return said

        def noted(self: KVCache, request_id: str, count: int) -> Any:
            _USED.add(self)
            return reserve(self, request_id, count)

        patch.setattr(KVCache, "reserve", noted)
        patch.setattr(ModelRunner, "__init__", recorded)
        patch.setattr(Engine, "step", checked)
        yield


def _check_step(engine: Engine) -> None:
    cache, running = engine.target.cache, engine.scheduler.running
    assert cache.is_balanced()
    in_flight = {span.request for span in engine.host.spans}
    on_device = {request for one in engine.executors if isinstance(one, DeviceExecutor) for request in one.requests}
    assert not in_flight & on_device
    in_flight |= on_device
    assert in_flight == engine.scheduler.turns.in_flight
    names = {request.request_id for request in (*running, *in_flight)}
    held = [slot for name in names for slot in cache.slots(name)[cache.num_shared(name) :].tolist()]
    held += [slot for name in names for slot in cache.reserved(name).tolist()]
    assert len(held) == len(set(held)) == cache.num_owned, "a slot is held twice, or by nobody who runs"
    for request in running:
        assert len(cache.slots(request.request_id)) == request.num_computed < len(request.token_ids)
        is_reserved = bool(len(cache.reserved(request.request_id)))
        # On the device there may be nothing in flight while a drafter is to read what was said.
        assert is_reserved <= (request in in_flight) if request in on_device else is_reserved == (request in in_flight)
    for request in engine.scheduler.waiting:
        assert not len(cache.slots(request.request_id))


def check_empty(cache: KVCache) -> None:
    """Free + cached + held = total, nothing is held, and each slot is there once. Empties the cache of prefixes."""
    assert cache.num_owned == 0
    assert cache.num_free + cache.num_cached + cache.num_owned == cache.num_slots
    free = cache.reserve("check", cache.num_available)  # what is cached is given up for it
    cache.free("check")
    assert np.array_equal(np.sort(free), np.arange(cache.num_slots))


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Commands send the log to their standard error, which is closed when the next test writes to it."""
    root, ours = logging.getLogger(), logging.getLogger("specinfer")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level = before[0], before[1]
    ours.setLevel(before[2])
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def _pools_balance() -> Iterator[None]:
    """After every test, the pools that it used, of all models that are still there: targets' and drafters'."""
    yield
    for runner in [runner for runner in _RUNNERS if runner.cache in _USED]:
        try:
            check_empty(runner.cache)
        except BaseException:
            _RUNNERS.discard(runner)  # the tests that follow are not to blame
            raise
    _USED.clear()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model, made once: `model_folder(family, seed, noise, tokenizer=..., **changes)`."""
    made: dict[str, Path] = {}

    def folder(
        family: str = "llama", seed: int = 0, noise: float = 0.0, *, tokenizer: bool = False, **changes: Any
    ) -> Path:
        key = repr((family, seed, noise, tokenizer, sorted(changes.items())))
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp(family), family, seed, noise, **changes)
            if tokenizer:
                save_tokenizer(made[key])
        return made[key]

    return folder


@pytest.fixture(scope="session")
def runner_of(model_folder: Callable[..., Path]) -> Callable[..., ModelRunner]:
    """The same, loaded once; take a cache of your own with `tiny.resized` where its size matters."""
    loaded: dict[tuple[Path, str | None], ModelRunner] = {}

    def runner(*args: Any, quantization: str | None = None, **kwargs: Any) -> ModelRunner:
        key = model_folder(*args, **kwargs), quantization
        if key not in loaded:
            loaded[key] = load_runner(key[0], quantization=quantization)
        return loaded[key]

    return runner
