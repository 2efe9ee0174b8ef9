"""A mixed workload: code, prose and repetition, made of held-out files of Python's standard library."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace

from specinfer.bench.chat_prompts import PromptSet
from specinfer.demo.chat_model import CHAT_TEMPERATURE
from specinfer.demo.corpus import heldout_files, heldout_prompts, read_text
from specinfer.llm import LLM
from specinfer.sampling import SamplingParams

PARTS = ("code", "prose", "repetition")
_CHARS_PER_TOKEN = 3  # about, in code
_LEAST_PROSE = 120  # characters of a text worth continuing
_LEAD_IN = 240  # tokens that the target says before a repetition is measured: by then it says things again


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt of the workload."""

    part: str
    prompt_ids: tuple[int, ...]
    temperature: float
    max_tokens: int | None = None  # None: what is asked for of all


def make_work(llm: LLM, num_prompts: int, prompt_tokens: int, note: Callable[[int], None]) -> list[Work]:
    """So many prompts of each part, the parts in turn.

    Code goes on from the middle of held-out files, greedily. Prose goes on from their docstrings, at temperature 1.
    A repetition is code and what the target itself went on with, greedily, for `_LEAD_IN` tokens: what follows repeats
    text that stands in the prompt.

    Args:
        prompt_tokens: Of each at most, but for what the target adds.
        note: Called with the number of prompts that the target has gone on with.

    Raises:
        ValueError: The held-out files do not give so many, or the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise ValueError("model: it has no tokenizer, and the workload is made of texts; name one that has")
    try:
        code = heldout_prompts(2 * num_prompts, num_chars=prompt_tokens * _CHARS_PER_TOKEN)
    except ValueError as error:
        raise ValueError(f"num_prompts: {error}") from error
    texts = {"code": code[::2], "prose": _prose(num_prompts), "repetition": code[1::2]}
    work = []
    for i in range(num_prompts):
        for part in PARTS:
            ids = llm.tokenizer.encode(texts[part][i], add_special_tokens=False)
            one = Work(part, tuple(ids[-prompt_tokens:]), 1.0 if part == "prose" else 0.0)
            if part == "repetition":
                one = replace(one, prompt_ids=(*one.prompt_ids, *_go_on(llm, one.prompt_ids)))
            work.append(one)
        note(i + 1)
    return work


def answered(llm: LLM, prompts: PromptSet, params: Callable[[int, float], SamplingParams]) -> list[Work]:
    """Return chat prompts as work: of each kind one greedily, the next at the chat model's usual temperature.

    Args:
        params: Those of a prompt, by its number and temperature.
    """
    turns = [prompts.kinds[:i].count(kind) for i, kind in enumerate(prompts.kinds)]
    temperatures = [CHAT_TEMPERATURE if turn % 2 else 0.0 for turn in turns]
    ended = prompts.end_answers(llm, [params(i, temperature) for i, temperature in enumerate(temperatures)])
    return [
        Work(kind, tuple(ids), one.temperature, one.max_tokens)
        for kind, ids, one in zip(prompts.kinds, prompts.token_ids, ended, strict=True)
    ]


def most_tokens(prompt_tokens: int) -> int:
    """Of a prompt of the workload."""
    return prompt_tokens + _LEAD_IN


def _go_on(llm: LLM, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    """What the target says next, without a trace that a drafter could look up."""
    params = SamplingParams(temperature=0.0, max_tokens=_LEAD_IN, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": list(prompt_ids), "cache_salt": "lead-in"}], params, use_tqdm=False)
    if output.error is not None:
        raise RuntimeError(output.error)
    return tuple(output.outputs[0].token_ids)


def _prose(count: int) -> list[str]:
    """Docstrings of held-out files, without their last third, evenly spread over the files."""
    found: dict[str, None] = {}  # an ordered set
    for path in heldout_files():
        for node in ast.walk(ast.parse(read_text(path))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= _LEAST_PROSE:
                    found.setdefault('"""' + text[: 2 * len(text) // 3].rstrip())
    texts = list(found)
    if len(texts) < count:
        raise ValueError(f"num_prompts: the held-out files give {len(texts)} prompts of prose; ask for fewer")
    return [texts[i * len(texts) // count] for i in range(count)]
