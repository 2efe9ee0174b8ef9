"""Traffic whose domain changes midway: how fast each way to choose drafters adapts.

Requests run one at a time: held-out code first, then the other domain. Nothing is timed. The output is divided into
blocks of 100 tokens before and after the shift. Every arm generates the same tokens, with as many nodes in a pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import SPECULATION, LabSettings
from specinfer.bench.models import find_models
from specinfer.bench.options import SharedSettings, bench_params
from specinfer.bench.prompts import token_prompts
from specinfer.cli.measure import Measurement
from specinfer.core.config import SpeculativeConfig
from specinfer.core.drafter_forms import parse_select
from specinfer.core.lookups import LOOKUPS
from specinfer.core.options import check_settings, setting, setting_of
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.engine_args import EngineArgs
from specinfer.llm import LLM
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported

BLOCK = 100  # tokens
_ALL = "all, merged"
_NUM_WARMUP = 4  # prompts that are served first and not counted
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class ShiftConfig:
    """Options of the measurement.

    Attributes:
        prompts: Texts or token ids of the first domain in place of held-out code.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = setting_of(LabSettings, "model")
    drafters: str | tuple[str, ...] = setting_of(EngineArgs, "drafters", default=("demo", "suffix", "ngram"))
    select: str = setting(
        "hedge:1", SPECULATION, "Selection of drafters to compare with all of them.", metavar="SELECT"
    )
    shift_to: str | Path | None = setting(
        None, "Sampling", "Text of the second domain. (default: the documentation of Python)", metavar="FILE"
    )
    nodes: int = setting(32, SPECULATION, "Number of nodes of the trees.", low=1, high=MAX_TREE_NODES)
    device: str = setting_of(EngineArgs, "device")
    num_prompts: int = setting_of(SharedSettings, "num_prompts")
    max_tokens: int = setting_of(SharedSettings, "max_tokens", default=64)
    prompt_chars: int = setting_of(SharedSettings, "prompt_chars")
    prompts: tuple[str | tuple[int, ...], ...] | None = None
    json: str | Path | None = setting_of(SharedSettings, "json")

    def __post_init__(self) -> None:
        check_settings(self)
        if parse_select(self.select) is None:
            raise ValueError('select: it is compared with "all" anyway; name a choice, such as "hedge:1"')


@reported
def run_shift(config: ShiftConfig, progress: StageBar) -> Report[None]:
    """Serve the traffic with each way to choose drafters.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was counted.
        RuntimeError: A request failed.
    """
    models = find_models(config.model, config.drafters)
    texts = other_domain(config.shift_to, config.num_prompts, config.prompt_chars)
    after = token_prompts(models.target, config.max_tokens, prompts=texts)
    count = config.num_prompts + _NUM_WARMUP
    found = token_prompts(
        models.target, config.max_tokens, count=count, num_chars=config.prompt_chars, prompts=config.prompts
    )
    warmup, before = (found[:_NUM_WARMUP], found[_NUM_WARMUP:]) if config.prompts is None else ([], found)
    tree, params = f"best-first:{config.nodes}:{min(config.nodes, _MAX_DEPTH)}", bench_params(0.0, config.max_tokens, 0)
    setups, rates = setups_of(models.drafters, config.select), dict[str, dict[int, float]]()
    progress.stage("loading")
    longest = max(map(len, [*found, *after])) + config.max_tokens
    with LLM(
        models.target, drafters=models.drafters, tree="1", device=config.device, max_model_len=longest,
        max_num_seqs=1 + config.nodes // 64, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        progress.stage("counting", len(setups))
        for label, (drafters, select) in setups.items():
            llm.speculate(SpeculativeConfig(drafters, tree, "coupled", "shared-noise", select=select))
            for prompt in warmup:
                _passes(llm, prompt, params)
            passes = [emitted for prompt in before for emitted in _passes(llm, prompt, params)]
            start = -sum(passes)
            passes += [emitted for prompt in after for emitted in _passes(llm, prompt, params)]
            rates[label] = blocks_of(passes, start)
            progress.advance()

    def rate(label: str) -> Value[int]:
        return Value(label, lambda start: rates[label].get(start), "{:.2f}")

    starts = sorted({start for blocks in rates.values() for start in blocks})
    title = "Held-out code, then another domain: tokens per pass, in blocks of 100 tokens"
    first = Value[int]("start", lambda start: start, "{:+d}", "tokens from the shift")
    table = Table("blocks", title, (first, *map(rate, rates)), starts)
    return Report([f"{config.model}"], (table,))


def setups_of(drafters: Sequence[str], select: str) -> Mapping[str, tuple[tuple[str, ...], str]]:
    """Return (drafters, selection) by label: each alone, all together, and `select` for several draft models."""
    labels = [Path(name).name for name in drafters]
    setups: dict[str, tuple[tuple[str, ...], str]] = {
        label if labels.count(label) == 1 else name: ((name,), "all")
        for name, label in zip(drafters, labels, strict=True)
    }
    if len(drafters) > 1:
        setups[_ALL] = (tuple(drafters), "all")
    if len(set(drafters) - set(LOOKUPS)) > 1:
        setups[select] = (tuple(drafters), select)
    return setups


def _passes(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Return the number of tokens that each pass emitted."""
    emitted, output = [], None
    for chunk in llm.stream({"prompt_token_ids": prompt}, params):
        emitted.append(len(chunk.token_ids))
        output = chunk.output or output
    if output is None or output.error is not None:
        raise RuntimeError(f"shift: {output.error if output else 'a request ended early'}")
    return [count for count in emitted if count]


def blocks_of(passes: Sequence[int], start: int) -> dict[int, float]:
    """Return tokens per pass by block, named by its first token. The first pass began at token `start`."""
    blocks: dict[int, list[int]] = {}
    for emitted in passes:
        blocks.setdefault(start // BLOCK * BLOCK, []).append(emitted)
        start += emitted
    return {block: sum(counts) / len(counts) for block, counts in blocks.items()}


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
    try:
        return cut_text(Path(file).read_text(encoding="utf-8-sig"), count, num_chars)
    except OSError as error:
        raise ValueError(f"shift_to: {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"shift_to: {file} is not UTF-8 text") from error


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


SHIFT = Measurement(
    "shift",
    ShiftConfig,
    "benchmarks.shift:run_shift",
    "Measure how fast each way to choose drafters adapts to traffic whose domain changes.",
)
