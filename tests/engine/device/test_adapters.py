"""Requests with adapters in steps on the device, by the plain twins of its kernels."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from adapters import save_adapter
from on_device import executor_of, load_plain, make_device_engine, run_on_device
from specinfer import SamplingParams
from specinfer.core.lora import Adapter, LoRAConfig, LoRARequest
from specinfer.core.request import Request
from specinfer.core.tree import TreeBudget
from specinfer.engine.device.draft_shape import PLAIN
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.engine import Engine
from specinfer.model.adapters.registry import Adapters
from specinfer.model.layers.device import DeviceDecoder
from specinfer.model.load import LoadedModel
from specinfer.ops import AdapterSlots
from specinfer.ops.cpu import low_rank
from tests.engine.device.late_stream import LateStream, make_executor_late
from tiny import make_request, random_prompts, run

TREES = {
    "off": None,
    "2,2,1": TreeBudget.expansion((2, 2, 1)),
    "best-first": TreeBudget(max_nodes=8, max_depth=4),
}
PROMPTS = random_prompts([3, 26, 12, 40, 7, 31], seed=4)
MAX_LORAS = 2


class Models:
    """A target with three adapters, and a drafter.

    Attributes:
        given: The adapter of each request, or None.
    """

    def __init__(self, target: LoadedModel, small: LoadedModel, base: Path, folder: Path) -> None:
        self.target, self.small = target, small
        self._adapters = Adapters(target, LoRAConfig(MAX_LORAS, 8, 4), "base")
        found: list[Adapter] = []
        for i in (1, 2, 3):
            saved = save_adapter(folder / str(i), base, i, r=2 * i)
            found.append(self._adapters.find(LoRARequest(f"a{i}", i, str(saved))))
        self.given = [found[0], None, found[1], found[0], None, found[2]]

    def adapter_slots(self) -> AdapterSlots:
        return self._adapters._sites.adapter_slots(self._adapters.config)

    def requests(self, *, adapts: bool = True) -> list[Request]:
        result = []
        for i, (prompt, adapter) in enumerate(zip(PROMPTS, self.given, strict=True)):
            params = SamplingParams(temperature=(0.0, 0.8)[i // 2 % 2], max_tokens=10 + 4 * (i % 3), ignore_eos=True)
            salt = "" if adapter is None or not adapts else adapter.salt
            own = adapter if adapts else None
            result.append(make_request(str(i), prompt, params, seed=i, adapter=own, cache_salt=salt))
        return result

    def engine(
        self, tree: TreeBudget | None, *, has_device_executor: bool = True, verification: str = "coupled"
    ) -> Engine:
        small = None if tree is None else self.small
        engine = make_device_engine(
            self.target, small, tree, has_device_executor=has_device_executor, verification=verification,
            max_loras=MAX_LORAS,
        )  # fmt: skip
        if (padded := engine.target.padded) is not None:  # type: ignore[attr-defined]
            padded.adapter_slots = self.adapter_slots()
        return engine


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "packs", lambda _: False)


@pytest.fixture(scope="module", params=["definition", "fused"])
def models(
    request: pytest.FixtureRequest, model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Models:
    base = model_folder("llama")
    loaded = load_plain(base)
    if request.param == "fused":
        loaded = replace(loaded, model=DeviceDecoder(loaded.model, loaded.max_position).eval())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank, "packs", lambda _: False)
        return Models(loaded, load_plain(model_folder("llama", 0, 0.05)), base, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def plain(models: Models) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank, "packs", lambda _: False)
        return run(models.engine(None, has_device_executor=False), models.requests())


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", TREES)
def test_each_request_has_its_adapter(tree: str, models: Models, plain: list[list[int]]) -> None:
    """The tokens of host steps one by one; requests with a third adapter wait until one of the others is done."""
    engine, requests = models.engine(TREES[tree]), models.requests()
    served = run_on_device(engine, requests)
    assert [request.output_ids for request in requests] == plain
    assert served == set(requests)
    without = models.requests(adapts=False)
    run_on_device(models.engine(TREES[tree]), without)
    for request, other, adapter in zip(requests, without, models.given, strict=True):
        assert (request.output_ids != other.output_ids) == (adapter is not None)


@pytest.mark.covering(2)
@pytest.mark.parametrize("tree", ["off", "2,2,1"])
@pytest.mark.parametrize("verification", ["coupled", "multi-step"])
def test_adapters_of_steps_in_flight_are_not_mixed_up(
    tree: str, verification: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(models.engine(TREES[tree], has_device_executor=False, verification=verification), models.requests())
    stream = LateStream()
    make_executor_late(stream, monkeypatch)
    engine = models.engine(TREES[tree], verification=verification)
    assert run(engine, models.requests()) == wanted
    assert executor_of(engine).num_launched >= 10
    assert stream.longest >= 6, "two steps were never in flight"


def test_steps_without_adapters_need_no_adapter_slots(models: Models) -> None:
    """A step with them holds one without; nothing is read of slots where no request has one."""
    sizes = LaunchSize(2, PLAIN), LaunchSize(2, PLAIN, adapts=True)
    assert sizes[1].holds(sizes[0])
    assert not sizes[0].holds(sizes[1])
    engine = models.engine(None)
    run(engine, models.requests(adapts=False))
    assert not any(size.adapts for size in executor_of(engine)._device.sizes.found)
    run(engine, models.requests())
    assert any(size.adapts for size in executor_of(engine)._device.sizes.found)


def test_requests_with_adapters_take_host_steps_where_there_are_no_adapter_slots(models: Models) -> None:
    engine, requests = models.engine(None), models.requests()
    assert engine.target.padded is not None  # type: ignore[attr-defined]
    engine.target.padded.adapter_slots = None  # type: ignore[attr-defined]
    assert run_on_device(engine, requests) == {one for one in requests if one.adapter is None}
