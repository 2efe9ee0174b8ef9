"""The training record: how both models were made and their results on held-out text."""

import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demo_pair.continuations import continue_rows
from demo_pair.measure import agreement, bits_per_byte, mean_loss, rows_of
from demo_pair.vocabulary import load_tokenizer
from specinfer.demo import corpus

_NUM_PROMPTS = 64
_NUM_PROMPT_TOKENS = 96
_NUM_NEW = 256
_REPEAT = 16  # a span of this many tokens that occurred earlier in the row counts as repetition


@dataclass(frozen=True, slots=True)
class Pair:
    """Both models, loaded."""

    target: Any
    drafter: Any


def write_record(out: Path, trained: Pair, packed: Pair, heldout: Tensor, target: Path) -> None:
    """Measure the pair before and after packing and write `training.json`."""
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "device": _device_name(next(trained.target.parameters()).device),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "corpus": _corpus_size(out, heldout),
        "training": {name: _progress(out / f"{name}.checkpoint.pt") for name in ("target", "drafter-start", "drafter")},
        "heldout": _heldout_figures(trained, packed, heldout),
        "agreement": _agreement_figures(packed, heldout, out / "tokenizer"),
    }
    target.write_text(json.dumps(record, indent=2) + "\n")


def _corpus_size(out: Path, heldout: Tensor) -> dict[str, int]:
    training = torch.load(out / "training-tokens.pt", weights_only=True)
    return {
        "training_files": len(corpus.training_files()),
        "training_bytes": _num_bytes(corpus.training_files()),
        "training_tokens": len(training),
        "heldout_files": len(corpus.heldout_files()),
        "heldout_bytes": _num_bytes(corpus.heldout_files()),
        "heldout_tokens": len(heldout),
    }


def _heldout_figures(trained: Pair, packed: Pair, heldout: Tensor) -> dict[str, dict[str, float]]:
    num_bytes = _num_bytes(corpus.heldout_files())
    device = next(packed.target.parameters()).device
    rows = rows_of(heldout, 512).to(device)
    figures = {}
    for name in ("target", "drafter"):
        model = getattr(packed, name)
        loss = mean_loss(model, rows)
        figures[name] = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "loss": loss,
            "loss_before_packing": mean_loss(getattr(trained, name), rows),
            "bits_per_byte": bits_per_byte(loss, len(heldout), num_bytes),
        }
    return figures


def _agreement_figures(pair: Pair, heldout: Tensor, tokenizer_folder: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(tokenizer_folder)
    texts = corpus.heldout_prompts(_NUM_PROMPTS)
    encoded = [tokenizer.encode(text).ids[-_NUM_PROMPT_TOKENS:] for text in texts]
    prompts = torch.tensor([ids for ids in encoded if len(ids) == _NUM_PROMPT_TOKENS])
    device = next(pair.target.parameters()).device
    torch.manual_seed(0)
    prompts = prompts.to(device)
    greedy = continue_rows(pair.target, prompts, _NUM_NEW, greedy_rows=len(prompts))
    drawn = continue_rows(pair.target, prompts, _NUM_NEW, greedy_rows=0)
    skip = _NUM_PROMPT_TOKENS - 1
    on_files = agreement(pair.target, pair.drafter, rows_of(heldout, 512).to(device))
    return {
        "heldout_files": {"hit_rates": on_files.hit_rates},
        "greedy_text": {
            **asdict(agreement(pair.target, pair.drafter, greedy, skip=skip)),
            "repeated": repeated_part(greedy[:, _NUM_PROMPT_TOKENS:]),
        },
        "drawn_text": {
            "hit_rates": agreement(pair.target, pair.drafter, drawn, skip=skip).hit_rates,
            "repeated": repeated_part(drawn[:, _NUM_PROMPT_TOKENS:]),
        },
    }


def repeated_part(rows: Tensor) -> float:
    """Return the part of all spans of `_REPEAT` tokens that occurred earlier in the same row."""
    repeated = total = 0
    for row in rows.tolist():
        seen: set[tuple[int, ...]] = set()
        for start in range(len(row) - _REPEAT + 1):
            span = tuple(row[start : start + _REPEAT])
            repeated += span in seen
            total += 1
            seen.add(span)
    return repeated / total


def _num_bytes(paths: list[Path]) -> int:
    return sum(len(corpus.read_text(path).encode()) for path in paths)


def _progress(checkpoint: Path) -> dict[str, float]:
    progress: dict[str, float] = torch.load(checkpoint, weights_only=True)["progress"]
    return progress


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
