"""Calibrated codes of a model's linear layers, and the perplexity of held-out texts before and after."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from specinfer.learning.tune.corpus import Prompts, read_prompts
from specinfer.model.definition import known_positions, load_config, load_plain, load_tokenizer
from specinfer.model.linears import layer_lists
from specinfer.model.quantized_experts import split_experts
from specinfer.ops.quantization import Bits
from specinfer.ops.quantized_weight import QuantizedWeight
from specinfer.quantize.experts import Place
from specinfer.quantize.gptq import round_layers


class Calibrated(NamedTuple):
    """Codes by layer, the layers that no token of the texts saw, and perplexities, or None without data."""

    rounded: dict[str, QuantizedWeight]
    unseen: set[str]
    perplexity_before: float | None
    perplexity: float | None


def read_texts(source: Path, data: Sequence[Path], num_texts: int, text_tokens: int) -> Prompts:
    """Read texts for calibration, and held-out ones."""
    length = min(text_tokens, known_positions(source) or text_tokens)
    return read_prompts(
        data, load_tokenizer(source), count=num_texts, num_held_out=max(num_texts // 4, 1), length=length,
        most=length,
        vocab_size=int(load_config(source).get_text_config().vocab_size),
    )  # fmt: skip


def calibrate(
    source: Path,
    places: Mapping[str, Place],
    texts: Prompts,
    bits: Bits,
    note: Callable[[int, int], None],
) -> Calibrated:
    """Round the layers of a model so that its outputs on texts change least.

    Args:
        places: The layers by their names, and their places in the model with split experts.
        note: Called with the number of layers that are done, and of all.
    """
    model = load_plain(source, torch.float32).eval().requires_grad_(False)
    before = perplexity_of(model, texts.held_out)
    split_experts(model)
    layers = decoder_layers(source, model)
    note(0, len(layers))
    names = list(dict.fromkeys(place.linear for place in places.values()))
    rounded, unseen = round_layers(model, layers, names, texts.training, bits, lambda done: note(done, len(layers)))
    codes = {name: rounded[place.linear].part(place.rows) for name, place in places.items()}
    without = {name for name, place in places.items() if place.linear in unseen}
    return Calibrated(codes, without, before, perplexity_of(model, texts.held_out))


def decoder_layers(source: Path, model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers of a model by name, in their order."""
    lists = layer_lists(model, load_config(source).get_text_config().num_hidden_layers)
    return {f"{name}.{i}": layer for name, members in lists.items() for i, layer in enumerate(members)}


@torch.no_grad()
def perplexity_of(model: Any, texts: Sequence[Sequence[int]]) -> float:
    """Return the perplexity of texts, whose tokens are predicted from those before them."""
    surprise, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([text])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        surprise += float(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += len(text) - 1
    return math.exp(surprise / count)
