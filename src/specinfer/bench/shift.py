"""Benchmark of traffic whose domain changes midway: how fast each way to choose drafters adapts.

Requests run one at a time: held-out code first, then the other domain. Nothing is timed. The output is divided into
blocks of 100 tokens before and after the shift. Every arm generates the same tokens, with as many nodes in a pass.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from specinfer.bench.acceptance_report import Block, Setup, ShiftArm
from specinfer.core.config import SpeculativeConfig
from specinfer.core.files import read_text
from specinfer.core.lookups import LOOKUPS
from specinfer.core.sampling import SamplingParams
from specinfer.llm import LLM

BLOCK = 100  # tokens
_ALL = "all, merged"


def shift_setups(drafters: Sequence[str], tree: str, select: str) -> dict[str, Setup]:
    """Return setups by label: each drafter alone, all together, and `select` if there are several draft models."""
    labels = [Path(name).name for name in drafters]
    setups = {
        label if labels.count(label) == 1 else name: _setup((name,), tree)
        for name, label in zip(drafters, labels, strict=True)
    }
    if len(drafters) > 1:
        setups[_ALL] = _setup(drafters, tree)
    if len(set(drafters) - set(LOOKUPS)) > 1:
        setups[select] = _setup(drafters, tree, select)
    return setups


def _setup(drafters: Sequence[str], tree: str, select: str = "all") -> Setup:
    return Setup(tuple(drafters), "coupled", "shared-noise", tree, 0.0, select)


def run_shift(
    llm: LLM,
    setups: dict[str, Setup],
    before: Sequence[list[int]],
    after: Sequence[list[int]],
    warmup: Sequence[list[int]],
    max_tokens: int,
    advance: Callable[[], None],
) -> tuple[ShiftArm, ...]:
    """Serve the traffic with each setup, and count tokens and passes.

    Args:
        before, after, warmup: Prompts before and after the shift, and prompts that are served first and not counted.

    Raises:
        RuntimeError: A request failed.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    arms = []
    for label, setup in setups.items():
        llm.speculate(
            SpeculativeConfig(setup.drafters, setup.tree, setup.verification, setup.drawing, select=setup.select)
        )
        for prompt in warmup:
            _passes(llm, prompt, params)
        passes = [emitted for prompt in before for emitted in _passes(llm, prompt, params)]
        start = -sum(passes)
        passes += [emitted for prompt in after for emitted in _passes(llm, prompt, params)]
        arms.append(ShiftArm(label, setup, blocks_of(passes, start)))
        advance()
    return tuple(arms)


def _passes(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Return the number of tokens that each pass emitted."""
    emitted, output = [], None
    for chunk in llm.stream({"prompt_token_ids": prompt}, params):
        emitted.append(len(chunk.token_ids))
        output = chunk.output or output
    if output is None or output.error is not None:
        raise RuntimeError(f"shift: {output.error if output else 'a request ended early'}")
    return [count for count in emitted if count]


def blocks_of(passes: Sequence[int], start: int) -> tuple[Block, ...]:
    """Return the passes grouped into blocks. The first pass began at token `start`, counted from the shift."""
    found: dict[int, tuple[int, int]] = {}
    for emitted in passes:
        block = start // BLOCK * BLOCK
        num_tokens, num_passes = found.get(block, (0, 0))
        found[block] = num_tokens + emitted, num_passes + 1
        start += emitted
    return tuple(Block(place, *counts) for place, counts in found.items())


def prose_prompts(count: int, num_chars: int) -> list[str]:
    """Return pieces of Python's documentation from different topics of the standard library's `pydoc_data`.

    Raises:
        ValueError: The documentation is not installed, or too short.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("shift_to: this Python comes without its documentation; name a text file") from error
    texts = [topics[name] for name in sorted(topics) if len(topics[name]) > num_chars]
    if len(texts) < count:
        raise ValueError(f"num_prompts: the documentation has {len(texts)} topics of {num_chars} characters; lower it")
    return [cut_text(text, 1, num_chars)[0] for text in texts[:: max(len(texts) // count, 1)][:count]]


def other_domain(file: str | Path | None, count: int, num_chars: int) -> list[str]:
    """Return prompts of the domain after the shift: pieces of a text file, or of Python's documentation.

    Raises:
        ValueError: There is no such text, or it is too short.
    """
    if file is None:
        return prose_prompts(count, num_chars)
    return cut_text(read_text("shift_to", file), count, num_chars)


def cut_text(text: str, count: int, num_chars: int) -> list[str]:
    """Return `count` pieces of a text, evenly spread, each of whole lines and at most `num_chars` long.

    Raises:
        ValueError: The text is too short.
    """
    if len(text) < count * num_chars:
        raise ValueError(f"shift_to: {count} pieces of {num_chars} characters need a longer text than {len(text)}")
    pieces = []
    for i in range(count):
        place = i * (len(text) // count)
        place = max(text.find("\n", place, place + num_chars // 4) + 1, place)
        pieces.append(text[place : place + num_chars].rpartition("\n")[0].strip() or text[place : place + num_chars])
    return pieces
