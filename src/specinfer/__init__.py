"""Tree-based speculative inference for large language models."""

import importlib
from typing import TYPE_CHECKING

from specinfer.core.systems import load_openmp

if TYPE_CHECKING:
    from specinfer.async_llm import AsyncLLM
    from specinfer.core.errors import EngineDeadError, ModelError, QueueFullError, RequestError
    from specinfer.core.limits import SLO, QueueLimits
    from specinfer.core.logprob import Logprob
    from specinfer.core.lora import LoRARequest
    from specinfer.core.outputs import CompletionOutput, RequestMetrics, RequestOutput, TextChunk
    from specinfer.core.sampling import RequestOutputKind, SamplingParams
    from specinfer.core.structured_outputs import StructuredOutputsParams
    from specinfer.core.thought import Reasoning
    from specinfer.core.tree import TokenTree
    from specinfer.engine_args import EngineArgs
    from specinfer.generation import Generation
    from specinfer.inputs.arguments import TextPrompt, TokensPrompt
    from specinfer.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "SLO",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineDeadError",
    "Generation",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "QueueFullError",
    "QueueLimits",
    "Reasoning",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextChunk",
    "TextPrompt",
    "TokenTree",
    "TokensPrompt",
]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "core.outputs",
    "EngineArgs": "engine_args",
    "EngineDeadError": "core.errors",
    "Generation": "generation",
    "LoRARequest": "core.lora",
    "Logprob": "core.logprob",
    "ModelError": "core.errors",
    "QueueFullError": "core.errors",
    "QueueLimits": "core.limits",
    "Reasoning": "core.thought",
    "RequestError": "core.errors",
    "RequestMetrics": "core.outputs",
    "RequestOutput": "core.outputs",
    "RequestOutputKind": "core.sampling",
    "SLO": "core.limits",
    "SamplingParams": "core.sampling",
    "StructuredOutputsParams": "core.structured_outputs",
    "TextChunk": "core.outputs",
    "TextPrompt": "inputs.arguments",
    "TokenTree": "core.tree",
    "TokensPrompt": "inputs.arguments",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    # Imported on first use: torch and transformers take seconds to import, and `specinfer --help` should not wait.
    if name not in _HOMES:
        raise AttributeError(f"module 'specinfer' has no attribute {name!r}")
    load_openmp()
    return getattr(importlib.import_module(f"specinfer.{_HOMES[name]}"), name)
