"""Options of the acceptance measurement. Nothing here needs torch."""

from dataclasses import dataclass
from pathlib import Path

from specinfer.bench.options import (
    AnyPrompt,
    bench_params,
    check_distinct,
    check_kinds,
    check_models,
    check_once,
    check_prompts,
    check_seed,
    check_whole,
    kinds_for,
)
from specinfer.core.config import check_device, check_verification, parse_select
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree_shape import MAX_TREE_NODES

SHIFT = "shift"
PARTS = ("table1", "table2", "table3", "rules", "drafters", SHIFT)


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Options of the acceptance measurement.

    Attributes:
        model: A local folder, a hub name, or "demo".
        drafters: "auto", or folders, hub names, "ngram" and "suffix". Tables and rules use the first; the drafters
            part merges the first two, three, ... of them.
        parts: Names from `PARTS`. The default is all but shift.
        num_prompts: Number of held-out texts to continue, or of chat prompts. The shift part continues the same number
            of texts of the other domain after them.
        max_tokens: Tokens generated for each prompt. The end-of-text token ends answers to chat prompts only.
        kinds: Kinds of chat prompts to answer. None means all kinds if the model is "demo-chat", and texts to continue
            otherwise.
        temperatures: Temperatures of the rules and drafters parts. The paper's tables always use those of `MODES`.
        nodes: Numbers of nodes of the trees to compare. The drafters part uses the largest.
        verification: Verification rule for sampled text. None means the paper's multi-step rule for table 2, and the
            coupled rule for the drafters part.
        quantization: Quantization of the target ("int8", "int4" or "fp8"), or None for none.
        drafter_quantization: Quantization of the model drafters.
        kv_cache_dtype: Data type of the keys and values in the caches, one of `KV_CACHE_DTYPES`.
        select: Drafter selection that the shift part compares with using all drafters.
        shift_to: Text file of the domain that the shift part changes to, or None for Python's documentation.
        prompt_chars: Approximate length of the prompts in characters.
        prompts: Texts or token ids to continue in place of the held-out texts.
        json: File to write the numbers to.
        plot: File to write the plot to; its suffix sets the format.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = "demo"
    drafters: str | tuple[str, ...] = "auto"
    parts: tuple[str, ...] = PARTS[:-1]
    num_prompts: int = 8
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    nodes: tuple[int, ...] = (32,)
    verification: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str | None = None
    kv_cache_dtype: str = "auto"
    select: str = "hedge:1"
    shift_to: str | Path | None = None
    device: str = "auto"
    seed: int = 0
    prompt_chars: int = 600
    prompts: tuple[AnyPrompt, ...] | None = None
    kinds: tuple[str, ...] | None = None
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("max_tokens", 2), ("prompt_chars", 1)):
            check_whole(name, getattr(self, name), least)
        check_seed(self.seed)
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, not {unknown[0]!r}")
        for name in ("parts", "temperatures"):
            check_once(name, getattr(self, name))
        check_distinct("nodes", self.nodes, MAX_TREE_NODES)
        if parse_select(self.select) is None:
            raise ValueError('select: shift compares with "all" anyway; name a choice, such as "hedge:1"')
        if self.verification is not None:
            check_verification(self.verification)
        check_models(self)
        check_device(self.device)
        check_prompts(self.prompts)
        check_kinds(self.kinds, self.prompts)
        for temperature in self.temperatures:
            self.sampling_params(0, temperature)

    @property
    def asked_kinds(self) -> tuple[str, ...]:
        """Kinds of the chat prompts to answer; empty if texts are continued."""
        return kinds_for(self.model, self.kinds, self.prompts)

    def sampling_params(self, prompt: int, temperature: float) -> SamplingParams:
        """Return the sampling parameters of a prompt, which are the same for every arm."""
        return bench_params(temperature, self.max_tokens, self.seed + prompt, ignore_eos=not self.asked_kinds)
