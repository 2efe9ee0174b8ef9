"""Tree attention over a layout: PyTorch's twin against explicit paths, and Triton's kernel against the twin.

Without a GPU the kernel runs in Triton's interpreter (tests/support/suite.py), which is slow: shapes are small here,
and compiling for GPUs is tests/ops/test_programs.py's.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from interpreter import interpreted
from reference import trees as reference_trees
from specinfer.core.tree import TokenTree
from specinfer.ops.tree_layout import TreeLayout, num_words, pack_bits, unpack_bits
from specinfer.ops.triton.attention import attend
from specinfer.ops.triton.blocks import Blocks, Device, choose_blocks, device_of
from specinfer.ops.triton.store import store
from tiny import trees
from tree_cases import FEATURES, AttentionCase, Part, bushy, wide

pytestmark = interpreted
ROOT = TokenTree.root(1)


def check(out: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(out.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@st.composite
def parts_of(draw: st.DrawFn) -> list[Part]:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        prefix, chain, tree = draw(st.integers(0, 40)), draw(st.integers(1, 4)), draw(trees(max_nodes=8))
        size = chain + tree.num_guessed
        made.append(Part(prefix, chain, tree, draw(st.integers(0, size - 1))))
    return made


# --------------------------------------------------------------------------------------------- bits


@given(st.lists(st.lists(st.booleans(), min_size=70, max_size=70), min_size=1, max_size=3), st.integers(0, 70))
def test_bits(rows: list[list[bool]], nodes: int) -> None:
    visible = torch.tensor(rows)[:, :nodes]
    words = pack_bits(visible)
    assert words.shape == (len(rows), num_words(nodes))
    assert words.dtype == torch.int32
    for row, packed in zip(visible.tolist(), words.tolist(), strict=True):
        number = sum((word % 2**32) << (32 * place) for place, word in enumerate(packed))
        assert number == sum(bit << node for node, bit in enumerate(row))
    assert torch.equal(unpack_bits(words, nodes), visible)
    assert torch.equal(pack_bits(visible, 3), torch.nn.functional.pad(words, (0, 3 - words.shape[1])))


# --------------------------------------------------------------------------------------------- twin


@pytest.mark.parametrize("name", FEATURES)
@settings(max_examples=8)
@given(parts=parts_of(), seed=st.integers(0, 99))
def test_the_twin_equals_attention_over_the_path(name: str, parts: list[Part], seed: int) -> None:
    case = AttentionCase(parts, dims=(6, 5), seed=seed)
    check(case.run(reference_trees.attend, **FEATURES[name]), case.expected(**FEATURES[name]))


def test_the_twin_of_a_chain_reads_no_bits() -> None:
    case = AttentionCase([Part(5, 7, ROOT, 3), Part(0, 4, ROOT)])
    wanted = case.expected(window=4)
    case.layout = case.as_chain()
    check(case.run(reference_trees.attend, window=4), wanted)


def test_where_to_write_is_written_to() -> None:
    case = AttentionCase([Part(3, 1, wide(2))])
    for run in (reference_trees.attend, attend):
        out = torch.full((case.layout.num_tokens, 4, 16), torch.nan)
        assert case.run(run, out=out) is out
        check(out, case.expected())


# ------------------------------------------------------------------------------------------- kernel


@pytest.mark.parametrize("name", FEATURES)
@settings(max_examples=3)
@given(parts=parts_of(), seed=st.integers(0, 99), splits=st.sampled_from([1, 2]))
def test_the_kernel_equals_the_twin(name: str, parts: list[Part], seed: int, splits: int) -> None:
    case = AttentionCase(parts, seed=seed, heads=4, kv_heads=2)
    out = case.run(attend, **FEATURES[name], blocks=Blocks(16, 16, splits, 4))
    check(out, case.run(reference_trees.attend, **FEATURES[name]))
    check(out, case.expected(**FEATURES[name]))


@pytest.mark.parametrize(
    ("parts", "heads", "kv_heads"),
    [
        ([Part(0, 1, ROOT)], 2, 2),
        ([Part(70, 1, ROOT), Part(0, 1, ROOT), Part(9, 1, ROOT)], 4, 1),
        ([Part(33, 1, wide(64))], 3, 1),
        ([Part(20, 1, bushy(255))], 1, 1),
        ([Part(5, 2, bushy(90), 40), Part(40, 1, TokenTree.chain(1, [2] * 20))], 2, 1),
        ([Part(3, 1, ROOT)], 71, 1),
    ],
    ids=["one node", "plain decoding", "64 wide", "256 nodes", "earlier nodes", "71 heads"],
)
def test_shapes_of_trees(parts: list[Part], heads: int, kv_heads: int) -> None:
    case = AttentionCase(parts, heads=heads, kv_heads=kv_heads)
    check(case.run(attend), case.run(reference_trees.attend))


@pytest.mark.covering(1)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("splits", [1, 2])
def test_prompts_go_through_the_same_kernel(window: int | None, splits: int) -> None:
    """Chunks of prompts, with what was computed before as prefix or as nodes; bits are not read."""
    case = AttentionCase([Part(37, 45, ROOT), Part(0, 30, ROOT, 20)], heads=2, kv_heads=1)
    wanted = case.run(reference_trees.attend, window=window)
    case.layout = case.as_chain()
    check(case.run(attend, window=window, blocks=Blocks(32, 16, splits, 4)), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(6, 5), (64, 64), (80, 80), (96, 64), (128, 128), (256, 256)])
def test_head_dims_and_types(dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = AttentionCase([Part(18, 1, wide(3))], heads=2, kv_heads=1, dims=dims, dtype=dtype)
    out = case.run(attend)
    assert out.dtype == dtype
    check(out, case.run(reference_trees.attend), 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("splits", [2, 8])
def test_long_prefixes_are_split(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parts see nothing of a short request; with a window most of the prefix is not looked at."""
    case = AttentionCase([Part(330, 1, wide(2)), Part(2, 1, ROOT)], heads=4, kv_heads=2)
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full((size,), torch.nan, **options))
    out = case.run(attend, **FEATURES[name], blocks=Blocks(16, 32, splits, 4))
    check(out, case.run(reference_trees.attend, **FEATURES[name]))


def test_queries_may_lie_as_transformers_has_them() -> None:
    """[heads, tokens, dim] turned round, and a part of a wider row."""
    case = AttentionCase([Part(4, 1, wide(2))])
    wanted = case.run(reference_trees.attend)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    check(case.run(attend), wanted)
    case.query = torch.cat([case.query, case.query], dim=2)[..., :16]
    check(case.run(attend), wanted)


@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")
def test_what_is_not_a_number_stays_in_its_request() -> None:
    case = AttentionCase([Part(9, 1, ROOT), Part(3, 1, wide(2))])
    clean = case.run(attend)
    for split in (1, 2):
        seen = case.keys[case.paths[0]]
        case.keys[case.paths[0]] = torch.nan
        out = case.run(attend, blocks=Blocks(16, 16, split, 4))
        assert bool(out[0].isnan().all())
        check(out[1:], clean[1:])
        case.keys[case.paths[0]] = seen


def test_layouts_that_contradict_themselves_are_caught() -> None:
    layout = AttentionCase([Part(2, 1, wide(40))]).layout
    with pytest.raises(AssertionError):
        replace(layout, visible=layout.visible[:, :1])
    with pytest.raises(AssertionError):
        replace(layout, starts=layout.starts[:-1])


# ------------------------------------------------------------------------------------------- blocks


GPUS = ((132, 232448), (108, 166912), (170, 101376))  # H100, A100, RTX 5090


def _blocks(layout: TreeLayout, dim: int, itemsize: int, device: Device) -> Blocks:
    return choose_blocks(layout, 32, 8, dim, dim, itemsize, device)


@pytest.mark.parametrize(
    ("dim", "itemsize"),
    # Not 512 numbers of 4 bytes, of which 16 keys alone are too large for a graphics card.
    [*itertools.product((64, 80, 96, 128, 256), (2, 4)), (512, 2)],
)
@pytest.mark.parametrize("max_new", [1, 16, 64, 2048])
def test_blocks_fit_into_the_device(max_new: int, dim: int, itemsize: int) -> None:
    layout = replace(AttentionCase([Part(600, 1, ROOT)]).layout, max_new=max_new)
    padded = 1 << (dim - 1).bit_length()
    for device in (Device(132, 232448), Device(82, 101376)):
        rows, keys, splits, num_warps = _blocks(layout, dim, itemsize, device)
        assert rows >= min(16, max_new * 4)
        tiles = 2 * keys * 2 * padded * itemsize
        assert tiles <= device.shared_bytes // 2 or (keys == 16 and tiles < 0.8 * device.shared_bytes)
        assert tiles + rows * padded * itemsize <= device.shared_bytes
        assert rows * padded * 4 / (32 * num_warps) <= 4 * 128, "the sums of a program are in its registers"
        assert splits == 1 or splits // 2 * -(-max_new * 4 // rows) * layout.num_requests * 8 < device.num_cores


def test_trees_on_graphics_cards_have_programs_of_64_rows() -> None:
    """With 128, the masks of heads of 80 numbers would need 280 bytes of stack on an RTX 5090."""
    tree = replace(AttentionCase([Part(600, 1, ROOT)]).layout, max_new=64)
    rows = [_blocks(tree, dim, 2, Device(*device)).rows for device in GPUS for dim in (64, 80, 128)]
    assert rows == [128, 128, 128] * 2 + [128, 64, 64]
    assert _blocks(replace(tree, is_chain=True), 80, 2, Device(*GPUS[2])).rows == 128


def test_a_gpu_without_a_second_limit_of_shared_memory_has_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's builds of PyTorch have no `shared_memory_per_block_optin`."""
    usual = {"multi_processor_count": 304, "shared_memory_per_block": 65536}
    for index, (more, wanted) in enumerate((({}, 65536), ({"shared_memory_per_block_optin": 232448}, 232448))):
        properties = SimpleNamespace(**usual, **more)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        assert device_of.__wrapped__(torch.device("cuda", index)) == Device(304, wanted)


def test_long_contexts_are_split_for_few_requests_only() -> None:
    def splits(requests: int, context: int) -> int:
        layout = AttentionCase([Part(context, 1, ROOT)] * requests, padding=(0, 0)).layout
        return _blocks(layout, 128, 2, Device(132, 232448)).splits

    assert (splits(1, 20), splits(1, 4000), splits(8, 4000), splits(32, 4000)) == (1, 16, 4, 1)


# -------------------------------------------------------------------------------------------- store


@pytest.mark.parametrize("run", [store, reference_trees.store])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store(run: Callable[..., None], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn((9, 3, dim), generator=generator).to(dtype) for dim in (6, 5))
    key, value = (torch.randn((3, 5, dim), generator=generator).to(dtype).transpose(0, 1) for dim in (6, 5))
    slots = torch.tensor([4, -1, 0, 8, -1])
    wanted = keys.clone(), values.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[0][slot], wanted[1][slot] = key[row], value[row]
    run(keys, values, slots, key, value)
    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])
    run(keys, values, torch.full((5,), -1), key, value)
    assert torch.equal(keys, wanted[0])


def test_the_reference_is_a_softmax() -> None:
    """The reference of everything above, by hand: two keys, of which one is twice as probable."""
    keys = torch.tensor([[[0.0]], [[1.0]]])
    out = reference.attention(
        torch.tensor([[1.0]]), keys, torch.tensor([[[0.0]], [[3.0]]]), float(torch.tensor(2.0).log())
    )
    check(out, torch.tensor([[2.0]]))
