"""Kept states of recurrent layers: they save work, and no token depends on which are kept, or on a pass that failed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import reference
from specinfer.core.config import EngineConfig
from specinfer.core.errors import ModelError
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree
from specinfer.drafters import SmallModelDrafter
from specinfer.model.batch import Piece
from specinfer.model.capacity import bytes_per_token, num_states, plan_capacity
from specinfer.model.load import load_model
from specinfer.model.recurrent.delta import KimiDelta
from specinfer.model.recurrent.layers import kept_states
from specinfer.model.recurrent.scan import Scan, parents_of
from specinfer.model.recurrent.states import RecurrentStates
from specinfer.model.runner import ModelRunner
from tiny import VOCAB, make_engine, make_model, make_request, random_prompts, run

Runners = Callable[..., ModelRunner]
FAMILY = "qwen3_5_text"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = random_prompts([3, 20, 33, 9])
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    model = make_model(FAMILY)
    return [reference.greedy(model, prompt, 12) for prompt in PROMPTS]


def _target(runners: Runners, num_kept: int, num_slots: int = 512, family: str = FAMILY) -> ModelRunner:
    return ModelRunner(runners(family).loaded, num_slots, keeps_prefixes=True, num_states=num_kept)


def _outputs(runners: Runners, target: ModelRunner, family: str = FAMILY) -> list[list[int]]:
    small = SmallModelDrafter(ModelRunner(runners(family, 0, 0.15).loaded, 512), VOCAB, "small")
    engine = make_engine(target, small, (2, 2, 1), max_num_batched_tokens=16)
    return run(engine, [make_request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)])


@pytest.mark.parametrize("num_kept", [0, 1, 4, 16])
def test_tokens_do_not_depend_on_how_many_states_are_kept(
    num_kept: int, runner_of: Runners, wanted: list[list[int]]
) -> None:
    assert _outputs(runner_of, _target(runner_of, num_kept)) == wanted


def test_a_state_of_a_rejected_branch_is_noticed(
    runner_of: Runners, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known-wrong arm: the state after the last node of a tree is kept as that after its root."""

    def made(self: Scan, *args: Any) -> None:
        make(self, *args)
        self._pieces = [replace(piece, num_known=len(piece.slots)) for piece in self._pieces]  # type: ignore[type-var]

    make = Scan.__init__
    monkeypatch.setattr(Scan, "__init__", made)
    assert _outputs(runner_of, _target(runner_of, 16)) != wanted


def test_a_pass_that_fails_between_layers_leaves_no_half_written_state(
    runner_of: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a family whose layers are not fused."""
    family = "kimi_linear"
    wanted = [reference.greedy(make_model(family), prompt, 12) for prompt in PROMPTS]
    target, num_calls = _target(runner_of, 16, family=family), 0
    last = [module for module in target.loaded.model.modules() if isinstance(module, KimiDelta)][-1]

    def failing(module: nn.Module, _args: Any) -> None:
        nonlocal num_calls
        num_calls += module is last
        if module is last and num_calls in (4, 9):
            raise RuntimeError("a pass that fails")

    handle = last.register_forward_pre_hook(failing)
    try:
        assert _outputs(runner_of, target, family) == wanted
    finally:
        handle.remove()
    assert num_calls > 9


def test_tokens_are_scanned_once_and_prefixes_continue_at_a_kept_state(
    runner_of: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: dict[Scan, int] = {}  # by pass
    arrays = Scan._arrays

    def counted(self: Scan) -> Any:
        found = arrays(self)
        scanned[self] = len(found[0])
        return found

    monkeypatch.setattr(Scan, "_arrays", counted)
    target, (prompt,) = _target(runner_of, 16), random_prompts([60])
    run(make_engine(target, max_num_batched_tokens=16), [make_request("a", prompt, GREEDY)])
    assert sum(scanned.values()) == 60 + 12 - 1
    scanned.clear()
    run(make_engine(target), [make_request("b", [*prompt[:50], 1, 2], GREEDY)])
    # Of the 50 cached tokens, chunks ended after 16, 32 and 48.
    assert next(iter(scanned.values())) == 2 + 2
    assert sum(scanned.values()) == 4 + 12 - 1


@pytest.mark.parametrize(("num_chain", "parents"), [(1, (-1,)), (5, (-1,)), (1, (-1, 0, 0, 1, 2)), (4, (-1, 0, 0, 2))])
def test_parents_after_a_chain_are_those_of_a_search_from_its_start(num_chain: int, parents: tuple[int, ...]) -> None:
    tree = TokenTree(tuple(range(len(parents))), parents)
    new = num_chain + len(parents) - 1
    piece = Piece.from_span([0] * num_chain, tree, np.arange(3), np.arange(3, 3 + new))
    chain = list(range(-1, 3 + num_chain - 1))
    wanted = [*chain, *(3 + num_chain - 1 + parent for parent in parents[1:])]
    assert parents_of(piece).tolist() == wanted
    assert parents_of(replace(piece, num_known=0)).tolist() == wanted


def test_the_least_recently_used_state_makes_way() -> None:
    states = RecurrentStates({0: (2,)}, 2, 10, CPU)

    def keep(*slots: int) -> list[int]:
        states.begin([np.asarray(slots)])
        rows = [states.claim(slot) for slot in slots]
        states.wrote(0)
        return rows

    assert sorted(keep(1, 2)) == [0, 1]
    states.begin([])
    assert states.find(np.asarray([0, 1, 5]))[0] == 2  # used now
    keep(3)
    assert [states.find(np.asarray([slot]))[0] for slot in (1, 2, 3)] == [1, 0, 1]
    assert keep(5, 6, 7)[2] == -1  # a pass takes no row twice
    states.begin([np.asarray([5])])  # another token is computed for the slot
    assert [states.find(np.asarray([slot]))[0] for slot in (5, 6)] == [0, 1]


def test_a_row_that_a_request_reads_is_written_for_no_other_one() -> None:
    states = RecurrentStates({0: (2,)}, 2, 10, CPU)

    def of_pass(*prefixes_and_slots: tuple[int, int]) -> list[tuple[int, int]]:
        states.begin([np.asarray([slot]) for _, slot in prefixes_and_slots])
        read = [states.find(np.asarray([prefix]))[1] for prefix, _ in prefixes_and_slots]
        claimed = [states.claim(slot, row) for (_, slot), row in zip(prefixes_and_slots, read, strict=True)]
        states.wrote(0)
        return list(zip(read, claimed, strict=True))

    ((_, first), (_, second)) = of_pass((8, 0), (9, 1))
    assert of_pass((0, 2), (1, 3)) == [(first, first), (second, second)]
    # Both read one row: the first takes the other, and there is none for the second.
    assert of_pass((2, 4), (2, 5)) == [(first, second), (first, -1)]


def test_a_single_request_uses_no_more_rows_than_it_keeps_states() -> None:
    states = RecurrentStates({0: (1,)}, 8, 16, CPU)
    rows = set()
    for _ in range(5):  # slot 0 is that of a prefix, slot 1 is overwritten by every pass
        for slot in (0, 1) if not rows else (1,):
            states.begin([np.array([slot])])
            rows.add(states.claim(slot))
            states.wrote(0)
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("nemotron_h", "n_groups", 3),
        ("nemotron_h", "mamba_num_heads", 3),
        ("bamba", "mamba_n_groups", 3),
        ("qwen3_5_text", "linear_num_key_heads", 3),
    ],
)
def test_heads_that_do_not_fit_their_keys_are_refused(
    family: str, field: str, value: int, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder(family, **{field: value})
    with pytest.raises(ModelError, match=rf"heads of keys cannot serve .* correct .*\b{field}\b.* in config.json"):
        load_model(folder, torch.float32, CPU)


def test_states_are_part_of_the_memory_plan(runner_of: Runners, caplog: pytest.LogCaptureFixture) -> None:
    loaded = runner_of(FAMILY).loaded
    each = sum(pool.nbytes for pool in kept_states(loaded.model, 1, 8, CPU).pools.values())

    def plan(memory: int) -> tuple[int, int]:
        config = EngineConfig(max_num_seqs=4, max_model_len=8, kv_cache_memory_bytes=memory)
        return num_states(config, [loaded], memory), plan_capacity(config, loaded, [])[1] * bytes_per_token([loaded])

    num_kept, taken = plan(17 * each + 10_000)
    assert num_kept == 8  # two for each request
    assert taken <= 9 * each + 10_000
    assert not caplog.messages
    num_kept, taken = plan(7 * each)
    assert num_kept == 3
    assert taken <= 4 * each
    assert "lower max_num_seqs" in caplog.text
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes: a state of the recurrent layers takes .* raise it"):
        plan(each)
