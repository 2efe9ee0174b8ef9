"""transformers' `generate` with a static cache and compiled passes: `torch.compile`, and CUDA graphs on a GPU."""

from benchmarks.peers.transformers_engine import TransformersEngine


def create(num_threads: int) -> TransformersEngine:
    return TransformersEngine(num_threads, compiles=True)
