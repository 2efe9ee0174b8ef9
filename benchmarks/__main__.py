"""The program: python -m benchmarks NAME, the same as python -m benchmarks.NAME."""

from benchmarks.program import run

run()
