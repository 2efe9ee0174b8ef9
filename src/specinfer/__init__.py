"""Tree-based speculative inference for large language models."""

from specinfer.errors import ModelError, RequestError
from specinfer.llm import LLM, TextChunk
from specinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from specinfer.sampling import SamplingParams
from specinfer.tree import TokenTree

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "ModelError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TextChunk",
    "TokenTree",
]
