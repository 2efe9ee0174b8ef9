"""Rounded weights: the format keeps what it promises, every family runs on it, and trees change no output."""

import json
import math
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

from benchmarks import perplexity
from benchmarks.perplexity import PerplexityConfig, run_perplexity
from benchmarks.program import app as benchmarks
from reference import layers
from specinfer.bench.latency import run_latency
from specinfer.bench.options import LatencyConfig
from specinfer.cli.app import app
from specinfer.core.config import QUANTIZATIONS
from specinfer.core.errors import ModelError
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import SmallModelDrafter
from specinfer.llm import LLM
from specinfer.model.batch import Piece
from specinfer.model.linears import make_linears_plain, quantize_linears
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.quantized_experts import RoutedExperts
from specinfer.model.runner import ModelRunner
from specinfer.ops import LinearCall, Panels, QuantizedLinear
from specinfer.ops import quantization as format_
from specinfer.ops.quantization import Bits, dequantize, quantize
from specinfer.policy.cost_cache import _situation
from tiny import FAMILIES, VOCAB, logits, make_engine, make_model, make_request, paths_of, random_prompts, resized, run

CPU = torch.device("cpu")
BITS: tuple[Bits, ...] = (8, 4)
WHOLE_NUMBERS = tuple(format_.BITS)  # whose products do not depend on the other rows
Runners = Callable[..., ModelRunner]
Folders = Callable[..., Path]


def _random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------- the format


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 200), st.sampled_from(BITS), st.integers(0, 99))
@example(3, 64, 8, 0)
@example(3, 32, 4, 0)
@example(1, 65, 8, 1)
@example(1, 33, 4, 1)
def test_every_weight_is_near_the_number_its_code_stands_for(size: int, depth: int, bits: Bits, seed: int) -> None:
    weight = _random((size, depth), seed) * 10 ** _random((size, 1), seed + 1)
    rounded = quantize(weight, bits)
    group_size = 64 if bits == 8 else 32
    groups = -(-depth // group_size)
    assert (rounded.codes.shape, rounded.codes.dtype) == ((size, groups * group_size), torch.uint8)
    assert (rounded.scales.shape, rounded.scales.dtype) == ((size, groups), torch.bfloat16)
    assert (rounded.out_features, rounded.in_features, rounded.bits) == (size, depth, bits)
    lowest, highest = (1, 255) if bits == 8 else (0, 15)
    assert lowest <= int(rounded.codes.min()) <= int(rounded.codes.max()) <= highest
    assert (rounded.codes[:, depth:] == rounded.zero).all()
    steps = rounded.scales.float().abs().repeat_interleave(group_size, dim=1)[:, :depth]
    # Of 4 bits the largest may be cut off.
    assert ((dequantize(rounded) - weight).abs() <= steps * (0.5001 if bits == 8 else 1.7)).all()


@pytest.mark.parametrize("bits", BITS)
def test_numbers_that_the_format_represents_are_kept(bits: Bits) -> None:
    source, limit = torch.Generator().manual_seed(0), 127 if bits == 8 else 7
    numbers = torch.randint(-limit, limit + 1, (20, 128), generator=source).float()
    numbers[:, ::32] = 127 if bits == 8 else -8
    weight = numbers * 2.0 ** torch.arange(-10, 10).unsqueeze(1)
    assert torch.equal(dequantize(quantize(weight, bits)), weight)
    assert torch.equal(dequantize(quantize(-weight, bits)), -weight)  # of 4 bits by the sign of the scale


def test_four_bits_are_nearer_than_by_the_largest_alone() -> None:
    """One step an eighth of the largest, as in the simplest formats, is always among what is tried."""
    weight = _random((256, 256), 0)
    values = weight.view(256, -1, 32)
    largest = values.gather(2, values.abs().argmax(dim=2, keepdim=True))
    simple = (values / largest * -8).round().clamp(-8, 7) * largest / -8
    error = (dequantize(quantize(weight, 4)) - weight).pow(2).view_as(values).sum(dim=2)
    simple_error = (simple - values).pow(2).sum(dim=2)
    assert (error <= 1.02 * simple_error).all()  # the scale is rounded itself
    assert error.sum() < 0.92 * simple_error.sum()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_and_extreme_weights(bits: Bits, dtype: torch.dtype) -> None:
    weight = torch.zeros((6, 80), dtype=dtype)
    weight[1, 3] = 1e-7
    weight[2] = torch.finfo(dtype).tiny
    weight[3, 70] = torch.finfo(dtype).smallest_normal / 4
    weight[4, ::2] = torch.finfo(dtype).max / 2
    weight[5, 5], weight[5, 6] = torch.finfo(dtype).max / 2, 1.0
    found = dequantize(quantize(weight, bits))
    assert found.isfinite().all()
    assert not found[0].any()
    torch.testing.assert_close(found[4], weight[4].float(), rtol=0.01, atol=0)
    torch.testing.assert_close(found[1:2], weight[1:2].float(), rtol=0.01, atol=0)


def test_the_size_of_the_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _random((50, 100), 0)
    for bits in BITS:
        whole = quantize(weight, bits)
        with monkeypatch.context() as patch:
            patch.setattr(format_, "_AT_ONCE", 700)
            pieces = quantize(weight, bits)
        assert torch.equal(pieces.codes, whole.codes)
        assert torch.equal(pieces.scales, whole.scales)


# ------------------------------------------------------------------------------------------ the product


@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_its_neighbours(isa: str, bits: Bits) -> None:
    x, call = _random((300, 200), 0), LinearCall(Panels.from_codes(quantize(_random((150, 200), 1), bits)))
    y = call(x)
    for rows in (slice(0, 1), slice(7, 9), slice(250, 300), slice(0, 257), slice(1, 300, 3)):
        assert torch.equal(call(x[rows].contiguous()), y[rows])
    assert torch.equal(call(x.flip(0)).flip(0), y)


@pytest.mark.parametrize("bits", BITS)
def test_near_the_product_of_the_numbers_themselves(isa: str, bits: Bits) -> None:
    """Each activation is off by half a step of its group at most."""
    x, weight = _random((10, 300), 0), quantize(_random((40, 300), 1), bits)
    numbers, size = dequantize(weight), weight.group_size
    exact = x.double() @ numbers.double().T
    groups = functional.pad(x, (0, -300 % size)).unflatten(1, (-1, size))
    half_steps = (groups.abs().amax(dim=2) / 254).repeat_interleave(size, dim=1)[:, :300]
    error = (LinearCall(Panels.from_codes(weight))(x) - exact).abs()
    assert (error <= half_steps @ numbers.abs().T * 1.001 + 1e-4).all()
    assert error.pow(2).mean().sqrt() < 0.01 * exact.std()


def test_activations_too_small_or_nought_are_nought(isa: str) -> None:
    weight, bias = quantize(_random((7, 100), 0), 8), _random((7,), 1)
    x = torch.zeros((3, 100))
    x[1], x[2, 3] = 1e-38, -1e-44
    assert torch.equal(LinearCall(Panels.from_codes(weight, bias))(x), bias.expand(3, 7))
    x[0, 0] = torch.finfo(torch.float32).max
    small = quantize(torch.full((1, 100), 1e-3), 4)
    assert LinearCall(Panels.from_codes(small))(x)[0].isfinite().all()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 40), st.integers(1, 200), st.integers(1, 80), st.sampled_from(BITS), st.booleans(), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
@example(15, 64, 33, 8, True, True, 0)
@example(30, 33, 1, 4, False, True, 0)
def test_native_products(
    isa: str, rows: int, depth: int, size: int, bits: Bits, biased: bool, dots: bool, seed: int
) -> None:
    """Equal to the plain ones but for how groups are added up, and the same for each row alone."""
    x, weight = _random((rows, depth), seed), quantize(_random((size, depth), seed + 1), bits)
    bias = _random((size,), seed + 2) if biased else None
    panels = Panels.from_codes(weight, bias)
    assert torch.equal(panels.unpack(), weight.codes)
    assert torch.equal(panels.unpack_codes().scales, weight.scales)
    call = LinearCall(panels, dots=dots)
    y = call(x)
    torch.testing.assert_close(y, layers.rounded_product(x, weight, bias), rtol=1e-5, atol=1e-4)
    for row in range(rows):
        assert torch.equal(call(x[row : row + 1])[0], y[row])


@pytest.mark.parametrize("bits", BITS)
def test_native_products_of_what_is_not_finite_or_nought(isa: str, bits: Bits) -> None:
    x, weight = _random((6, 100), 0), quantize(_random((30, 100), 1), bits)
    for dots in (True, False):
        call = LinearCall(Panels.from_codes(weight), dots=dots)
        y, wrong = call(x), x.clone()
        wrong[1, 99], wrong[2, 0], wrong[4, 50] = torch.nan, torch.inf, -torch.inf
        found = call(wrong)
        assert found[[1, 2, 4]].isnan().all()
        assert torch.equal(found[[0, 3, 5]], y[[0, 3, 5]])
        small = torch.full((2, 100), 1e-38)
        small[1] = -0.0
        assert not call(small).any()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_and_its_replacement(bits: Bits, dtype: torch.dtype, native: bool) -> None:
    for bias in (True, False):
        layer = nn.Linear(100, 37, bias=bias, dtype=dtype).requires_grad_(False)
        twin = QuantizedLinear.from_linear(layer, bits, native=native)
        assert (twin.in_features, twin.out_features, twin.bias) == (100, 37, layer.bias)
        whole = quantize(layer.weight, bits)
        assert torch.equal(twin.quantized.codes, whole.codes)
        assert torch.equal(twin.quantized.scales, whole.scales)
        assert torch.equal(twin.weight, dequantize(whole, dtype))
        num_bytes = twin.num_bytes + sum(tensor.nbytes for tensor in twin.buffers())
        columns = 64 if native and twin.call is not None else 37  # panels are filled up
        wanted = columns * whole.codes.shape[1] * bits // 8 + columns * whole.scales.shape[1] * 2
        assert num_bytes - wanted in (0, 4 * columns), (
            "two codes of 4 bits are one byte; a bias may be stored in addition"
        )
        for shape in ((100,), (1, 100), (2, 3, 100), (3, 0, 100), (300, 100)):
            x = _random(shape, 5, dtype)
            y = twin(x)
            assert (y.shape, y.dtype) == (layer(x).shape, dtype)
            near = functional.linear(x.float(), twin.weight.float(), None if layer.bias is None else layer.bias.float())
            torch.testing.assert_close(y.float(), near, rtol=0.03, atol=0.03)
        x = _random((4, 200), 6, dtype)[:, ::2]
        assert torch.equal(twin(x), twin(x.contiguous()))


# --------------------------------------------------------------------------------------------- loading


def _load(folder: Path, quantization: str | None, dtype: Any = torch.float32) -> LoadedModel:
    return load_model(folder, dtype, CPU, quantization)


def _dequantized(runner: ModelRunner) -> ModelRunner:
    """The same rounded weights, multiplied in fp32."""
    loaded = load_model(runner.loaded.folder, torch.float32, CPU, runner.loaded.quantization, native=False)
    model = loaded.model
    experts = {linear for module in model.modules() if isinstance(module, RoutedExperts) for linear in module.linears}
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, QuantizedLinear) and layer not in experts:  # those multiply in fp32 already
                plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                plain.weight, plain.bias = nn.Parameter(layer.weight), layer.bias  # type: ignore[assignment]
                setattr(parent, name, plain)
    return ModelRunner(loaded, 256)


# Of those without attention one family for each kind of layer.
_MIXED = {"lfm2": "int8", "qwen3_5_text": "int4", "bamba": "int8", "mamba": "int4", "bailing_hybrid": "int8",
          "minimax": "int4", "recurrent_gemma": "int8"}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize(("family", "quantization"), [*product(FAMILIES, QUANTIZATIONS), *_MIXED.items()])
def test_every_family(family: str, quantization: str, runner_of: Runners) -> None:
    """Its results are close to those of the rounded weights in fp32."""
    runner = runner_of(family, quantization=quantization)
    tokens = random_prompts([24], seed=3)[0]
    found, wanted = logits(runner, tokens), logits(_dequantized(runner), tokens)
    # Of the middle one of all places: a mixture's router may choose another expert at one of them.
    assert (found - wanted).std(dim=1).median() < 0.05 * wanted.std()
    exact = logits(runner_of(family), tokens)
    off = (found - exact).std(dim=1).median() / exact.std()
    assert 0 < off < {"int8": 0.05, "int4": 0.6, "fp8": 0.2}[quantization]
    request = make_request("a", tokens, SamplingParams(temperature=0.0, max_tokens=8))
    assert len(run(make_engine(runner), [request])[0]) == 8
    linears = [name for name, m in runner.loaded.model.named_modules() if isinstance(m, nn.Linear)]
    assert not linears, "every layer of these models that is linear is quantized"


def test_head_embedding_and_parameters(tmp_path: Path) -> None:
    """A tied head is a copy: the embedding stays as it is."""
    make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    plain, loaded = _load(tmp_path, None), _load(tmp_path, "int4")
    by_torch: Any = load_model(tmp_path, torch.float32, CPU, "int4", native=False)
    model: Any = by_torch.model
    assert (loaded.num_parameters, loaded.quantization, plain.quantization) == (plain.num_parameters, "int4", None)
    weight = make_model("llama", tie_word_embeddings=True).get_input_embeddings().weight
    assert torch.equal(model.model.embed_tokens.weight, weight)
    assert (model.lm_head.bits, model.model.layers[0].mlp.up_proj.bits) == (8, 4)
    num_bytes = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    assert by_torch.num_bytes == num_bytes < plain.num_bytes
    assert 0.9 * num_bytes < loaded.num_bytes < plain.num_bytes
    assert loaded.dtype == torch.float32
    assert _load(tmp_path, "int8", torch.bfloat16).dtype == torch.bfloat16


def test_routers_stay() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.shared_expert_gate = nn.Linear(8, 4), nn.Linear(8, 1)
            self.router = nn.Sequential(nn.Linear(8, 4))
            self.gate_proj = nn.Linear(8, 8)

    text_config = SimpleNamespace(num_hidden_layers=2)
    config = SimpleNamespace(model_type="mixture", get_text_config=lambda: text_config)
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()]), "project": nn.Linear(8, 8)})
    quantize_linears(model, "int4", config, CPU)
    rounded = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert rounded == {"layers.0.gate_proj", "layers.1.gate_proj"}
    with pytest.raises(ModelError, match=r"family 'mixture' has no layers that can be quantized; leave"):
        quantize_linears(model, "int4", config, CPU)


@pytest.mark.parametrize("family", ["gpt2", "falcon", "falcon-rw"])
def test_linear_layers_by_other_names(family: str) -> None:
    model = make_model(family).requires_grad_(False)
    tokens = torch.tensor([random_prompts([12])[0]])
    wanted = model(input_ids=tokens).logits
    names = {name for name, module in model.named_modules() if type(module).__name__ in ("Conv1D", "FalconLinear")}
    make_linears_plain(model)
    assert names
    assert all(type(model.get_submodule(name)) is nn.Linear for name in names)
    torch.testing.assert_close(model(input_ids=tokens).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["hqq", "mxfp4", "mystery", None])
def test_weights_that_are_quantized_already_are_refused(
    method: str | None, model_folder: Folders, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))
    path = folder / "config.json"
    done = {} if method is None else {"quant_method": method}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": done}))
    shown = method or "method not named"
    for quantization in (None, "int8"):
        with pytest.raises(ModelError, match=rf"(?i)quantized already \({shown}\).*quantization="):
            _load(folder, quantization)


# ------------------------------------------------------------------------- the output stays the same

PROMPTS = random_prompts([3, 26, 12, 40, 9], seed=5)
SAMPLED = (
    SamplingParams(temperature=0.8, max_tokens=16),
    SamplingParams(temperature=1.2, top_p=0.9, max_tokens=12),
    SamplingParams(temperature=1.0, top_k=7, min_p=0.02, max_tokens=16),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=15),
    SamplingParams(temperature=0.7, presence_penalty=0.6, max_tokens=15),
)
GREEDY = (SamplingParams(temperature=0.0, max_tokens=20),) * len(PROMPTS)


def _plain(runner: ModelRunner, params: tuple[SamplingParams, ...]) -> list[list[int]]:
    """One request at a time, one token a pass."""
    jobs = list(enumerate(zip(PROMPTS, params, strict=True)))
    return [run(make_engine(runner), [make_request(str(i), prompt, p, seed=i)])[0] for i, (prompt, p) in jobs]


#          9 ─ 11 ─ 12
#        /   \ 13
#  root ─ 10 ─ 9 ─ 11
TREE = TokenTree((8, 9, 10, 11, 9, 13, 12, 11), (-1, 0, 0, 1, 2, 1, 3, 4))


@pytest.mark.parametrize("quantization", WHOLE_NUMBERS)
@pytest.mark.parametrize("family", ["llama", "opt", "falcon-rw", "mpt", "gpt2", "gemma2", "gemma3_text"])
def test_a_node_has_the_logits_of_its_path_alone(family: str, quantization: str, runner_of: Runners) -> None:
    """To the last bit: a step of a rounded activation is far more than one."""
    # PyTorch computes the last numbers of a tensor, where they fill no vector, by other functions.
    changes = {"intermediate_size": 64} if "intermediate_size" in FAMILIES[family] else {}
    runner = runner_of(family, quantization=quantization, **changes)
    cache, prompts = runner.cache, random_prompts([21, 3])
    pieces = []
    for i, prompt in enumerate(prompts):
        slots = cache.reserve(str(i), len(prompt) + len(TREE))
        pieces.append(Piece.from_span([*prompt, 8], TREE, cache.slots(str(i)), slots))
    try:
        found = runner.forward(pieces)
    finally:
        for i in range(len(prompts)):
            cache.free(str(i))
    alone = [logits(runner, [*prompt, 8, *path])[-1] for prompt in prompts for path in paths_of(TREE)]
    assert torch.equal(found, torch.stack(alone))


# (verification, drawing, tree, what the drafter is rounded to)
SETUPS: tuple[tuple[str, str, Any, str | None], ...] = (
    ("coupled", "shared-noise", (1, 1, 1, 1), None),
    ("coupled", "shared-noise", (3, 2, 1), "int8"),
    ("coupled", "shared-noise", TreeBudget(12, 6), "int4"),
    ("target-only", "top-k", (2, 2, 1), None),
)
ONLY_GREEDY: tuple[tuple[str, str, Any, str | None], ...] = (
    ("multi-step", "without-replacement", (2, 2, 1), None),
    ("traversal", "without-replacement", TreeBudget(12, 6), None),
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("family", "quantization"),
    [("llama", "int8"), ("llama", "int4"), ("llama", "fp8"), ("mpt", "int8"), ("mpt", "int4")],
)
def test_trees_and_batches_change_no_output(
    family: str, params: tuple[SamplingParams, ...], quantization: str, runner_of: Runners
) -> None:
    target = runner_of(family, quantization=quantization)
    wanted = _plain(target, params)
    if quantization == "int4":
        assert wanted != _plain(runner_of(family), params), "the quantized model is another"
    num_kept = 0
    for rule, drawing, tree, rounded in SETUPS + (ONLY_GREEDY if params is GREEDY else ()):
        runner = resized(runner_of(family, 0, 0.15, quantization=rounded), 1024)
        drafter = SmallModelDrafter(runner, VOCAB, draft_sampling=drawing)
        engine = make_engine(target, drafter, tree, max_num_seqs=3, verification=rule)
        jobs = enumerate(zip(PROMPTS, params, strict=True))
        requests = [make_request(str(i), prompt, its, seed=i) for i, (prompt, its) in jobs]
        assert run(engine, requests) == wanted, (rule, tree, rounded)
        num_kept += sum(request.speculation.num_accepted_draft_tokens for request in requests)
    assert num_kept > 0


def test_the_library_and_its_options(model_folder: Folders) -> None:
    folder, small = model_folder(), model_folder(noise=0.15)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    def generated(**options: Any) -> list[list[int]]:
        with LLM(folder, device="cpu", **options) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
            loaded = llm.target.loaded
            assert loaded.quantization == options.get("quantization")
            for drafter in llm.small_models.values():
                assert drafter.loaded.quantization == options.get("drafter_quantization")
        return [output.outputs[0].token_ids for output in outputs]

    plain = generated(tree="off", quantization="int4")
    drafters = {"drafters": [str(small)], "tree": "2,1,1"}
    assert generated(quantization="int4", **drafters) == plain
    assert generated(quantization="int4", drafter_quantization="int8", **drafters) == plain
    assert generated(drafter_quantization="int4", **drafters) == generated(tree="off")


@pytest.mark.parametrize("value", ["int3", "INT8", 8, True, ["int8"], "", "none"])
@pytest.mark.parametrize("name", ["quantization", "drafter_quantization"])
def test_values_that_are_refused(name: str, value: Any, model_folder: Folders) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be one of int8, int4, fp8, not"):
        LLM(model_folder(), **{name: value})
    with pytest.raises(ValueError, match=rf"^{name} must be one of int8, int4, fp8, not"):
        LatencyConfig(**{name: value})


def test_a_drafter_that_has_no_weights_is_not_quantized(model_folder: Folders) -> None:
    for drafters in ("auto", ["ngram"], ["ngram", "suffix"]):
        with pytest.raises(ValueError, match="drafter_quantization: no drafter is a model"):
            LLM(model_folder(), drafters=drafters, drafter_quantization="int8")
    LLM(model_folder(), tree="off", drafter_quantization="int8")


def test_costs_are_kept_for_each_quantization(runner_of: Runners) -> None:
    situations = []
    for target in (None, *QUANTIZATIONS):
        for small in (None, *QUANTIZATIONS):
            drafter = SmallModelDrafter(runner_of(noise=0.15, quantization=small), VOCAB)
            situations.append(json.dumps(_situation(runner_of(quantization=target), drafter)))
    assert len(set(situations)) == 16


# ---------------------------------------------------------------------------------------- measurements


def test_latency_names_the_quantization(model_folder: Folders) -> None:
    config = LatencyConfig(
        model=str(model_folder()), drafters=(str(model_folder(noise=0.15)),), trees=("1,1",), device="cpu",
        prompts=((1, 2, 3),), max_tokens=6, repeats=1, warmup=0, quantization="int8", drafter_quantization="int4",
    )  # fmt: skip
    report = run_latency(config)
    assert report.measured.environment.precision == "float32 with int8 weights, drafters int4"
    numbers: Any = report.as_dict()
    assert numbers["environment"]["quantization"] == numbers["options"]["quantization"] == "int8"
    assert numbers["environment"]["drafter_quantization"] == "int4"


PERPLEXITY_PROMPTS = ((1, 2, 3, 4, 5, 6, 7), (5, 6), (8, 7, 9, 3, 4))


def test_perplexity_is_that_of_thelogits(
    model_folder: Folders, runner_of: Runners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "_AT_ONCE", 3)
    file = tmp_path / "numbers.json"
    config = PerplexityConfig(model=str(model_folder()), prompts=PERPLEXITY_PROMPTS, device="cpu", json=file)
    report = run_perplexity(config)
    scores = report.tables[0].as_list()
    assert [score["name"] for score in scores] == ["unquantized", "int8", "int4", "fp8"]
    assert report.numbers["num_tokens"] == 11
    exact = scores[0]
    for score in scores:
        runner = runner_of(quantization=None if score is exact else score["name"])
        surprise, divergence, same = [], [], []
        for text in PERPLEXITY_PROMPTS:
            tokens, generated = list(text[:-1]), torch.tensor(text[1:])
            log_p, log_q = (logits(r, tokens).log_softmax(dim=1) for r in (runner_of(), runner))
            surprise.append(functional.nll_loss(log_q, generated, reduction="none"))
            divergence.append(functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1))
            same.append(log_p.argmax(dim=1) == log_q.argmax(dim=1))
        assert score["perplexity"] == pytest.approx(torch.cat(surprise).mean().exp().item(), rel=1e-5)
        if score is not exact:
            assert score["increase"] == pytest.approx(score["perplexity"] / exact["perplexity"] - 1)
            bits = torch.cat(divergence).mean().item() / math.log(2)
            assert score["divergence_bits"] == pytest.approx(bits, abs=1e-5)
            assert score["same_best"] == pytest.approx(torch.cat(same).float().mean().item())
            assert score["weight_bytes"] == runner.loaded.num_bytes
            # Groups in floating point have 128 inputs, more than this model's layers.
            assert score["name"] == "fp8" or score["weight_bytes"] < exact["weight_bytes"]
    numbers = json.loads(file.read_text())
    assert numbers["weights"] == json.loads(json.dumps(scores))
    assert numbers["environment"]["quantization"] is None


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"quantizations": ("int3",)}, "quantization"),
        ({"quantizations": ("int8", "int8")}, "none twice"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"prompt_chars": 0}, "prompt_chars"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "toaster"}, "device"),
        ({"json": "/nowhere/at/all.json"}, "json"),
        ({"prompts": ((1, 2), (3,))}, "number 1 has one token"),
        ({"prompts": ((1, VOCAB),)}, "vocabulary"),
        ({"prompts": ((1,) * 257,)}, "prompts: 257 tokens do not fit into the context of 256"),
    ],
)
def test_what_perplexity_cannot_read_is_named_before_it_loads(
    changes: dict[str, Any], part: str, model_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "LLM", lambda *_, **__: pytest.fail("the long work began"))
    with pytest.raises(ValueError, match=part):
        run_perplexity(PerplexityConfig(**({"model": str(model_folder()), "prompts": PERPLEXITY_PROMPTS} | changes)))


def test_perplexity_of_keys_and_values_of_8_bits(model_folder: Callable[..., Path]) -> None:
    config = PerplexityConfig(str(model_folder()), kv_cache_dtypes=("auto", "fp8"), prompts=PERPLEXITY_PROMPTS)
    _, same, rounded = run_perplexity(config).tables[0].as_list()
    assert (same["name"], rounded["name"]) == ("keys and values in auto", "keys and values in fp8")
    assert same["divergence_bits"] == 0 < rounded["divergence_bits"] < 0.1


@pytest.mark.slow
def test_the_embedded_target_loses_little() -> None:
    """Measured on 16 longer texts: 0.01 % of its perplexity with 8 bits, 0.75 % with 4."""
    scores = [
        SimpleNamespace(**row)
        for row in run_perplexity(PerplexityConfig(num_prompts=3, prompt_chars=600)).tables[0].as_list()
    ]
    exact, int8, int4, fp8 = scores
    assert abs(fp8.perplexity / exact.perplexity - 1) < 0.01
    assert int8.divergence_bits < fp8.divergence_bits < 0.004
    assert fp8.weight_bytes < 0.5 * exact.weight_bytes
    assert abs(int8.perplexity / exact.perplexity - 1) < 0.01
    assert abs(int4.perplexity / exact.perplexity - 1) < 0.04
    assert int8.divergence_bits < 0.001 < int4.divergence_bits < 0.04
    assert (int8.same_best > 0.97, int4.same_best > 0.88) == (True, True)
    assert int4.weight_bytes < int8.weight_bytes < 0.5 * exact.weight_bytes


def _run_command(*words: str, code: int = 0, program: Any = app) -> Any:
    result = CliRunner().invoke(program, list(words), env={"NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def test_flags(model_folder: Folders, tmp_path: Path) -> None:
    target, small = str(model_folder(tokenizer=True)), str(model_folder(noise=0.3, tokenizer=True))
    words = ("generate", target, "the", "--temperature", "0", "--max-tokens", "12", "--json", "--drafter", small)
    rounded = json.loads(_run_command(*words, "--quantization", "int4", "--drafter-quantization", "int8").stdout)
    config = json.dumps({"model": small, "quantization": "int8"})
    again = _run_command(*words[:-2], "--quantization", "int4", "--speculative-config", config)
    assert json.loads(again.stdout)[0]["token_ids"] == rounded[0]["token_ids"]
    for flag in ("--quantization", "--drafter-quantization"):
        for command in ("generate", "complete", "chat", "plan"):
            assert (
                f"{flag} must be one of"
                in _run_command(command, target, flag, "int3", *words[2:3] * (command == "generate"), code=2).stderr
            )
        for command in ("latency", "acceptance"):
            assert f"{flag} must be one of" in _run_command("bench", command, flag, "int3", code=2).stderr
    both = ("--drafter-quantization", "int8", "--speculative-config", config)
    assert "--drafter-quantization both choose" in _run_command(*words[:-2], *both, code=2).stderr
    file = tmp_path / "numbers.json"
    shown = _run_command(
        "perplexity", target, "--quantization", "int8", "--num-prompts", "1", "--prompt-chars", "80",
        "--json", str(file), program=benchmarks,
    ).stdout  # fmt: skip
    assert [row["name"] for row in json.loads(file.read_text())["weights"]] == ["unquantized", "int8"]
    for heading in ("weights", "perplexity", "increase", "KL, bits", "same best", "weight bytes", "unquantized"):
        assert heading in shown
