"""Kernels as a GPU runs them: equal to their twins, at the sizes of real models, and captured without waiting."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import trees as reference_trees
from reference import walks as reference_walks
from specinfer.core.tree import TokenTree
from specinfer.ops import tree_ops
from specinfer.ops.tree_layout import TreeLayout
from specinfer.ops.trees import Candidates, ChanceTable, DeviceDraws, DrawnRows, Frontier, Limits, WalkInputs
from tree_cases import AttentionCase, Part, bushy, wide

pytestmark = pytest.mark.gpu
ROOT = TokenTree.root(1)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": torch.linspace(-1.0, 2.0, 16)},
    "alibi": {"key_bias": torch.linspace(0.0, 0.3, 16)[:, None] * torch.arange(6000) / 100},
}


def there(value: Any) -> Any:
    """The same on the GPU."""
    return value.cuda() if isinstance(value, Tensor) else value


def moved(case: AttentionCase) -> AttentionCase:
    layout = case.layout
    case.layout = TreeLayout(**{field.name: there(getattr(layout, field.name)) for field in fields(layout)})
    case.query, case.keys, case.values = case.query.cuda(), case.keys.cuda(), case.values.cuda()
    return case


def _parts(name: str) -> list[Part]:
    return {
        "decoding": [Part(1500, 1, ROOT), Part(0, 1, ROOT), Part(77, 1, ROOT)],
        "tree": [Part(300, 1, bushy(63)), Part(5, 2, wide(20), 2)],
        "large tree": [Part(40, 1, bushy(255))],
        "long": [Part(5000, 1, bushy(15))],
    }[name]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", ["decoding", "tree", "large tree", "long"])
def test_attention(name: str, dim: int, dtype: torch.dtype) -> None:
    case = moved(AttentionCase(_parts(name), heads=16, kv_heads=4, dims=(dim, dim), dtype=dtype))
    out, wanted = case.run(tree_ops.attend), case.run(reference_trees.attend)
    torch.testing.assert_close(out, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("parts", ["tree", "long"])
def test_features(parts: str, name: str) -> None:
    case = moved(AttentionCase(_parts(parts), heads=16, kv_heads=4, dims=(128, 128), dtype=torch.bfloat16))
    features = {key: there(value) for key, value in FEATURES[name].items()}
    out, wanted = case.run(tree_ops.attend, **features), case.run(reference_trees.attend, **features)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [None, 100])
def test_prompts(window: int | None) -> None:
    case = AttentionCase([Part(300, 700, ROOT), Part(0, 200, ROOT, 20)], heads=8, kv_heads=2, dims=(128, 128))
    case.layout = case.as_chain()
    case = moved(case)
    torch.testing.assert_close(
        case.run(tree_ops.attend, window=window),
        case.run(reference_trees.attend, window=window),
        rtol=1e-5,
        atol=1e-5,
    )


def test_caches_of_more_than_two_to_the_31_numbers() -> None:
    """Offsets into them do not fit into 32 bits."""
    case = moved(AttentionCase([Part(9, 1, wide(3))], heads=8, kv_heads=8, dims=(128, 128), dtype=torch.bfloat16))
    num_slots, shift = 2**31 // 1024 + 4096, 2**31 // 1024 + 1000
    if torch.cuda.mem_get_info()[0] < 3 * num_slots * 2048:
        pytest.skip("too little memory")
    wanted = case.run(tree_ops.attend)
    keys, values = (torch.empty((num_slots, 8, 128), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    used = torch.arange(1, len(case.keys), device="cuda")
    tree_ops.store(keys, values, used + shift, case.keys[1:], case.values[1:])
    case.keys, case.values, layout = keys, values, case.layout
    case.layout = replace(layout, slot_table=layout.slot_table + shift, node_slots=layout.node_slots + shift)
    assert torch.equal(case.run(tree_ops.attend), wanted)


def test_a_captured_launch_reads_what_its_tensors_hold_when_it_is_replayed() -> None:
    first, second = (
        moved(AttentionCase([Part(prefix, 1, bushy(7))], heads=8, kv_heads=2, dims=(64, 64), padding=(0, 0), seed=seed))
        for prefix, seed in ((90, 1), (90, 2))
    )
    out = torch.empty_like(first.query)
    first.run(tree_ops.attend, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.run(tree_ops.attend, out=out)
    wanted = second.run(reference_trees.attend)
    _overwrite(first, second.layout, second.query, second.keys, second.values)
    graph.replay()
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def _overwrite(case: AttentionCase, layout: TreeLayout, *tensors: Tensor) -> None:
    for field in fields(layout):
        value = getattr(case.layout, field.name)
        if isinstance(value, Tensor):
            value.copy_(getattr(layout, field.name))
    for mine, other in zip((case.query, case.keys, case.values), tensors, strict=True):
        mine.copy_(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [96, 50257, 128256])
def test_chosen_tokens_are_those_of_the_cpu(vocab: int, dtype: torch.dtype) -> None:
    rows = 64
    logits = (4 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(vocab))).to(dtype)
    seeds, positions = torch.arange(rows) * 2**50, torch.arange(rows) + 3
    temperatures = torch.tensor([0.0, 1.0, 0.7, 2.0]).repeat(rows // 4)
    wanted = reference_trees.choose(logits, seeds, positions, temperatures)
    found = tree_ops.choose(logits.cuda(), seeds.cuda(), positions.cuda(), temperatures.cuda())
    assert found.tolist() == wanted.tolist()


def test_walk_and_commit() -> None:
    generator = torch.Generator().manual_seed(0)
    forest = [bushy(63, seed) for seed in range(8)]
    parents = torch.tensor([tree.parents for tree in forest], dtype=torch.int32)
    tokens = torch.randint(3, parents.shape, generator=generator).int()
    said = torch.randint(3, (8 * 64,), generator=generator)
    starts, sizes = torch.arange(8).int() * 64, torch.tensor([64, 0, 10, 64, 1, 64, 30, 64]).int()
    arguments = (said, starts, tokens, parents, sizes)
    wanted = reference_trees.walk(*arguments, max_depth=9)
    found = tree_ops.walk(*map(there, arguments), max_depth=9)
    for a, b in zip(found, wanted, strict=True):
        assert a.tolist() == b.tolist()
    tables = torch.zeros((8, 40), dtype=torch.int32), torch.arange(8).int(), torch.arange(8 * 64).int().view(8, 64)
    moved_tables = [table.cuda() for table in tables]
    reference_trees.commit(*tables, *wanted[:2])
    tree_ops.commit(*moved_tables, *found[:2])
    assert [table.tolist() for table in moved_tables] == [table.tolist() for table in tables]


@pytest.mark.parametrize("name", ["walk_multi_step", "walk_traversal"])
def test_walks_with_random_numbers(name: str) -> None:
    requests, nodes, vocab, support = 8, 6, 50257, 16
    source = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((requests * nodes, vocab), generator=source)
    likely = logits.topk(support, dim=1).indices.view(requests, nodes, support)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2]]).repeat(requests, 1)
    draws = torch.tensor([[1, 2, 3, 4, 5]]).repeat(requests, 1)
    distributions = torch.stack([likely[i][parents[i, 1:]] for i in range(requests)])
    places = torch.tensor([0, 1, 0, 1, 0])
    tokens = torch.cat(
        [torch.zeros((requests, 1), dtype=torch.int64), distributions[:, torch.arange(5), places]], dim=1
    )
    probs = torch.rand(distributions.shape, generator=source, dtype=torch.float64)
    arguments = (
        logits, torch.arange(requests).int() * nodes, torch.full((requests,), 0.8), tokens.int(), parents.int(),
        torch.full((requests,), nodes, dtype=torch.int32), draws.int(), distributions.int(),
        probs / probs.sum(dim=-1, keepdim=True), torch.arange(requests) * 2**40,
    )  # fmt: skip
    others = tuple(there(argument.clone()) for argument in arguments)
    plain = reference_walks.walk_traversal if name == "walk_traversal" else reference_walks.walk_multi_step
    wanted = [torch.zeros((requests, 3)).int(), torch.zeros(requests).int(), torch.zeros(requests).long()]
    found = [there(tensor) for tensor in wanted]
    plain(WalkInputs(*arguments), out=wanted)
    getattr(tree_ops, name)(WalkInputs(*others), out=found)
    for a, b in zip(found, wanted, strict=True):
        assert a.tolist() == b.tolist()
    assert others[-1].tolist() == arguments[-1].tolist(), "as many coins were tossed"


@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_drawn_candidates(width: int, is_fixed: bool) -> None:
    requests, nodes, support, first = 8, 5, 128, 3
    source = torch.Generator().manual_seed(width)
    values = 3 * torch.randn((requests * nodes, support), generator=source)
    values = values.sort(dim=1, descending=True).values
    ids = torch.stack([torch.randperm(50257, generator=source)[:support] for _ in values])
    least = values[:, support // 2].clone()
    drawn = DrawnRows(
        torch.arange(requests) != 3, 2**40 * torch.arange(requests), torch.arange(requests) * 256,
        torch.full((requests,), 0.8),
    )  # fmt: skip
    ints = torch.zeros((requests, nodes), dtype=torch.int32)
    above = torch.ones((requests, nodes)) if is_fixed else torch.rand((requests, nodes), generator=source)
    frontier = Frontier(1, ints.long(), ints.unsqueeze(2), ints, above)
    widths = torch.full((requests, 3), width if is_fixed else 0, dtype=torch.int32)
    limits = Limits(torch.full((requests,), 99), torch.full((requests,), 3), torch.full((requests,), 0.1), widths)
    lines = torch.rand((2, 3, 8 * 4), generator=source)
    table = ChanceTable(torch.tensor([0.2, 0.5, 0.9]), lines[0], lines[1] - 0.3)
    found = []
    for device in ("cpu", "cuda"):
        candidates = Candidates.empty(requests, first + nodes * width, torch.device(device))
        draws = DeviceDraws.empty(requests, first + nodes * width, support, torch.device(device))
        for tensor in (candidates.tokens, candidates.confidence, candidates.path_prob):
            tensor.zero_()
        tensors = [tensor.to(device) for tensor in (values * 0.8, ids, least)]
        rows = DrawnRows(*(tensor.to(device) for tensor in drawn))
        above = replace(frontier, **_moved(frontier, device))
        tree_ops.draw_candidates(
            *tensors, rows, above, first, width, replace(table, **_moved(table, device)),
            replace(limits, **_moved(limits, device)), candidates, draws,
        )  # fmt: skip
        found.append((candidates, draws))
    (wanted, wanted_draws), (candidates, draws) = found
    assert candidates.tokens.tolist() == wanted.tokens.tolist()
    assert torch.allclose(candidates.path_prob.cpu(), wanted.path_prob, rtol=1e-5)
    assert torch.allclose(candidates.confidence.cpu(), wanted.confidence)
    kept = drawn.is_drawn
    assert torch.equal(draws.tokens.cpu()[kept, first:], wanted_draws.tokens[kept, first:])
    assert torch.allclose(draws.probs.cpu()[kept, first:], wanted_draws.probs[kept, first:], rtol=1e-12, atol=1e-15)


def _moved(one: Any, device: str) -> dict[str, Tensor]:
    values = {field.name: getattr(one, field.name) for field in fields(one)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
