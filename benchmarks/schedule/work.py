"""A mixed workload of code, prose and repetition, built from held-out files of Python's standard library."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace

from specinfer.bench.chat_prompts import PromptSet
from specinfer.core.sampling import SamplingParams
from specinfer.demo.chat_model import CHAT_TEMPERATURE
from specinfer.demo.corpus import heldout_files, heldout_prompts, read_text
from specinfer.llm import LLM

PARTS = ("code", "prose", "repetition")
_CHARS_PER_TOKEN = 3  # approximate, in code
_LEAST_PROSE = 120  # least characters of a text of prose
_LEAD_IN = 240  # tokens that the target generates before a repetition is measured; by then it repeats itself


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt of the workload."""

    part: str
    prompt_ids: tuple[int, ...]
    temperature: float
    max_tokens: int | None = None  # None for the number configured for all prompts


def make_work(llm: LLM, num_prompts: int, prompt_tokens: int, advance: Callable[[], None]) -> list[Work]:
    """Return `num_prompts` prompts of each part, with the parts in turn.

    Code continues the middle of held-out files, greedily. Prose continues their docstrings, at temperature 1. A
    repetition prompt is code followed by `_LEAD_IN` tokens that the target generated greedily, so its continuation
    repeats text of the prompt.

    Args:
        prompt_tokens: Most tokens of each prompt, without those that the target adds.
        advance: Called after each prompt of all parts.

    Raises:
        ValueError: The held-out files do not have enough prompts, or the model has no tokenizer.
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
        advance()
    return work


def answered(llm: LLM, prompts: PromptSet, params: Callable[[int, float], SamplingParams]) -> list[Work]:
    """Return chat prompts as work, alternating in each kind between greedy and the chat model's usual temperature.

    Args:
        params: Function that returns the sampling parameters of a prompt by its number and temperature.
    """
    turns = [prompts.kinds[:i].count(kind) for i, kind in enumerate(prompts.kinds)]
    temperatures = [CHAT_TEMPERATURE if turn % 2 else 0.0 for turn in turns]
    ended = prompts.end_answers(llm, [params(i, temperature) for i, temperature in enumerate(temperatures)])
    return [
        Work(kind, tuple(ids), one.temperature, one.max_tokens)
        for kind, ids, one in zip(prompts.kinds, prompts.token_ids, ended, strict=True)
    ]


def most_tokens(prompt_tokens: int) -> int:
    """Return the most tokens that a prompt of the workload has."""
    return prompt_tokens + _LEAD_IN


def _go_on(llm: LLM, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the target's greedy continuation, generated under a cache salt so that no drafter can look it up."""
    params = SamplingParams(temperature=0.0, max_tokens=_LEAD_IN, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": list(prompt_ids), "cache_salt": "lead-in"}], params, use_tqdm=False)
    if output.error is not None:
        raise RuntimeError(output.error)
    return tuple(output.outputs[0].token_ids)


def _prose(count: int) -> list[str]:
    """Return docstrings of held-out files without their last third, evenly spread over the files."""
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
