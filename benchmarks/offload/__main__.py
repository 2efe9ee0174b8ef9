"""The program: python -m benchmarks.offload."""

from benchmarks.program import run

run("offload")
