"""Prompts in files, and the output of a target with the drafters that were made for it."""

import json
from collections.abc import Sequence
from pathlib import Path

from specinfer.core.sampling import SamplingParams
from specinfer.llm import LLM


def save_prompts(path: Path, prompts: Sequence[Sequence[int]]) -> Path:
    """Write prompts of token ids as lines of JSON."""
    path.write_text("".join(json.dumps({"prompt_token_ids": list(prompt)}) + "\n" for prompt in prompts))
    return path


def check_same_output(
    target: str | Path,
    drafters: Sequence[str | Path],
    tree: str,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> None:
    """Check that the drafters draft, and that the tokens are those of plain decoding."""
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    emitted = []
    for llm in (LLM(target, tree="off"), LLM(target, drafters=drafters, tree=tree)):
        outputs = llm.generate(asked, params, use_tqdm=False)
        emitted.append([output.outputs[0].token_ids for output in outputs])
    stats = outputs[0].metrics.speculative_decoding
    assert stats is not None
    assert int(str(stats["num_draft_tokens"])) > 0
    assert emitted[0] == emitted[1]
