"""Throughput of a batch with LoRA adapters, beside the same batch without.

Requests of a batch take none of the adapters and each of them in turn. Both ways run on one engine and take turns. The
adapters are random, and too small to change the text, so that both ways generate the same tokens.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.options import MODEL, SPECULATION, LabSettings
from specinfer.bench.options import SharedSettings
from specinfer.cli.measure import Measurement
from specinfer.core.config import Quantization
from specinfer.core.lora import LoRARequest
from specinfer.core.options import check_settings, setting, setting_of
from specinfer.core.sampling import SamplingParams
from specinfer.engine_args import EngineArgs
from specinfer.llm import LLM
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported
from specinfer.reporting.spread import Spread

PLAIN, ADAPTED = "no adapters", "adapters"
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NUM_ADAPTERS, _BATCH, _PROMPT_TOKENS = 4, 8, 32
_SIZE = 1e-7  # of the numbers in adapters


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    """Options of the measurement.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str = setting_of(LabSettings, "model")
    rank: int = setting(8, MODEL, "Rank of the adapters.", low=1)
    targets: tuple[str, ...] = setting(
        _TARGETS, MODEL, "A matrix that the adapters change. May be repeated.", name="target", metavar="NAME"
    )
    drafters: str | tuple[str, ...] = setting_of(EngineArgs, "drafters", default=())
    tree: str = setting("off", SPECULATION, "Trees, such as auto or best-first:16.", metavar="TREE")
    quantization: Quantization | None = setting_of(EngineArgs, "quantization")
    max_tokens: int = setting_of(SharedSettings, "max_tokens", default=64)
    repeats: int = setting_of(LabSettings, "repeats", default=5)
    json: str | Path | None = setting_of(SharedSettings, "json")

    def __post_init__(self) -> None:
        check_settings(self)


@reported
def run_adapters(config: AdaptersConfig, progress: StageBar) -> Report[None]:
    """Generate with and without adapters in turns, after one turn that is not counted.

    Raises:
        ModelError: The model cannot be used, or takes no adapters.
    """
    params = SamplingParams(temperature=0.0, max_tokens=config.max_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {PLAIN: [], ADAPTED: []}
    with tempfile.TemporaryDirectory() as name:
        progress.stage("loading")
        with LLM(
            config.model, device="cpu", drafters=config.drafters, tree=config.tree, quantization=config.quantization,
            enable_lora=True, max_lora_rank=config.rank, enable_prefix_caching=False,
        ) as llm:  # fmt: skip
            folders = [Path(name) / str(number) for number in range(_NUM_ADAPTERS)]
            for folder in folders:
                _save_adapter(folder, llm.target.loaded.folder, config)
            adapters = [LoRARequest(folder.name, i, str(folder)) for i, folder in enumerate(folders, 1)]
            vocab = llm.target.loaded.vocab_size
            prompts = [[(7 * i + k) % (vocab - 5) + 5 for k in range(_PROMPT_TOKENS)] for i in range(_BATCH)]
            of_requests = {PLAIN: None, ADAPTED: ([None, *adapters] * _BATCH)[:_BATCH]}
            progress.stage("measuring", config.repeats + 1)
            for turn in range(config.repeats + 1):
                for way, requests in of_requests.items():
                    started = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
                    seconds = time.perf_counter() - started
                    if turn:
                        rates[way].append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
                progress.advance()
    shares = [adapted / plain for adapted, plain in zip(rates[ADAPTED], rates[PLAIN], strict=True)]
    values = (Value[str]("what", str), Value[str]("tokens_per_s", lambda way: Spread.from_values(rates[way]), "{:.1f}"))
    table = Table("rates", f"Tokens per second of {_BATCH} requests, median", values, list(rates))
    share = Spread.from_values(shares)
    lines = [f"{config.model}: {_NUM_ADAPTERS} adapters of rank {config.rank}"]
    last = [f"with adapters {share.median:.3f} of the speed without"]
    return Report(lines, (table,), numbers={"share": share.median}, last=last)


def _save_adapter(folder: Path, base: Path, config: AdaptersConfig) -> None:
    """Write a random adapter in PEFT's format."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    tensors = {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in config.targets:
            outputs, inputs = module.weight.shape
            for matrix, shape in (("A", (config.rank, inputs)), ("B", (outputs, config.rank))):
                tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = torch.randn(shape) * _SIZE
    fields = {
        "peft_type": "LORA", "r": config.rank, "lora_alpha": config.rank, "target_modules": list(config.targets),
        "bias": "none", "base_model_name_or_path": str(base),
    }  # fmt: skip
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")


ADAPTERS = Measurement(
    "adapters",
    AdaptersConfig,
    "benchmarks.adapters:run_adapters",
    "Measure the throughput with LoRA adapters, beside the same batch without.",
)
