"""The check of layers that were put together anew: right ones pass whatever the weights, and wrong ones are caught."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.peers.plain_folder import plain_folder
from specinfer.core.config import OffloadConfig
from specinfer.core.errors import ModelError
from specinfer.model.attention import register
from specinfer.model.definition import load_config, read_definition
from specinfer.model.layers import check as layer_check
from specinfer.model.layers import plan as layer_plan
from specinfer.model.layers.check import Verdict
from specinfer.model.layers.device import DeviceDecoder, can_fuse_on_device
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.linears import quantize_linears
from specinfer.model.load import load_model
from specinfer.model.probe import probe
from tiny import make_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FAMILIES = ["gemma3_text", "llama", "mistral", "qwen2", "qwen3"]  # whose layers can all be made wrong in these ways
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOS, CHANNEL = 1, 5

Mutation = Callable[[Any, Any], None]  # of the model and its last layer


def _trained(family: str) -> Any:
    """A tiny model with what random ones lack: biases, norms' weights, outliers, and a massive activation.

    The first token's hidden state is huge in one channel until the last layer takes it away.
    """
    model = make_model(family, num_hidden_layers=3, bos_token_id=BOS)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight += torch.randn_like(weight) * (0.5 if name.endswith("bias") else 0.2)
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 2.0  # tokens look at few others
        model.model.embed_tokens.weight[:, 9] += 8.0  # an outlier of all tokens
        _add_massive(model)
    return model


def _add_massive(model: Any) -> None:
    layers, size = model.model.layers, 3000.0
    model.model.embed_tokens.weight[:, CHANNEL] = -1.0
    model.model.embed_tokens.weight[BOS, CHANNEL] = size
    for layer in layers:
        layer.self_attn.o_proj.weight[CHANNEL] = 0.0
        layer.mlp.down_proj.weight[CHANNEL] = 0.0
    mlp, normed = layers[-1].mlp, model.config.hidden_size**0.5  # of the huge channel
    layers[-1].post_attention_layernorm.weight[CHANNEL] = 1.0
    gate, opened = 7.3, 1.1
    for projection, its in ((mlp.gate_proj, gate), (mlp.up_proj, opened)):
        projection.weight[0] = 0.0
        projection.weight[0, CHANNEL] = its
    model.lm_head.weight[:, CHANNEL] *= 4.0
    # What is left lies between the numbers that bfloat16 has near 3000.
    mlp.down_proj.weight[CHANNEL, 0] = -0.9975 * size / (gate * opened * normed * normed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            _trained(family).save_pretrained(made[family])
        return made[family]

    return folder


def _swap_heads(_: Any, layer: Any) -> None:
    dim = layer.self_attn.head_dim
    weight = layer.self_attn.q_proj.weight
    weight[: 2 * dim] = weight[: 2 * dim].roll(dim, 0)


def _swap_kv_heads(_: Any, layer: Any) -> None:
    weight = layer.self_attn.v_proj.weight
    weight.copy_(weight.roll(layer.self_attn.head_dim, 0))


def _swap_gates(_: Any, layer: Any) -> None:
    layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def _swap_keys(_: Any, layer: Any) -> None:
    attention = layer.self_attn
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj


def _swap_norms(_: Any, layer: Any) -> None:
    layer.input_layernorm.weight, layer.post_attention_layernorm.weight = (
        layer.post_attention_layernorm.weight,
        layer.input_layernorm.weight,
    )


def _change_epsilon(model: Any, layer: Any) -> None:
    model.config.rms_norm_eps *= 10
    if hasattr(layer.input_layernorm, "variance_epsilon"):
        layer.input_layernorm.variance_epsilon *= 10


def _change_scale(_: Any, layer: Any) -> None:
    layer.self_attn.scaling *= 1.2


def _shift_outputs(_: Any, layer: Any) -> None:
    layer.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight.roll(layer.self_attn.head_dim, 1))


def _drop_bias(_: Any, layer: Any) -> None:
    layer.self_attn.k_proj.bias.zero_()  # the same for all keys, but for the rotation
    layer.self_attn.v_proj.bias.zero_()


def _widen_window(_: Any, layer: Any) -> None:
    layer.self_attn.sliding_window = layer_plan._window_of(layer.self_attn) + 1


def _drop_window(_: Any, layer: Any) -> None:
    layer.self_attn.sliding_window = None


def _change_head_norm(_: Any, layer: Any) -> None:
    layer.self_attn.k_norm.weight.copy_(layer.self_attn.q_norm.weight)


def _change_rotation(model: Any, _: Any) -> None:
    for name, frequencies in model.model.rotary_emb.named_buffers():
        if name.endswith("inv_freq"):
            frequencies *= 0.7


def _shift_embedding(model: Any, _: Any) -> None:
    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))


def _change_last_norm(model: Any, layer: Any) -> None:
    model.model.norm.weight.copy_(layer.input_layernorm.weight)


def _spoil(_: Any, layer: Any) -> None:
    layer.mlp.down_proj.weight[0, 0] = float("nan")


def _shift_head(model: Any, _: Any) -> None:
    model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))


_ALL = frozenset(FAMILIES)
MUTATIONS: dict[str, tuple[Mutation, frozenset[str]]] = {
    "two heads are swapped": (_swap_heads, _ALL),
    "the heads of values are swapped": (_swap_kv_heads, _ALL),
    "gates and values are swapped": (_swap_gates, _ALL),
    "keys and values are swapped": (_swap_keys, _ALL),
    "the norms are swapped": (_swap_norms, _ALL),
    "epsilon is ten times as large": (_change_epsilon, _ALL),
    "the scale is another": (_change_scale, _ALL),
    "heads meet others' outputs": (_shift_outputs, _ALL),
    "the rotation is another": (_change_rotation, _ALL),
    "embeddings are shifted": (_shift_embedding, _ALL),
    "the last norm is another": (_change_last_norm, _ALL),
    "the head is shifted": (_shift_head, _ALL),
    "a weight is no number": (_spoil, _ALL),
    "biases are missing": (_drop_bias, frozenset({"qwen2"})),
    "a window is one wider": (_widen_window, frozenset({"mistral", "gemma3_text"})),
    "a window is missing": (_drop_window, frozenset({"mistral", "gemma3_text"})),
    "a head norm is another's": (_change_head_norm, frozenset({"qwen3", "gemma3_text"})),
}
CASES = [(name, family) for name, (_, families) in MUTATIONS.items() for family in sorted(families)]


def _verdict(
    folder: Path, dtype: torch.dtype, kind: str, mutate: Mutation | None = None, quantization: str | None = None
) -> Verdict:
    """Of the native decoder, or that of GPUs by its plain twins; of a definition that is changed on the way there."""
    register()
    config = load_config(folder)
    model = read_definition(folder, config, dtype).eval().requires_grad_(False)
    if quantization is not None and kind == "device":
        quantize_linears(model, quantization, config, CPU, native=False)
    probed = probe(model, config, CPU, records=True)
    if mutate is not None:
        with torch.no_grad():
            mutate(model, model.model.layers[-1])
    made: nn.Module
    if kind == "native":
        made = FusedDecoder(model, quantization).eval()
    else:
        if not can_fuse_on_device(model, GPU):
            pytest.skip("the decoder of GPUs has no such layers")
        made = DeviceDecoder(model, 256).eval()
    return probed.judge(made, dtype, quantization if kind == "native" else None)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["native", "device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_layers_pass_whatever_the_weights(
    family: str, dtype: torch.dtype, kind: str, trained: Callable[[str], Path], model_folder: Callable[..., Path]
) -> None:
    for folder in (trained(family), model_folder(family), model_folder(family, tie_word_embeddings=True)):
        verdict = _verdict(folder, dtype, kind)
        assert verdict.error <= 0.7 * verdict.allowed, verdict


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["native", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_wrong_layer_is_caught(
    name: str, family: str, dtype: torch.dtype, kind: str, trained: Callable[[str], Path]
) -> None:
    verdict = _verdict(trained(family), dtype, kind, MUTATIONS[name][0])
    assert not verdict.is_right
    assert not verdict.error <= verdict.own_error
    if not any(word in name for word in ("embedding", "rotation", "epsilon")):
        assert verdict.place in ("layer 2", "the head"), "the layers before are as they were"


SOME = [family if family == FAMILIES[0] else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["native", "device"])
@pytest.mark.parametrize("family", SOME)
def test_rounded_layers_are_judged_too(
    family: str, kind: str, quantization: str, trained: Callable[[str], Path]
) -> None:
    folder = trained(family)
    verdict = _verdict(folder, torch.bfloat16, kind, None, quantization)
    assert verdict.error <= 0.9 * verdict.allowed, verdict
    for name in ("gates and values are swapped", "keys and values are swapped"):
        assert not _verdict(folder, torch.bfloat16, kind, MUTATIONS[name][0], quantization).is_right, name
    if kind == "device":  # the reference has the same rounded weights
        assert not _verdict(folder, torch.bfloat16, kind, _change_rotation, quantization).is_right


def test_whole_passes_would_not_show_the_difference(trained: Callable[[str], Path]) -> None:
    """Of these weights PyTorch's own pass in bfloat16 is far from float32, and the layers are right all the same."""
    folder = trained("llama")
    exact, rounded = (_first_logits(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert (rounded - exact).norm() > 0.1 * (exact - exact.mean()).norm()
    assert _verdict(folder, torch.bfloat16, "native").is_right


def _first_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(torch.tensor([[BOS]])).logits[0, 0]
    return logits.float()


def _mutated(monkeypatch: pytest.MonkeyPatch, mutate: Mutation) -> None:
    right = FusedDecoder.__init__

    def wrong(self: FusedDecoder, model: Any, *args: Any, **options: Any) -> None:
        with torch.no_grad():
            mutate(model, model.model.layers[-1])
        right(self, model, *args, **options)

    monkeypatch.setattr(FusedDecoder, "__init__", wrong)


def test_the_message_names_both_errors_and_what_it_means_for_speed(
    trained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _mutated(monkeypatch, _swap_heads)
    for quantization in (None, "int8"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loaded = load_model(trained("qwen2"), torch.bfloat16, CPU, quantization)
        assert not isinstance(loaded.model, FusedDecoder)
        assert loaded.quantization == quantization
        assert loaded.compute_path == "native linear layers; the native fused layers were refused"
        (message,) = [record.getMessage() for record in caplog.records]
        for words in ("native", "several times slower", "layer 2", "float32", "PyTorch's own"):
            assert words in message


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_streamed_layers_are_checked_like_resident_ones(
    quantization: str | None, trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = None if quantization is None else str(tmp_path)
    offload = OffloadConfig("disk", offload_folder=folder)
    loaded = load_model(trained("mistral"), torch.bfloat16, CPU, quantization, offload=offload)
    assert isinstance(loaded.model, FusedDecoder)
    assert loaded.stream is not None
    loaded.stream.close()
    _mutated(monkeypatch, _change_scale if quantization is None else _drop_window)
    if quantization is None:
        with pytest.raises(ModelError, match=r"offload: .* leave offload out: layer 2 errs by"):
            load_model(trained("mistral"), torch.bfloat16, CPU, quantization, offload=offload)


def test_numbers_too_large_for_the_definition_are_no_fault_of_ours(
    trained: Callable[[str], Path], tmp_path: Path
) -> None:
    """Hidden states stay float32 in the native layers; PyTorch's are infinite in fp16."""
    model = _trained("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[CHANNEL + 1] = 1e4
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float16, CPU)
    assert isinstance(loaded.model, FusedDecoder)
    with pytest.raises(ModelError, match="not finite in this dtype"):
        load_model(tmp_path, torch.float16, CPU, native=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_trained_weights_are_judged_rightly(dtype: torch.dtype, smollm2_folder: Path) -> None:
    folder = plain_folder(smollm2_folder, str(dtype).removeprefix("torch."))
    verdict = _verdict(folder, dtype, "native")
    assert verdict.error <= 0.7 * verdict.allowed, verdict
    assert not _verdict(folder, dtype, "native", _swap_heads).is_right


def test_the_error_of_a_definition_is_not_small_by_chance_where_one_activation_outweighs_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is one random number there, near zero for some tokens in a single pass."""
    model = make_model("llama", num_hidden_layers=1)
    layer, embedding = model.model.layers[0], model.model.embed_tokens.weight
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        embedding[:, 0] = 1.0
        embedding[:, 1] = 1.0 + torch.linspace(0.05, 0.1, len(embedding))
        layer.mlp.gate_proj.weight[0] = 0.0
        layer.mlp.gate_proj.weight[0, :2] = torch.tensor([-100.0, 100.0])  # of their small difference
        layer.mlp.down_proj.weight[:, 0] *= 100.0
    model.save_pretrained(tmp_path)
    register()
    config = load_config(tmp_path)
    definition = read_definition(tmp_path, config, torch.bfloat16).eval().requires_grad_(False)

    def least() -> float:
        """Error of the token with the least one, as a share of the median token's."""
        reference = probe(definition, config, CPU, records=True).reference
        assert reference is not None
        added = (reference.outputs[1] - reference.inputs[0]).norm(dim=1)
        errors = (reference.own[1] / added)[:-1]
        return float(errors.min() / errors.median())

    assert least() > 0.2
    monkeypatch.setattr(layer_check, "_DISTURBED", 0)
    assert least() < 0.1
