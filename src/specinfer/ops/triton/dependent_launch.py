"""Programmatic dependent launch (PDL; CUDA, compute capability 9.0 and higher): kernels launch during the one before.

Kernels between the products of a layer take about two microseconds each, of which the launch is a large part. A kernel
launched with `launch_options` first calls `wait_for_inputs`, and reads and writes nothing before, so its results are
those of an ordinary launch. All other kernels, those of PyTorch too, begin after the one before has ended.
"""

from functools import cache

import torch
import triton
import triton.language as tl

_FIRST_CAPABILITY = 90  # compute capability


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Allow the next kernel to launch, and wait until all kernels before this one have ended."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the keywords of a launch: `DEPENDENT` of the kernel, and Triton's `launch_pdl` where it is supported."""
    if device.type == "cpu":  # Triton's interpreter
        return {"DEPENDENT": False}
    return _options_of(device) if device.type == "cuda" else _options()


@cache
def _options_of(device: torch.device) -> dict[str, bool]:
    del device  # Triton asks for the current device, and `runs_on` has made this one current
    return _options()


def _options() -> dict[str, bool]:
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda" or target.arch < _FIRST_CAPABILITY:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
