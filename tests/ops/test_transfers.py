"""Transfers between host and device."""

import numpy as np
import pytest
import torch

from specinfer.ops.cpu.transfers import fetch, send, send_together

CPU = torch.device("cpu")
ARRAYS = (
    np.arange(7, dtype=np.int32).reshape(7, 1),
    np.zeros((0, 3), dtype=np.int64),
    np.array([[2**62, -1], [np.iinfo(np.int64).min, 5]]),
    np.array([np.nan, -np.inf, -0.0, 0.1], dtype=np.float32),
    np.arange(12.0).reshape(3, 4)[:, ::2],
)


def test_arrays_arrive_bit_by_bit_and_come_back() -> None:
    there = send_together(ARRAYS, CPU)
    assert [tensor.numpy().dtype for tensor in there] == [array.dtype for array in ARRAYS]
    for found in ([tensor.numpy() for tensor in there], fetch(there), fetch([one.clone() for one in there])):
        assert [one.shape for one in found] == [array.shape for array in ARRAYS]
        assert [one.tobytes() for one in found] == [array.tobytes() for array in ARRAYS]


def test_each_array_begins_where_kernels_want_it() -> None:
    there = send_together(ARRAYS, CPU)
    assert {(one.data_ptr() - there[0].data_ptr()) % 16 for one in there} == {0}


def test_what_comes_back_need_not_be_contiguous() -> None:
    columns = torch.arange(6).view(2, 3).t()
    (found,) = fetch([columns])
    assert found.tolist() == columns.tolist()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_gpu_is_not_waited_for_where_numbers_are_sent() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = send_together(ARRAYS, torch.device("cuda"))
        one = send(ARRAYS[2], torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [found.tobytes() for found in fetch([*there, one])] == [array.tobytes() for array in (*ARRAYS, ARRAYS[2])]
