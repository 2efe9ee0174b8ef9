"""Definitions as older versions of transformers have them: what these models compute there, without installing one."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bamba import modeling_bamba
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.lfm2_moe import modeling_lfm2_moe
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.recurrent_gemma import configuration_recurrent_gemma, modeling_recurrent_gemma

import reference
from specinfer.model.definition import load_plain
from specinfer.model.layers.families import layer_kind
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from tiny import logits, make_model, random_prompts

PROMPT = random_prompts([20])[0]
CLOSE = {"rtol": 1e-3, "atol": 2e-4}


def _check(family: str, folder: Path, *, is_native: bool) -> None:
    model = make_model(family)
    model.save_pretrained(folder)
    loaded = load_model(folder, torch.float32, torch.device("cpu"), native=is_native)
    assert isinstance(loaded.model, FusedDecoder) == is_native
    found = logits(ModelRunner(loaded, 64), PROMPT)[-1]
    torch.testing.assert_close(found, reference.last_logits(model, PROMPT), **CLOSE)


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("lfm2", modeling_lfm2.Lfm2DecoderLayer),
        ("lfm2_moe", modeling_lfm2_moe.Lfm2MoeDecoderLayer),
        ("nemotron_h", modeling_nemotron_h.NemotronHBlock),
    ],
)
def test_layers_that_hand_no_keywords_on(
    family: str, layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LFM2's before 5.23 and Nemotron-H's before 5.17 call all but attention without them."""
    known = layer.forward

    @functools.wraps(known)
    def forward(self: Any, hidden_states: Tensor, **keywords: Any) -> Any:
        return known(self, hidden_states, **{name: one for name, one in keywords.items() if name != "forward_batch"})

    monkeypatch.setattr(layer, "forward", forward)
    _check(family, tmp_path, is_native=False)


class _WholeNorm(nn.Module):
    """Mamba-2's norm before 5.21: of all heads, whatever their groups."""

    def __init__(self, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        x = hidden_states.float() * nn.functional.silu(gate.float())
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


@pytest.mark.parametrize(
    ("family", "module", "name"),
    [("bamba", modeling_bamba, "BambaRMSNormGated"), ("mamba2", modeling_mamba2, "MambaRMSNormGated")],
    ids=["bamba", "mamba2"],
)
def test_a_norm_over_all_heads_is_fused(
    family: str, module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, _WholeNorm)
    _check(family, tmp_path, is_native=True)


def test_rotations_that_want_a_position_for_each_axis_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Qwen3.5 in 5.17."""
    rotary = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding
    known = rotary.forward

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        axes, _, _ = position_ids.shape
        assert axes == 3
        return known(self, x, position_ids)

    monkeypatch.setattr(rotary, "forward", forward)
    _check("qwen3_5_text", tmp_path, is_native=True)


def test_layers_whose_types_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of RecurrentGemma before 5.23."""
    config = configuration_recurrent_gemma.RecurrentGemmaConfig
    blocks = (modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock, modeling_recurrent_gemma.RecurrentGemmaAttention)
    monkeypatch.setattr(config, "attribute_map", {"sliding_window": "attention_window_size"})
    monkeypatch.setattr(config, "layers_block_type", property(lambda it: it.block_types[: it.num_hidden_layers]))
    monkeypatch.setattr(
        modeling_recurrent_gemma,
        "TEMPORAL_BLOCK_CLASSES",
        dict(zip(("recurrent", "attention"), blocks, strict=True)),
    )
    _check("recurrent_gemma", tmp_path, is_native=False)


@pytest.mark.parametrize("attention", [{}, {"attn_implementation": "sdpa"}], ids=["default", "sdpa"])
def test_soft_caps_are_kept_where_sdpa_would_leave_them_out(
    attention: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2 before 5.21 has SDPA, without them."""
    monkeypatch.setattr(modeling_gemma2.Gemma2PreTrainedModel, "_supports_sdpa", True)
    model = make_model("gemma2")
    model.save_pretrained(tmp_path)
    found = reference.last_logits(load_plain(tmp_path, torch.float32, **attention), PROMPT)
    torch.testing.assert_close(found, reference.last_logits(model, PROMPT), **CLOSE)


def test_a_type_of_all_rotations_beside_those_of_layer_types_is_not_read() -> None:
    """As 5.16 writes it for a Gemma 3 whose layers are all of one type."""
    config = make_model("gemma3_text").config
    known = layer_kind(config)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "default"}
    assert known is not None
    assert layer_kind(config) is known
