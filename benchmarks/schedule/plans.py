"""Configuration of a comparison of schedulers: the arms and the order in which they run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specinfer.bench.loop import Turn
from specinfer.bench.options import (
    PLAIN,
    bench_params,
    check_kinds,
    check_models,
    check_once,
    check_seed,
    check_whole,
    rotated,
)
from specinfer.core.lookups import LOOKUPS
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree_shape import parse_tree

AUTO, LEARNED = "auto", "learned"
WHICH = ("all", "models", "lookups")
# Trees of one size for all requests. The part after the @ selects the drafters.
FIXED = (
    "1,1,1,1,1,1",
    "best-first:7:7",
    "best-first:11:8",
    "best-first:15:8",
    "best-first:15:15",
    "best-first:31:12",
    "best-first:31:31",
    "best-first:7:6@models",
    "best-first:15:8@models",
    "best-first:7:7@lookups",
    "best-first:15:15@lookups",
    "best-first:31:31@lookups",
)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Options of the benchmark. Plain decoding, "auto" by cost alone and the learned scheduler are always measured.

    Attributes:
        scheduler: Scheduler file written by `specinfer tune --policy`.
        model: A local folder, a hub name, or "demo".
        drafters: Folders, hub names, "ngram" and "suffix". All arms are possible with a model and a lookup.
        fixed: Fixed configurations: a tree, optionally followed by an @ and its drafters: models, lookups or all.
        grow: Size to grow the target to, such as "1b"; drafters grow to a hundredth of that. Llama models only.
        dtype: "auto" for the checkpoint's dtype, or bfloat16 for grown models.
        num_prompts: Prompts of each part of the workload.
        kinds: Kinds of chat prompts that are the parts of the workload. With None, the parts are all kinds if the
            model is "demo-chat", and otherwise code, prose and repetition.
        prompt_tokens: Most tokens of a prompt of code or prose.
        max_tokens: Tokens generated for each prompt. The end-of-text token does not end the output, but answers to
            chat prompts are no longer than those of plain decoding.
        repeats: Measured runs of each arm on each prompt.
        warmup: Unmeasured rounds over all arms before the measured ones. Arms that learn already learn in them.
        json: File to write the numbers to.
        plot: File to draw the plot to. Its suffix is the format.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    scheduler: str | Path
    model: str = "demo"
    drafters: tuple[str, ...] = ("demo", "suffix")
    fixed: tuple[str, ...] = FIXED
    grow: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    num_prompts: int = 6
    prompt_tokens: int = 128
    max_tokens: int = 96
    repeats: int = 1
    warmup: int = 1
    seed: int = 0
    kinds: tuple[str, ...] | None = None
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        limits = {"num_prompts": 1, "prompt_tokens": 8, "max_tokens": 2, "repeats": 1, "warmup": 0}
        for name, least in limits.items():
            check_whole(name, getattr(self, name), least)
        check_seed(self.seed)
        check_models(self)
        check_kinds(self.kinds)
        check_once("fixed", self.fixed)
        for name in self.fixed:
            tree, which = split_arm(name)
            if parse_tree(tree).is_auto or parse_tree(tree).is_off:
                raise ValueError(f'fixed: "{tree}" is always measured; leave it out')
            if which != "all" and not self.names(which):
                raise ValueError(f"fixed: {name} asks {which}, and no drafter is one; leave it out")

    def names(self, which: str) -> tuple[str, ...]:
        """Return the drafters that an arm uses: all, models or lookups."""
        return tuple(name for name in self.drafters if which == "all" or (name in LOOKUPS) == (which == "lookups"))

    @property
    def arms(self) -> tuple[str, ...]:
        return (PLAIN, *self.fixed, AUTO, LEARNED)

    def sampling_params(self, prompt: int, temperature: float) -> SamplingParams:
        """Return the sampling parameters of a prompt, the same for every arm and repeat."""
        return bench_params(temperature, self.max_tokens, self.seed + prompt)


def split_arm(name: str) -> tuple[str, str]:
    """Return the tree and the drafters (models, lookups or all) of an arm's name.

    Raises:
        ValueError: The part after the @ is not models, lookups or all.
    """
    tree, at, which = name.partition("@")
    if at and which not in WHICH:
        raise ValueError(f"fixed: {name!r} must end in one of {', '.join('@' + one for one in WHICH)}, or in none")
    return tree, which or "all"


def schedule(config: ScheduleConfig, num_prompts: int) -> Iterator[Turn]:
    """Yield the turns: all arms on each prompt. Negative repeats are warm-up."""
    for repeat in range(-config.warmup, config.repeats):
        for prompt in range(num_prompts if repeat >= 0 else min(num_prompts, 3)):
            yield Turn(repeat, (prompt,), rotated(config.arms, prompt + repeat))
