"""The program: python -m benchmarks.parallel."""

from benchmarks.program import run

run("parallel")
