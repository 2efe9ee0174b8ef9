"""The program: python -m benchmarks.kernels."""

from benchmarks.program import run

run("kernels")
