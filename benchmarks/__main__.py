"""The program: python -m benchmarks NAME."""

from benchmarks.program import run

run()
