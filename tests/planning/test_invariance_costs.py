"""What batch invariance costs on a GPU that is not here: hand-computed, and as the kernels divide their work."""

from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch

from specinfer.ops.fixed_order import fixed_order
from specinfer.ops.routes import block_of
from specinfer.ops.splits import STEP_OF_NUMBERS, divide
from specinfer.ops.triton import fixed_attention, product
from specinfer.ops.triton.blocks import Device
from specinfer.planning.device_costs import StepCosts, StepDesign
from specinfer.planning.invariance_costs import InvarianceCosts, WorkDivision
from specinfer.planning.options import ACCELERATORS, Accelerator
from specinfer.planning.target_shape import TargetShape

WIDTH, HEADS, KV_HEADS, DIM, GATES = 4096, 32, 8, 128, 11_008
ATTENTION = WIDTH * (2 * HEADS + 2 * KV_HEADS) * DIM
LAYER = ATTENTION + 3 * WIDTH * GATES
SHAPE = TargetShape(32, WIDTH, HEADS, KV_HEADS, LAYER, 2 * WIDTH * KV_HEADS * DIM, 32_000 * WIDTH, 2.0)
H200 = ACCELERATORS["h200"]
RATE, SOON, LATE = 4e12, 2e-6, 3e-6


def costs(device: Accelerator = H200, shape: TargetShape = SHAPE) -> InvarianceCosts:
    return InvarianceCosts(device, shape, RATE, 6e14, (SOON, LATE))


def test_products_are_those_of_the_layer() -> None:
    assert costs().products == [(4096, 6144), (4096, 4096), (4096, 22_016), (11_008, 4096)]
    assert sum(map(prod, costs().products)) == LAYER


def test_parts_are_those_of_the_kernel() -> None:
    assert costs().parts == [4, 8, 1, 8]
    assert product.step_of(torch.empty(64, 64)) == (STEP_OF_NUMBERS, 1)


def test_tiles_are_those_of_the_kernels() -> None:
    order, hopper = WorkDivision(), Device(132, 232_448)
    with fixed_order():
        for rows in (1, 7, 64, 300):
            assert block_of(rows, torch.bfloat16, is_codes=False) == order.rows
            assert block_of(rows, torch.bfloat16) == order.rows_of_codes
    assert order.part == fixed_attention._PART
    assert fixed_attention.tile_of(DIM, DIM, 2, hopper).rows == order.attention_rows
    assert order.most_bytes == fixed_attention._MOST_BYTES


def test_products_with_codes_are_the_usual_ones_but_for_their_rows() -> None:
    coded = costs(shape=replace(SHAPE, bytes_per_parameter=0.56))
    assert coded.launches() == pytest.approx(32 * 10 * SOON)
    assert coded.adding(np.array([64.0])).tolist() == [0.0]
    assert coded.padded(np.array([1.0, 33.0])).tolist() == [32, 64]


def test_products_launch_after_the_kernel_before_and_parts_are_added_by_more() -> None:
    # 10 kernels of a layer, 4 of them products, and 3 that add the parts of products.
    assert costs().launches() == pytest.approx(32 * (6 * SOON + 7 * LATE))


def test_changes_of_the_step_change_it_here_too() -> None:
    design = StepDesign(batch_invariant=True)
    usual, fewer = (
        StepCosts(H200, SHAPE, None, 1024, replace(design, layer_kernels=count)).of_batch(1).target for count in (10, 4)
    )
    assert float(usual(1)) - float(fewer(1)) == pytest.approx(32 * 6 * design.layer_kernel_seconds)


def test_rows_fill_whole_tiles() -> None:
    assert costs().padded(np.array([1.0, 64.0, 65.0])).tolist() == [64, 64, 128]


def test_only_what_usual_kernels_do_not_write_counts() -> None:
    (one, many) = costs().adding(np.array([1.0, 64.0]))
    usual = [divide(64, outputs, inputs, 132).parts for inputs, outputs in costs().products]
    assert usual == [2, 2, 1, 2]
    beyond = (4 - 2) * 6144 + (8 - 2) * 4096 + (8 - 2) * 4096
    # A part is 4 bytes of each number, which are written and read.
    assert many == pytest.approx(32 * 64 * beyond * 4 * 2 / RATE)
    assert one < many / 64, "for few rows usual kernels have as many parts, or nearly"
    older = costs(replace(H200, has_dependent_launches=False)).adding(np.array([64.0]))
    assert older > many, "there, cuBLAS multiplies"


def test_short_contexts_of_few_requests_leave_multiprocessors_without_work() -> None:
    rows = np.array([1.0])
    # 8 KV heads with 4 parts of 256 positions: 32 programs for 132 multiprocessors.
    assert costs().attention(rows, 1, 1024, 1.0)[0] == pytest.approx(132 / 32)
    assert costs().attention(rows, 1, 100, 1.0)[0] == pytest.approx(132 / 8)
    assert costs().attention(rows * 8, 8, 1024, 1.0)[0] == 1.0
    assert costs().attention(rows, 1, 8192, 1.0)[0] == 1.0
    # A tree of 64 nodes has 256 rows of heads for each KV head: 8 tiles.
    assert costs().attention(rows * 64, 1, 1024, 1.0)[0] == 1.0
    # With so many tiles that each has all parts of its rows, there are no more programs than tiles.
    assert costs().attention(rows * 64 * 9, 9, 1024, 1.0)[0] == 1.0


def test_a_pass_without_it_takes_the_same_time_as_before() -> None:
    plain = StepCosts(H200, SHAPE, None, 1024)
    ratios = plain.invariance_ratios((1, 8, 32, 64))
    assert all(1.0 < low <= high + 1e-3 for low, high in pairwise(ratios))
    invariant = replace(plain, design=StepDesign(batch_invariant=True))
    assert invariant.invariance_ratios((1,)) == plain.invariance_ratios((1,))
    one = float(invariant.of_batch(1).target(1)) / float(plain.of_batch(1).target(1))
    assert one == pytest.approx(ratios[0])


def test_drafters_have_no_order_to_keep() -> None:
    both = [StepCosts(H200, SHAPE, SHAPE, 1024, StepDesign(batch_invariant=is_set)).of_batch(1) for is_set in (0, 1)]
    assert float(both[0].draft_level(1)) == float(both[1].draft_level(1))
    assert float(both[0].target(1)) < float(both[1].target(1))
