"""The program: python -m benchmarks.schedule."""

from benchmarks.program import run

run("schedule")
