"""Verification on an accelerator: what is accepted is what the host accepts, and the host waits once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interpreter import interpreted
from on_device import check_left, load_plain, make_device_engine
from specinfer import SamplingParams, StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.request import Request
from specinfer.core.sampling import EFFECTS
from specinfer.core.tree import Draw, TokenTree, TreeBudget
from specinfer.engine.device.conditions import why_on_host
from specinfer.model.graphs.capture import SynchronizationCheck, SynchronizationError
from specinfer.model.load import LoadedModel
from specinfer.ops import logits as ops_logits
from specinfer.ops import tree_ops
from specinfer.ops.cpu import transfers
from specinfer.ops.logits import DEVICE_FIELDS
from specinfer.ops.trees import WalkInputs
from specinfer.ops.triton import multi_step, traversal
from specinfer.verify import Acceptance, batch, device_batch, device_trees, verify
from specinfer.verify import logits as logits_module
from specinfer.verify.device_trees import NodeScores, ScoredTree, parameters_of
from tiny import EOS, VOCAB, make_request, make_tokenizer, random_prompts, run
from tree_cases import drawn_tree

COMPILER = GrammarCompiler(make_tokenizer(), VOCAB, (EOS,))
SAMPLED = SamplingParams(temperature=0.9)
# Parameters, verification rule, and other constraints of requests.
ASKED: list[tuple[SamplingParams, str, dict[str, Any]]] = [
    (SamplingParams(temperature=0.0), "traversal", {}),
    (SamplingParams(temperature=0.0, repetition_penalty=1.5), "multi-step", {}),
    (SAMPLED, "coupled", {}),
    (SAMPLED, "multi-step", {}),
    (SAMPLED, "traversal", {}),
    (replace(SAMPLED, tree="off"), "traversal", {}),
    (replace(SAMPLED, top_p=0.8), "target-only", {}),
    (replace(SAMPLED, top_k=8), "multi-step", {}),
    (replace(SAMPLED, min_p=0.05, top_p=0.9, temperature=1.4), "traversal", {}),
    (replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.4), "multi-step", {}),
    (replace(SAMPLED, frequency_penalty=0.7, top_k=20), "traversal", {}),
    (replace(SAMPLED, logit_bias={5: 3.0, 9: -100.0}, allowed_token_ids=range(80)), "multi-step", {}),
    (replace(SAMPLED, min_tokens=4, stop_token_ids=list(range(10, 40))), "traversal", {}),
    (replace(SAMPLED, min_tokens=3, stop_token_ids=[8]), "coupled", {"regex": "[a-z]{0,9}"}),
    (SAMPLED, "multi-step", {"bad_words": [(token,) for token in range(30)]}),
    (SAMPLED, "coupled", {"bad_words": [(3, token) for token in range(VOCAB)]}),
    (SAMPLED, "multi-step", {"regex": "[a-z ]+"}),
    (replace(SAMPLED, top_k=12), "traversal", {"regex": "[a-z ]+", "bad_words": [(40,), (41,)]}),
    (SAMPLED, "coupled", {"regex": "[a-z ]+"}),
    (SamplingParams(temperature=0.0), "coupled", {"grammar": 'start: /[e-k ]+/ "." start?'}),
    (SamplingParams(logprobs=2), "traversal", {"regex": "(the|a[n-t]*){2,4}"}),
]  # fmt: skip


def _request(number: int) -> Request:
    params, rule, constraints = ASKED[number]
    request = make_request(str(number), [1, 2, 0], params, seed=100 + number, eos_token_ids=(EOS,))
    request.verification = rule
    request.bad_words_ids = tuple(constraints.get("bad_words", ()))
    grammars = {name: value for name, value in constraints.items() if name != "bad_words"}
    if grammars:
        request.grammar = COMPILER.compile(StructuredOutputsParams(**grammars))
    else:
        request.append(0, None)
    return request


def _tree(kind: str, seed: int, logits: Tensor) -> TokenTree:
    """A tree for these logits, of which there are more rows than it needs."""
    source = np.random.default_rng(seed)
    drawn = drawn_tree(source, 1 + seed % 8, 5, logits)
    if kind == "drawn":
        return drawn
    if kind == "root":
        return TokenTree.root(0)
    if kind == "chain":
        return TokenTree.chain(0, [int(logits[0].argmax()), 3, 4])
    if kind == "merged":
        return TokenTree.merge([drawn, drawn_tree(source, 4, 6, logits)])
    assert kind == "hybrid"  # siblings of which the first is drawn, and the others are chosen
    seen, draws = set[int](), list[Draw]()
    for draw in drawn.draws:
        parent = drawn.parents[draw.node]
        draws.append(Draw(draw.node, "a", None if parent in seen else draw.distribution))
        seen.add(parent)
    return TokenTree(drawn.tokens, drawn.parents, draws)


KINDS = ("drawn", "root", "chain", "merged", "hybrid")
Verified = tuple[list[Acceptance], list[int]]


def _verified(numbers: Sequence[int], logits: Sequence[Tensor], forest: Sequence[TokenTree]) -> Verified:
    """What is accepted, and the states of the random numbers after it."""
    requests = [_request(number) for number in numbers]
    return verify("coupled", logits, requests, forest), [request.uniforms.state for request in requests]


def _apart(patch: pytest.MonkeyPatch, *, has_kernels: bool = True) -> None:
    """As on an accelerator, whose tensors are on the CPU."""
    patch.setattr(transfers, "is_apart", lambda _: True)
    patch.setattr(batch, "runs_on", lambda _: has_kernels)


def _logits(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((16, VOCAB), generator=generator) * 2 for _ in range(count)]


Cases = tuple[list[Tensor], list[TokenTree]]


def _cases(kinds: Sequence[str], seeds: Sequence[int], logits_seed: int) -> Cases:
    """Return logits, and for each a tree of one of the kinds with as many nodes as there are rows."""
    logits = _logits(len(kinds), logits_seed)
    forest = [_tree(*case) for case in zip(kinds, seeds, logits, strict=True)]
    return [rows[: len(tree)] for rows, tree in zip(logits, forest, strict=True)], forest


def _as_on_the_host(
    asked: Sequence[tuple[int, str]], seed: int, spoil: Callable[[int, Tensor], None], **options: bool
) -> None:
    numbers, kinds = zip(*asked, strict=True)
    logits, forest = _cases(kinds, range(seed, seed + len(kinds)), seed)
    for i, rows in enumerate(logits):
        spoil(i, rows)
    before = [rows.numpy().tobytes() for rows in logits]
    wanted = _verified(numbers, logits, forest)
    with pytest.MonkeyPatch.context() as patch:
        _apart(patch, **options)
        assert _verified(numbers, logits, forest) == wanted
    assert [rows.numpy().tobytes() for rows in logits] == before, "logits are not changed"


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, len(ASKED) - 1), st.sampled_from(KINDS)), min_size=1, max_size=7),
    st.integers(0, 999),
    st.sampled_from([None, None, math.nan, -math.inf]),
    st.booleans(),
)
def test_decisions_are_those_of_the_host(
    asked: list[tuple[int, str]], seed: int, spoiled: float | None, has_kernels: bool
) -> None:
    def spoil(i: int, rows: Tensor) -> None:
        if spoiled is not None and (i + seed) % 2:
            rows[seed % len(rows), : VOCAB if spoiled == -math.inf else 1] = spoiled

    _as_on_the_host(asked, seed, spoil, has_kernels=has_kernels)


@interpreted
@pytest.mark.parametrize("seed", range(3))
def test_decisions_of_kernels_are_those_of_the_host(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests in one step, over the same tensors as on a GPU."""
    monkeypatch.setattr(tree_ops, "walk_multi_step", multi_step.walk_multi_step)
    monkeypatch.setattr(tree_ops, "walk_traversal", traversal.walk_traversal)
    asked = [(number, KINDS[(number + seed) % len(KINDS)]) for number in range(len(ASKED))]
    _as_on_the_host(asked, seed, lambda *_: None)


@pytest.mark.parametrize("is_stated", [True, False])
def test_fields_that_no_device_applies_are_applied_by_the_host(
    is_stated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if `min_p` and `frequency_penalty` had been added to `SamplingParams`, and not to kernels."""
    added = {"min_p", "frequency_penalty"}
    numbers = [i for i, (_, _, fields) in enumerate(ASKED) if not fields]
    logits, forest = _cases(["drawn"] * len(numbers), range(len(numbers)), 5)
    wanted = _verified(numbers, logits, forest)
    device = list[int]()

    def counted(rules: Any, logits: Any, requests: Sequence[Request], trees: Any) -> list[Acceptance]:
        device.extend(int(request.request_id) for request in requests)
        return device_batch.verify_on_device(rules, logits, requests, trees)

    monkeypatch.setattr(ops_logits, "DEVICE_FIELDS", DEVICE_FIELDS - added)
    monkeypatch.setattr(ops_logits, "_host_defaults", ops_logits._host_defaults.__wrapped__)
    if not is_stated:
        monkeypatch.setattr(ops_logits, "EFFECTS", {name: EFFECTS[name] for name in EFFECTS if name not in added})
    _apart(monkeypatch)
    monkeypatch.setattr(batch, "verify_on_device", counted)
    assert _verified(numbers, logits, forest) == wanted
    reasons = [why_on_host(_request(i), may_follow=True, may_sample=True) for i in numbers]
    skipped = [i for i in numbers if ASKED[i][0].min_p or ASKED[i][0].frequency_penalty]
    assert len(skipped) == 2
    assert [i for i, reason in zip(numbers, reasons, strict=True) if "cannot be applied" in str(reason)] == skipped
    assert len(device) == len(numbers) - 2


def test_trees_with_draws_from_too_many_tokens_go_to_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of a node are given to a kernel over all tokens of any of them; a host walks other trees next to those."""
    logits, forest = _cases(("drawn", "merged", "chain", "hybrid", "drawn", "root"), range(13, 7, -1), 3)
    monkeypatch.setattr(device_trees, "MOST_TOKENS", 5)
    wanted = _verified([4] * 6, logits, forest)
    walked, walk = list[WalkInputs](), tree_ops.walk_traversal

    def counted(inputs: WalkInputs, **out: Any) -> None:
        walked.append(inputs)
        walk(inputs, **out)

    monkeypatch.setattr(tree_ops, "walk_traversal", counted)
    _apart(monkeypatch)
    assert _verified([4] * 6, logits, forest) == wanted
    (inputs,) = walked
    assert inputs.sizes.tolist() == [len(forest[i]) for i in (0, 2, 3, 4, 5)]
    assert {size % 16 for size in (*inputs.tokens.shape[1:], *inputs.distribution_tokens.shape[1:])} == {0}, (
        "kernels are compiled for few sizes"
    )


class _Waits(SynchronizationCheck):
    """Tensors without numbers on a device: zeros come back, which takes a wait; nothing else may wait.

    Attributes:
        num_sent: Arrays that went to the device.
        num_fetched: Tensors that came back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_sent = self.num_fetched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        place = kwargs.get("device")
        if func.overloadpacket.__name__ == "_to_copy" and place is not None and args[0].device != place:
            if args[0].is_meta:
                self.num_fetched += 1
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
            self.num_sent += 1
        is_on_host = place != META and not any(one.is_meta for one in tensors)
        return func(*args, **kwargs) if is_on_host else super().__torch_dispatch__(func, types, args, kwargs)


META = torch.device("meta")


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_device_is_waited_for_once_whatever_the_requests(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = list[str]()
    for name in ("walk_multi_step", "walk_traversal", "least_kept", "mask_logits"):
        monkeypatch.setattr(tree_ops, name, _stand_in(name, kernels))
    monkeypatch.setattr(batch, "runs_on", lambda _: has_kernels)
    monkeypatch.setattr(logits_module, "runs_on", lambda _: has_kernels)
    monkeypatch.setattr(torch, "tensor", _seen_tensor)
    plain = [number for number, (params, _, other) in enumerate(ASKED) if not (params.adjusts_logits or other)]
    for numbers in (plain, range(len(ASKED))):
        _, forest = _cases(KINDS * len(numbers), range(len(KINDS) * len(numbers)), 0)
        of_device = [torch.empty((len(tree), VOCAB), device=META) for tree in forest]
        requests = [_request(number) for number in numbers for _ in KINDS]
        kernels.clear()
        with _Waits() as waits:
            verify("coupled", of_device, requests, forest)
        assert waits.num_fetched == 1
        assert waits.num_sent == has_kernels or numbers is not plain, "parameters, trees and draws go together"
        walks = [name for name in kernels if name.startswith("walk")]
        assert walks == (["walk_multi_step", "walk_traversal"] if has_kernels else [])
        assert kernels.count("least_kept") == has_kernels


def _seen_tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """`torch.tensor`, which waits for a GPU, and is not dispatched where there are no numbers."""
    if device is not None and torch.device(device) != torch.device("cpu"):
        raise SynchronizationError("its numbers are copied from pages that are not pinned")
    return _TENSOR(data, device=device, **options)


_TENSOR = torch.tensor


def _stand_in(name: str, calls: list[str]) -> Callable[..., Tensor | None]:
    """A kernel that does nothing with tensors that have no numbers."""

    def run(first: Any, *others: Any, **out: Any) -> Tensor | None:
        calls.append(name)
        tensors = [one for one in (*(first if isinstance(first, tuple) else (first,)), *others) if one is not None]
        assert all(one.is_meta for one in tensors if isinstance(one, Tensor))
        return torch.empty(len(first), device=META) if name == "least_kept" else None

    return run


@pytest.mark.parametrize(
    "wait",
    [
        lambda rows: rows[rows > 0],
        lambda rows: bool(rows.any()),
        lambda _: torch.tensor([1, 2], device=META),
        lambda _: torch.tensor([1, 2]).to(META),
    ],
)
def test_other_waits_would_be_seen(wait: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "tensor", _seen_tensor)
    rows = torch.empty((3, 4), device=META)
    with pytest.raises(SynchronizationError), _Waits():
        wait(rows)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_gpu_is_waited_for_once_and_decides_as_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch itself tells of every wait before the results are fetched."""

    def fetch(tensors: Sequence[Tensor]) -> list[Any]:
        torch.cuda.set_sync_debug_mode("default")
        return transfers.fetch(tensors)

    monkeypatch.setattr(device_batch, "fetch", fetch)
    numbers = [number for number in range(len(ASKED)) for _ in KINDS]
    logits, forest = _cases(KINDS * len(ASKED), range(len(numbers)), 0)
    wanted, there = _verified(numbers, logits, forest), [rows.cuda() for rows in logits]
    assert _verified(numbers, there, forest) == wanted, "kernels are compiled here"
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert _verified(numbers, there, forest) == wanted
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------ whole steps


@pytest.fixture(scope="module")
def pair(model_folder: Callable[..., Path]) -> tuple[LoadedModel, LoadedModel]:
    return load_plain(model_folder("llama")), load_plain(model_folder("llama", 0, 0.1))


def _requests() -> list[Request]:
    requests = [_request(number) for number in range(len(ASKED))]
    for request, prompt in zip(requests, random_prompts([5, 12, 3] * 7, seed=4), strict=True):
        request.prompt_ids, request.token_ids = prompt, list(prompt)
        request.origins = []
        request.params = replace(request.params, max_tokens=12)
    return requests


def _outputs(requests: Sequence[Request]) -> list[Any]:
    return [(one.output_ids, one.error, one.uniforms.state, one.logprobs) for one in requests]


@pytest.mark.parametrize("lookups", [(), ("ngram",)])
@pytest.mark.parametrize("rule", ["multi-step", "traversal", "coupled"])
def test_steps_emit_the_tokens_of_the_host(
    rule: str, lookups: tuple[str, ...], pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all requests at once, in trees of a small model, and of lookups next to it."""
    found = []
    for is_apart in (False, True):
        if is_apart:
            _apart(monkeypatch)
        engine = make_device_engine(
            *pair, TreeBudget.expansion((2, 2, 1)), has_device_executor=False, verification=rule, lookups=lookups
        )
        requests = _requests()
        for request in requests:
            request.verification = None
        run(engine, requests)
        check_left(engine)
        assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > 20
        found.append(_outputs(requests))
    assert found[1] == found[0]


@pytest.mark.parametrize("is_deep", [False, True])
def test_masks_that_fail_concern_their_request_alone(
    is_deep: bool, pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes are asked about, so a failure at any of them fails the step; each request is then tried alone."""
    _apart(monkeypatch)
    wanted = _requests()
    requests = _requests()
    for request in (*wanted, *requests):
        request.verification = None
    run(make_device_engine(pair[0], has_device_executor=False), wanted)
    failing = next(request for request in requests if request.grammar is not None)
    grammar = failing.grammar
    assert grammar is not None
    bits = grammar.bits

    def fail(path: Sequence[int]) -> Any:
        if failing.num_output > 3 and (path or not is_deep):
            raise MemoryError
        return bits(path)

    monkeypatch.setattr(grammar, "bits", fail)
    engine = make_device_engine(*pair, TreeBudget.expansion((2, 2, 1)), has_device_executor=False)
    run(engine, requests)
    assert failing.error == (None if is_deep else "the engine failed on this request: MemoryError")
    for one, other in zip(requests, wanted, strict=True):
        assert one.output_ids == other.output_ids or one is failing is not is_deep
    check_left(engine)


@pytest.mark.parametrize("count", [2, 3])
def test_parameters_of_nodes_begin_where_kernels_want_them(count: int) -> None:
    """At multiples of 16 bytes for any number of nodes; kernels are compiled once more for others."""
    tree = TokenTree.chain(0, [3] * (count - 1))
    parts = [ScoredTree(_request(2), tree, torch.zeros(count, VOCAB))]
    (parameters,) = transfers.send_together([parameters_of(parts)], torch.device("cpu"))
    scores = NodeScores.from_trees(parts, parameters)
    starts = [one.data_ptr() - parameters.data_ptr() for one in (scores.seeds, scores.positions)]
    assert {start % 16 for start in starts} == {0}
