"""Options that several measurements of this folder share."""

from dataclasses import dataclass
from pathlib import Path

from specinfer.core.options import setting, setting_of
from specinfer.engine_args import EngineArgs

SAMPLING, SPECULATION, MODEL = "Sampling", "Speculation", "Model"


@dataclass(frozen=True, slots=True)
class LabSettings:
    """Settings that only measurements of this folder have."""

    grow: str | None = setting(
        None,
        MODEL,
        "Grow the target to this number of parameters, such as 1b, with the same output: Llama, Qwen 2 and 3, Gemma 3.",
        metavar="SIZE",
    )
    peers: tuple[str, ...] = setting(
        (),
        SPECULATION,
        "Another engine to measure in the same run: transformers or llama.cpp; with a drafter, transformers-assisted "
        "or llama.cpp-draft; with draft tokens looked up in its text, transformers-lookup or llama.cpp-lookup. "
        "May end in a type of weights, such as :q8_0, or in :file, the model's own GGUF file. May be repeated.",
        name="peer",
        metavar="NAME",
    )
    sweep: bool = setting(
        False, SPECULATION, "Measure each of the usual settings of a peer by itself, and not only its fastest ones."
    )
    kinds: tuple[str, ...] | None = setting(
        None,
        SAMPLING,
        "Kind of chat prompts: questions, rewriting, code, lists, stories, functions to complete, or all of these; or "
        "of agent work: extraction, calls, edits, quotes, samples, or agents for all of these. May be repeated.",
        name="kind",
        metavar="KIND",
    )
    markdown: str | Path | None = setting(None, "Output", "Write the tables to this file in Markdown.", metavar="FILE")
    repeats: int = setting(7, SAMPLING, "Number of timed passes of each kind.", low=1)
    model: str = setting_of(EngineArgs, "model", default="demo")
