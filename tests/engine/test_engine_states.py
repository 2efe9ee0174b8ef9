"""The engine under any order of joining, leaving and stepping: a state machine.

Slots are few, prompts begin alike, some requests are worth more than others: requests wait, share, are put back and
read again. Whoever is not sent away must say what plain decoding says, and nothing may be left behind.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.drafters import MergedDrafter, NGramDrafter, SmallModelDrafter
from specinfer.model.runner import ModelRunner
from tests.engine.delayed import Delayed
from tiny import VOCAB, make_engine, make_request, random_prompts, resized, run

Runners = Callable[..., ModelRunner]
_STEM = random_prompts([30], seed=1)[0]
_ENDS = random_prompts([1, 2, 5, 12, 25], seed=2)
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(max_tokens=14, seed=3),
    SamplingParams(max_tokens=4, top_p=0.8, presence_penalty=1.0, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=0),
    SamplingParams(max_tokens=9, tree="off"),
)
_MIXED = ("lfm2", "qwen3_5_text", "granitemoehybrid")  # families, one for each kind of layer without attention


def _settings(max_examples: int, num_steps: int) -> settings:
    return settings(
        max_examples=max_examples, stateful_step_count=num_steps, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def _machine(runners: Runners, max_in_flight: int = 1, family: str = "llama") -> Any:
    wanted: dict[tuple[Any, ...], list[int]] = {}

    def plain(prompt: list[int], params: SamplingParams) -> list[int]:
        key = (*prompt, id(params))
        if key not in wanted:
            engine = make_engine(resized(runners(family), 100))
            wanted[key] = run(engine, [make_request("w", prompt, params, seed=5)])[0]
        return wanted[key]

    class States(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            target = Delayed(resized(runners(family), 110, keeps_prefixes=True), max_in_flight)
            small = SmallModelDrafter(resized(runners(family, 0, 0.15), 90, keeps_prefixes=True), VOCAB, "small")
            drafter = MergedDrafter([small, NGramDrafter()])
            self.engine = make_engine(target, drafter, (2, 1), max_num_seqs=3, max_num_batched_tokens=24)
            self.small = small
            self.live: list[Request] = []
            self.count = 0

        @rule(
            length=st.integers(0, 30),
            end=st.sampled_from(_ENDS),
            params=st.sampled_from(PARAMS),
            salt=st.sampled_from(["", "", "x", None]),
            tenant=st.sampled_from("ab"),
            priority=st.integers(0, 1),
        )
        def join(self, length: int, end: list[int], **fields: Any) -> None:
            params, salt = fields.pop("params"), fields.pop("salt")
            request = make_request(f"r{self.count}", [*_STEM[:length], *end], params, seed=5, cache_salt=salt, **fields)
            self.count += 1
            self.live.append(request)
            self.engine.add(request)

        @precondition(lambda self: self.live)
        @rule(data=st.data(), error=st.sampled_from([None, "told to"]))
        def leave(self, data: st.DataObject, error: str | None) -> None:
            request = data.draw(st.sampled_from(self.live))
            self.live.remove(request)
            self.engine.abort(request, error)
            self.engine.abort(request)  # again is no harm

        @rule(count=st.integers(1, 4))
        def step(self, count: int) -> None:
            for _ in range(count):
                self.engine.step()
            for request in [request for request in self.live if request.is_finished]:
                self._check(request)

        def _check(self, request: Request) -> None:
            self.live.remove(request)
            assert request.error is None
            assert request.output_ids == plain(request.prompt_ids, request.params)
            assert len(request.logprobs) == (request.num_output if request.params.logprobs is not None else 0)

        def teardown(self) -> None:
            for _ in range(400):
                if not self.engine.has_work:
                    break
                self.step(1)
            assert not self.live, "someone waits for ever"
            assert not self.engine.scheduler.waiting._served, "nothing is kept of tenants"
            for cache in (self.engine.target.cache, self.small.runner.cache):
                assert cache.num_owned == 0
                assert cache.num_available == cache.num_slots
            assert not self.engine.scheduler.turns.in_flight
            assert not self.engine.scheduler.turns._last
            assert not self.small._cache.known
            assert not self.small._cache._salts

    return States


@pytest.mark.parametrize("max_in_flight", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_any_order_of_things(max_in_flight: int, runner_of: Runners) -> None:
    run_state_machine_as_test(
        _machine(runner_of, max_in_flight),
        settings=_settings(15, 25),
    )


@pytest.mark.parametrize("family", _MIXED)
def test_any_order_of_things_without_attention_in_some_layers(family: str, runner_of: Runners) -> None:
    run_state_machine_as_test(_machine(runner_of, family=family), settings=_settings(3, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [*_MIXED, "falcon_h1", "jamba", "mamba2", "kimi_linear", "minimax", "recurrent_gemma"]
)
def test_any_order_of_things_without_attention_in_some_layers_for_long(family: str, runner_of: Runners) -> None:
    run_state_machine_as_test(_machine(runner_of, family=family), settings=_settings(30, 40))


@pytest.mark.slow
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_any_order_of_things_for_long(max_in_flight: int, runner_of: Runners) -> None:
    run_state_machine_as_test(
        _machine(runner_of, max_in_flight),
        settings=_settings(300, 60),
    )
