"""The program: python -m benchmarks.paper."""

from benchmarks.program import run

run("paper")
