"""Options of the acceptance measurement. Nothing here needs torch."""

from dataclasses import dataclass
from pathlib import Path

from specinfer.bench.options import (
    AnyPrompt,
    SharedSettings,
    bench_params,
    check_distinct,
    check_kinds,
    check_once,
    check_prompts,
)
from specinfer.core.config import check_device, check_verification
from specinfer.core.options import check_settings, setting, setting_of
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree_shape import MAX_TREE_NODES, parse_tree
from specinfer.demo.chat_model import CHAT
from specinfer.engine_args import EngineArgs
from specinfer.inputs.chat.samples import KINDS, named_kinds

PARTS = ("table1", "table2", "table3", "rules", "drafters")
_SAMPLING, _SPECULATION = "Sampling", "Speculation"


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Options of the acceptance measurement.

    Tables and rules use the first drafter; the drafters part merges the first two, three, ... of them, with the largest
    number of nodes. The end-of-text token ends answers to chat prompts only.

    Attributes:
        prompts: Texts or token ids to continue in place of the held-out texts.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = setting_of(EngineArgs, "model", default="demo")
    drafters: str | tuple[str, ...] = setting_of(EngineArgs, "drafters")
    parts: tuple[str, ...] = setting(
        PARTS,
        _SPECULATION,
        "Part to measure: table1, table2, table3, rules or drafters. May be repeated. (default: all)",
        name="part",
    )
    num_prompts: int = setting(8, _SAMPLING, "Number of held-out texts or chat prompts.", low=1)
    max_tokens: int = setting(64, _SAMPLING, "Maximum number of tokens to generate for each prompt.", low=2)
    temperatures: tuple[float, ...] = setting(
        (0.0, 0.6, 1.0),
        _SAMPLING,
        "Temperature for rules and drafters; 0 is greedy. May be repeated. (default: 0, 0.6 and 1; 0 and 0.7 for "
        "demo-chat)",
        name="temperature",
    )
    nodes: tuple[int, ...] = setting(
        (32,), _SPECULATION, "Number of nodes of the trees to compare. May be repeated. (default: 32)"
    )
    trees: tuple[str, ...] = setting(
        (),
        _SPECULATION,
        "Tree of the rules part, such as 1,1,3,1 or best-first:24:6. May be repeated. (default: four of --nodes nodes)",
        name="tree",
    )
    verification: str | None = setting(
        None, _SPECULATION, "Verification rule. (default: multi-step for table2, coupled for drafters)"
    )
    dtype: str = setting_of(EngineArgs, "dtype")
    quantization: str | None = setting_of(EngineArgs, "quantization")
    drafter_quantization: str | None = setting_of(EngineArgs, "drafter_quantization")
    drafter_token_map: int | str | Path = setting_of(EngineArgs, "drafter_token_map")
    drafter_window: str = setting_of(EngineArgs, "drafter_window")
    kv_cache_dtype: str = setting_of(EngineArgs, "kv_cache_dtype")
    device: str = setting_of(EngineArgs, "device")
    seed: int = setting_of(SharedSettings, "seed")
    prompt_chars: int = 600
    prompts: tuple[AnyPrompt, ...] | None = None
    kinds: tuple[str, ...] | None = setting_of(SharedSettings, "kinds")
    json: str | Path | None = setting_of(SharedSettings, "json")
    plot: str | Path | None = setting_of(SharedSettings, "plot")

    def __post_init__(self) -> None:
        check_settings(self)
        if "shift" in self.parts:
            raise ValueError("part: shift is measured by python -m benchmarks shift, in a checkout of the repository")
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, not {unknown[0]!r}")
        for name in ("parts", "temperatures"):
            check_once(name, getattr(self, name))
        check_distinct("nodes", self.nodes, MAX_TREE_NODES)
        self._check_trees()
        if self.verification is not None:
            check_verification(self.verification)
        check_device(self.device)
        check_prompts(self.prompts)
        check_kinds(self.kinds, self.prompts)
        for temperature in self.temperatures:
            self.sampling_params(0, temperature)

    def _check_trees(self) -> None:
        if not self.trees:
            return
        check_once("trees", self.trees)
        if "rules" not in self.parts:
            raise ValueError("trees: only the rules part takes trees; add it to the parts, or leave trees out")
        for tree in self.trees:
            if not parse_tree(tree).max_nodes:
                raise ValueError(f'trees: {tree!r} has no fixed number of nodes; use "1,1,3,1" or "best-first:32"')

    @property
    def asked_kinds(self) -> tuple[str, ...]:
        """Kinds of the chat prompts to answer; empty if texts are continued."""
        if self.kinds is not None:
            return named_kinds(self.kinds)
        return KINDS if self.model == CHAT and self.prompts is None else ()

    def sampling_params(self, prompt: int, temperature: float) -> SamplingParams:
        """Return the sampling parameters of a prompt, which are the same for every arm."""
        return bench_params(temperature, self.max_tokens, self.seed + prompt, ignore_eos=not self.asked_kinds)
