"""What a rank reads and stores: its shard of each weight, rounded or streamed like the whole's."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specinfer.core.config import OffloadConfig
from specinfer.core.errors import ModelError
from specinfer.model.load import load_model
from specinfer.model.offload.direct import DirectFile
from specinfer.model.offload.meta_weights import Cut
from specinfer.model.offload.shards import Shards
from specinfer.ops import QuantizedLinear
from specinfer.parallel.group import ShardSpec
from thread_group import WHOLE, Ranks, make_shards
from tiny import save_model

CPU = torch.device("cpu")
# Of four ranks each has whole groups of 64 inputs.
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
_WIDE_OPT = {"hidden_size": 256, "ffn_dim": 256, "word_embed_proj_dim": 256}


def save(folder: Path, family: str = "llama") -> Path:
    return save_model(folder, family, **(_WIDE_OPT if family == "opt" else _WIDE))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_are_slices_of_the_rounded_whole(tmp_path: Path, quantization: str) -> None:
    save(tmp_path)
    (whole,) = Ranks(tmp_path, WHOLE, quantization, native=False).all
    parts = Ranks(tmp_path, (2, 1), quantization, native=False).all
    count = 0
    for name, module in whole.model.named_modules():
        if not isinstance(module, QuantizedLinear) or "lm_head" in name:
            continue
        ours = [part.model.get_submodule(name) for part in parts]
        dim = 1 if "o_proj" in name or "down_proj" in name else 0
        for of in (lambda one: one.quantized.codes, lambda one: one.quantized.scales):
            assert torch.equal(torch.cat([of(one) for one in ours], dim=dim), of(module))
        count += 1
    assert count == 2 * 7


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("family", "is_native"), [("llama", True), ("llama", False), ("opt", True)])
def test_rounded_shards_compute_what_the_rounded_whole_does(
    tmp_path: Path, family: str, is_native: bool, quantization: str
) -> None:
    """But for sums in another order, which may move activations by a step where they are rounded to 8 bits."""
    save(tmp_path, family)
    plain = Ranks(tmp_path, WHOLE).logits()
    wanted = Ranks(tmp_path, WHOLE, quantization, native=is_native).logits()
    for split in [(2, 1), (4, 1), (2, 2)]:
        for found, whole, exact in zip(
            Ranks(tmp_path, split, quantization, native=is_native).logits(), wanted, plain, strict=True
        ):
            lost = (whole - exact).norm()  # by rounding weights and activations
            assert (found - whole).norm() < 0.3 * lost


def test_weights_in_floating_point_have_scales_of_each_part(tmp_path: Path) -> None:
    """An output's weights are rounded by what a rank has of them: the same where outputs are split, else as near."""
    save(tmp_path)
    plain = Ranks(tmp_path, WHOLE).logits()
    (whole,) = Ranks(tmp_path, WHOLE, "fp8").all
    parts = Ranks(tmp_path, (2, 1), "fp8").all
    name = "model.layers.0.mlp.up_proj"
    ours: list[Any] = [part.model.get_submodule(name) for part in parts]
    up: Any = whole.model.get_submodule(name)
    assert torch.equal(torch.cat([one.quantized.codes for one in ours]), up.quantized.codes)
    assert torch.equal(torch.cat([one.quantized.scales for one in ours]), up.quantized.scales)
    wanted = Ranks(tmp_path, WHOLE, "fp8").logits()
    for split in [(2, 1), (2, 2)]:
        for found, its, exact in zip(Ranks(tmp_path, split, "fp8").logits(), wanted, plain, strict=True):
            assert (found - exact).norm() < 1.2 * (its - exact).norm()


@pytest.mark.parametrize(("quantization", "group"), [("int8", 64), ("int4", 32)])
def test_groups_that_ranks_would_share_are_refused(tmp_path: Path, quantization: str, group: int) -> None:
    save_model(tmp_path)
    shard = make_shards(2, 1)[0][0]
    with pytest.raises(ModelError, match=rf"tensor_parallel_size: 2 ranks would have .* groups of {group} .*use fewer"):
        load_model(tmp_path, torch.float32, CPU, quantization, shard=shard)


@pytest.mark.parametrize("split", [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_parts_take_their_part_of_the_memory(tmp_path: Path, split: tuple[int, int]) -> None:
    save(tmp_path)
    (whole,), parts = Ranks(tmp_path, WHOLE).all, Ranks(tmp_path, split).all
    around = 96 * 256 * 4  # the embedding, or the head
    kv = 2 * 64 * 256 * 4 * 2  # rows for one KV head's keys and values in two layers, which two of four ranks have
    spare = (kv if split[0] == 4 else 0) + 2**14  # norms
    for part in parts:
        mine = (part.shard.is_first + part.shard.has_head) * around
        assert part.num_bytes <= mine + (whole.num_bytes - 2 * around) / (split[0] * split[1]) + spare


def test_ranks_read_only_their_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' rows are not read; of matrices that are cut by columns all rows are, a few at a time."""
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    header = 2**14
    num_read, read = 0, DirectFile.read

    def counted(file: DirectFile, offset: int, num_bytes: int, into: torch.Tensor) -> int:
        nonlocal num_read
        num_read += num_bytes
        return read(file, offset, num_bytes, into)

    def read_by(shard: ShardSpec) -> int:
        nonlocal num_read
        num_read = 0
        load_model(tmp_path, torch.float32, CPU, shard=shard)
        return num_read

    monkeypatch.setattr(DirectFile, "read", counted)
    for shard in make_shards(2, 1)[0]:
        for_all = sum(w.nbytes for name, w in weights.items() if shard.has_head or name not in ("lm_head.weight",))
        of_others = sum(w.nbytes // 2 for name, w in weights.items() if re.search("[qkv]_proj|gate|up_proj", name))
        assert for_all - of_others - header < read_by(shard) < for_all - of_others + header
    for stage, ends in zip(make_shards(1, 2), ("embed_tokens", r"model\.norm|lm_head"), strict=True):
        own = sum(w.nbytes for name, w in weights.items() if re.search(rf"layers.{stage[0].stage}|{ends}", name))
        assert own <= read_by(stage[0]) < own + header


@pytest.mark.parametrize("cut", [Cut(0, (range(3, 9),)), Cut(0, (range(1, 2), range(7, 9))), Cut(1, (range(2, 5),))])
def test_a_part_of_a_tensor_is_read_as_if_it_were_cut(tmp_path: Path, cut: Cut) -> None:
    save_model(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    whole = load_file(tmp_path / "model.safetensors")[name]
    with Shards(tmp_path) as shards:
        source = shards.sources[name]
        assert torch.equal(source.read_part(cut), cut.taken_from(whole))
        parts = source.parts(cut)
        assert parts is not None
        assert sum(part.shape[0] * part.shape[1] for part in parts) == cut.taken_from(whole).numel()


@pytest.mark.parametrize(
    ("family", "copies", "quantization"),
    [
        ("llama", False, None),
        ("llama", True, "int8"),
        ("mixtral", True, None),
        pytest.param("olmo2", False, None, marks=pytest.mark.slow),
        pytest.param("opt", False, None, marks=pytest.mark.slow),
        pytest.param("opt", True, "int4", marks=pytest.mark.slow),
        pytest.param("falcon", False, None, marks=pytest.mark.slow),
        pytest.param("phi3", False, None, marks=pytest.mark.slow),
        pytest.param("gpt_bigcode", False, None, marks=pytest.mark.slow),
        pytest.param("gpt2", True, None, marks=pytest.mark.slow),
        pytest.param("gpt_oss", True, None, marks=pytest.mark.slow),
    ],
)
def test_streamed_parts_compute_what_resident_ones_do(
    tmp_path: Path, family: str, copies: bool, quantization: str | None
) -> None:
    folder = (
        save(tmp_path / "target", family) if family in ("llama", "opt") else save_model(tmp_path / "target", family)
    )
    offload = OffloadConfig("disk", None, tmp_path / "copies" if copies else None)
    for split in [(2, 1), (2, 2)]:
        whole = Ranks(folder, split, quantization).logits()
        streamed = Ranks(folder, split, quantization, offload=offload)
        for found, wanted in zip(streamed.logits(), whole, strict=True):
            if family == "mixtral":  # only in memory are its experts part of fused layers
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(found, wanted)
        streamed.close()
    if copies:
        assert len(list((tmp_path / "copies").glob("*.layers"))) == 2 + 4  # each rank its own


def test_streamed_parts_read_their_part(tmp_path: Path) -> None:
    save(tmp_path)
    offload = OffloadConfig("disk")
    whole, parts = Ranks(tmp_path, WHOLE, offload=offload), Ranks(tmp_path, (2, 1), offload=offload)
    (stream,) = (one.stream for one in whole.all)
    assert stream is not None
    for part in parts.all:
        assert part.stream is not None
        assert part.stream.buffer_bytes <= 0.5 * stream.buffer_bytes
        assert part.stream.bytes_per_pass <= 0.7 * stream.bytes_per_pass
    whole.close()
    parts.close()


def test_streamed_parts_that_need_a_copy_report_it(tmp_path: Path) -> None:
    save_model(tmp_path, "mixtral")
    with pytest.raises(ModelError, match="offload_folder"):
        Ranks(tmp_path, (2, 1), offload=OffloadConfig("disk"))
