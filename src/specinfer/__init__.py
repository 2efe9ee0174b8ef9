"""Tree-based speculative inference for large language models."""

import importlib
from typing import TYPE_CHECKING

from specinfer.cpus import load_openmp

if TYPE_CHECKING:
    from specinfer.async_llm import AsyncLLM, QueueLimits
    from specinfer.errors import EngineDeadError, ModelError, QueueFullError, RequestError
    from specinfer.generation import Generation
    from specinfer.llm import LLM
    from specinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput, TextChunk
    from specinfer.sampling import SamplingParams
    from specinfer.structured_outputs import StructuredOutputsParams
    from specinfer.tree import TokenTree

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineDeadError",
    "Generation",
    "ModelError",
    "QueueFullError",
    "QueueLimits",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextChunk",
    "TokenTree",
]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "EngineDeadError": "errors",
    "Generation": "generation",
    "ModelError": "errors",
    "QueueFullError": "errors",
    "QueueLimits": "async_llm",
    "RequestError": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling",
    "StructuredOutputsParams": "structured_outputs",
    "TextChunk": "outputs",
    "TokenTree": "tree",
}


def __getattr__(name: str) -> object:
    # Imported on first use: torch and transformers take seconds to import, and `specinfer --help` should not wait.
    if name not in _HOMES:
        raise AttributeError(f"module 'specinfer' has no attribute {name!r}")
    load_openmp()
    return getattr(importlib.import_module(f"specinfer.{_HOMES[name]}"), name)
