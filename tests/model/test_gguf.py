"""GGUF files, read directly: weights, configuration, tokenizer; and what of them is refused."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specinfer import LLM, ModelError, SamplingParams
from specinfer.inputs.chat.template import ChatTemplate
from specinfer.learning.tune.initial_weights import build, parse_initial_weights
from specinfer.model.definition import load_config, load_plain, load_tokenizer
from specinfer.model.folder import count_parameters, find_folder, sampling_defaults
from specinfer.model.gguf.folder import WEIGHTS, weights_file
from specinfer.model.gguf.header import TensorPlace, read_header
from specinfer.model.gguf.tokenizer_writing import tokenizer_metadata
from specinfer.model.gguf.weights import read_tensor
from specinfer.model.gguf.writing import write_gguf
from specinfer.model.load import load_model
from specinfer.model.load_config import LoadConfig
from specinfer.model.offload.shards import Shards
from specinfer.model.shard_definition import open_checkpoint
from tests.model.gguf_files import CHAT_TEMPLATE, random_blocks, write_model, write_parts
from tests.model.gguf_files import tokenizer_metadata as tiny_metadata
from tiny import make_tokenizer, save_model

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
WIDE = {"hidden_size": 64, "intermediate_size": 64}
GEMMA = {"num_hidden_layers": 7, "layer_types": None}
ARCHITECTURES = [
    ("llama", {}), ("llama", {"attention_bias": True}), ("qwen2", {}), ("qwen3", {}), ("gemma3", GEMMA),
    ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}), ("phi3", {"pad_token_id": None}),
    ("phi3", {"sliding_window": None, "pad_token_id": None}),
    ("qwen3moe", {"norm_topk_prob": True, "moe_intermediate_size": 32}), ("gpt-oss", {}),
]  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [3.0, 4.0, 5.0], "rope_theta": 1e4,
    "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75,
}  # fmt: skip
SMALL = {"hidden_size": 32, "intermediate_size": 64, "pad_token_id": None}
ARCHITECTURES += [("phi3", {"rope_parameters": LONGROPE, **SMALL})]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def load(path: Path, dtype: Any = torch.float32) -> Any:
    return load_model(find_folder(path), dtype, torch.device("cpu"))


# ------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("name", KINDS)
def test_every_type_is_decoded_as_the_library_decodes_it(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    columns = block * max(512 // block, 1)
    rows = random_blocks(kind, 2**12 + 3, columns // block)  # read in several parts
    (tmp_path / "data").write_bytes(b"before" + rows.tobytes())
    place = TensorPlace((len(rows), columns), kind, 6, rows.nbytes, tmp_path / "data")
    with np.errstate(invalid="ignore"):
        wanted = torch.from_numpy(gguf.quants.dequantize(rows.copy(), kind).astype(np.float32))
    found = read_tensor(place, torch.float32)
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    half = read_tensor(place, torch.bfloat16)
    assert torch.equal(half.nan_to_num(), wanted.bfloat16().nan_to_num())


def test_many_threads_decode_few_numbers_each_so_that_memory_does_not_grow_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_blocks(gguf.GGMLQuantizationType.Q8_0, 2**12, 512 // 32)
    (tmp_path / "data").write_bytes(rows.tobytes())
    place = TensorPlace((len(rows), 512), gguf.GGMLQuantizationType.Q8_0, 0, rows.nbytes, tmp_path / "data")
    sizes = list[int]()

    def decode(part: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        sizes.append(len(part) * 512)
        return np.zeros((len(part), 512), np.float32)

    monkeypatch.setattr("specinfer.model.gguf.weights._decode", decode)
    for num_threads in (2, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        read_tensor(place, torch.float32)
        assert num_threads * max(sizes) <= 2**22
        sizes.clear()


@pytest.mark.parametrize(("arch", "changes"), ARCHITECTURES, ids=str)
def test_logits_are_those_of_the_model_that_was_written(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    model = write_model(tmp_path / "m.gguf", arch, **changes)
    ids = torch.arange(20).unsqueeze(0)
    found = load_plain(find_folder(tmp_path / "m.gguf"), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("arch", "changes"), [("llama", WIDE), ("gemma3", GEMMA | WIDE)], ids=["llama", "gemma3"])
def test_weights_are_those_of_transformers_own_reader(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    write_model(tmp_path / "m.gguf", arch, "Q8_0", **changes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).state_dict()
    ours = load_plain(find_folder(tmp_path / "m.gguf"), torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=0, rtol=0)


@pytest.mark.parametrize(("arch", "changes"), ARCHITECTURES, ids=str)
def test_greedy_text_of_a_file_is_that_of_its_folder(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    model = write_model(tmp_path / "m.gguf", arch, "Q8_0", **(WIDE | changes))
    model.save_pretrained(tmp_path / "folder")
    make_tokenizer().save_pretrained(tmp_path / "folder")
    texts = [
        LLM(name, dtype="float32", drafters=["ngram"], tree="2,1").generate(["the other one"], GREEDY)[0].outputs[0]
        for name in (tmp_path / "m.gguf", tmp_path / "folder")
    ]
    assert texts[0].token_ids == texts[1].token_ids


def test_llama_3_scales_its_positions_by_the_factors_in_the_file(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip

    def written(name: str, **changes: float) -> None:
        folder, file = save_model(tmp_path / name, rope_parameters=rope | changes), tmp_path / f"{name}.gguf"
        with Shards(folder) as shards:
            write_gguf(
                file, load_config(folder), shards.sources, dict, lambda _: tiny_metadata(), "f32", lambda _: None
            )

    written("m")
    assert load_config(find_folder(tmp_path / "m.gguf")).rope_parameters == rope
    with pytest.raises(ModelError, match=r"o\.gguf.*scaled in a way that is not known; take the model as a folder"):
        written("o", low_freq_factor=2.0)  # what was written is read back


def test_contexts_of_phi3_reach_as_far_as_the_factors_for_long_ones(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"original_max_position_embeddings": 64, **SMALL}
    path = tmp_path / "m.gguf"
    write_model(path, "phi3", rope_parameters=LONGROPE, phi3__rope__scaling__attn_factor=1.25, **sizes)
    assert load(path).max_position == 256
    assert load_model(find_folder(path), torch.float32, torch.device("cpu"), max_model_len=64).max_position == 64
    assert load_config(find_folder(path)).rope_parameters == LONGROPE | {"attention_factor": 1.25}
    write_model(path, "phi3", rope_parameters=LONGROPE, phi3__rope__dimension_count=4, **sizes)
    with pytest.raises(ModelError, match=r"'rope_factors_short\.weight' has the shape \[3\]; fetch the file again"):
        find_folder(path)
    write_model(path, "phi3", rope_parameters=LONGROPE, phi3__rope__scaling__original_context_length=0, **sizes)
    with pytest.raises(ModelError, match="original_context_length is 0, not a number from 1"):
        find_folder(path)


def test_the_type_of_an_unquantized_file_is_kept_and_of_others_it_is_bfloat16(tmp_path: Path) -> None:
    for kind, dtype in (("F32", torch.float32), ("F16", torch.float16), ("Q8_0", torch.bfloat16)):
        write_model(tmp_path / f"{kind}.gguf", kind=kind, **WIDE)
        assert load(tmp_path / f"{kind}.gguf", "auto").dtype == dtype


def test_a_file_is_a_drafter_and_may_be_quantized_and_split_off_to_disk(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, **WIDE)
    plain = LLM(path, dtype="float32", drafters=[]).generate(["the other one"], GREEDY)[0].outputs[0].token_ids
    llm = LLM(path, dtype="float32", drafters=[str(path)], tree="1,1")
    assert llm.generate(["the other one"], GREEDY)[0].outputs[0].token_ids == plain
    assert LLM(path, quantization="int8", drafters=[]).generate(["the"], GREEDY)[0].outputs[0].token_ids
    with pytest.raises(ModelError, match=r"offload_folder: .* name a folder for a copy of the layers"):
        LLM(path, dtype="float32", drafters=[], offload="disk", memory_budget="2GiB")
    copied = {"offload_folder": str(tmp_path / "copy"), "memory_budget": "2GiB"}
    streamed = LLM(path, dtype="float32", drafters=[], offload="disk", **copied)
    assert streamed.generate(["the other one"], GREEDY)[0].outputs[0].token_ids == plain


def test_codes_outside_of_layers_need_no_more_memory_than_the_codes(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", kind="Q4_0", hidden_size=256, intermediate_size=256, vocab_size=4096)
    sizes = {}
    for native in (True, False):  # without native kernels the codes are decoded
        folder = find_folder(tmp_path / "m.gguf")
        job = LoadConfig(folder, load_config(folder), "auto", torch.device("cpu"), native=native)
        with open_checkpoint(job) as checkpoint:
            sizes[native] = checkpoint.least_bytes()
    assert sizes[False] - sizes[True] > 2**20


def test_a_file_is_counted_and_cut_into_a_drafter_to_be_tuned(file: Path) -> None:
    folder = find_folder(file)
    model = load_plain(folder, torch.float32)
    assert count_parameters(folder) == sum(weight.numel() for weight in model.parameters())
    assert build(parse_initial_weights("layers:1"), folder, 0).config.num_hidden_layers == 1


def test_one_tensor_is_decoded_at_a_time(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    write_model(tmp_path / "m.gguf", kind="Q8_0", **sizes)
    folder = find_folder(tmp_path / "m.gguf")
    size = count_parameters(folder) * 2
    tracemalloc.start()  # what numpy holds: decoded numbers, not the result
    load_plain(folder, torch.bfloat16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * size / 3


def test_a_file_in_parts_is_read_whole_from_the_first(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", kind="Q8_0", **WIDE)
    parts = write_parts(tmp_path / "m.gguf", 3)
    tensors = [read_header(path).tensors for path in (tmp_path / "m.gguf", parts[0])]
    assert {name: place.shape for name, place in tensors[0].items()} == {n: p.shape for n, p in tensors[1].items()}
    assert {place.file for place in tensors[1].values()} == set(parts)
    link = tmp_path / "links" / parts[0].name  # as in the cache of the hub, where files have other names
    link.parent.mkdir()
    for part in parts:
        hidden = part.rename(tmp_path / part.name[::-1])
        (link.parent / part.name).symlink_to(hidden)
    whole, read = (load_plain(find_folder(path), torch.float32).state_dict() for path in (tmp_path / "m.gguf", link))
    assert all(torch.equal(weight, read[name]) for name, weight in whole.items())
    assert load(link, "auto").stored_types == "Q8_0"
    with pytest.raises(ModelError, match=r"of-00003\.gguf.* name the first one, .*-00001-of-00003\.gguf"):
        find_folder(link.with_name(parts[1].name))


def test_parts_that_are_missing_or_of_other_files_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    parts = write_parts(tmp_path / "m.gguf", 3)
    contents = [part.read_bytes() for part in parts]
    for changed, message in (
        ({1: None}, r"00002-of-00003\.gguf: it cannot be read"),
        ({1: contents[2]}, r"00002-of-00003\.gguf: it is not part 2 of m-00001-of-00003\.gguf; fetch all parts"),
        ({2: contents[1][:100]}, "00003-of-00003.gguf: its header is cut short"),
    ):
        for i, (part, content) in enumerate(zip(parts, contents, strict=True)):
            content = changed.get(i, content)
            part.unlink(missing_ok=True) if content is None else part.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            find_folder(parts[0])


# ----------------------------------------------------------------------------- tokenizer and the rest


def test_tokens_template_and_ends_come_from_the_file(tmp_path: Path) -> None:
    changes = {"general__sampling__temp": 0.3, "general__sampling__top_k": 7, "tokenizer__ggml__eot_token_id": 5}
    write_model(tmp_path / "m.gguf", **changes)
    folder = find_folder(tmp_path / "m.gguf")
    ours, wanted = load_tokenizer(folder), make_tokenizer()
    for text in ("the other one, and all that", "caf\u00e9 \u20ac \U0001f642", "</s>the<s>", "  the\n\n"):
        assert ours.encode(text) == wanted.encode(text)
        assert ours.decode(ours.encode(text)) == wanted.decode(wanted.encode(text))
    assert ours.chat_template == CHAT_TEMPLATE
    loaded = load(tmp_path / "m.gguf")
    assert loaded.eos_token_ids == (1, 5)
    assert sampling_defaults(folder) == {"temperature": pytest.approx(0.3), "top_k": 7}


def test_text_that_nobody_needs_may_be_in_any_encoding(file: Path) -> None:
    keys = ("general__description", "general__name", "general__author", "quantize__imatrix__file")
    others = {"general__tags": ["a_caf\u00e9"], "general__sampling__temp": "warm"}
    write_model(file, **dict.fromkeys(keys, "a_caf\u00e9"), **others)
    file.write_bytes(file.read_bytes().replace("a_caf\u00e9".encode(), b"a_caf\xe9\xe9"))
    folder = find_folder(file)
    assert sampling_defaults(folder) == {}
    assert load(file).vocab_size == 96
    write_model(file, tokenizer__chat_template="a_caf\u00e9")
    file.write_bytes(file.read_bytes().replace("a_caf\u00e9".encode(), b"a_caf\xe9\xe9"))
    with pytest.raises(ModelError, match="header is cut short or damaged"):
        find_folder(file)


def test_templates_with_a_name_are_read(tmp_path: Path) -> None:
    path, others = tmp_path / "m.gguf", {"tokenizer__chat_template__tool_use": "tools{{ messages[0].content }}"}
    write_model(path, tokenizer__chat_templates=["tool_use"], **others, **{"tokenizer__chat_template__../x": "no"})
    template = ChatTemplate(load_tokenizer(find_folder(path)), 64)
    assert (template.text(with_tools=False), template.text()) == (CHAT_TEMPLATE, "tools{{ messages[0].content }}")
    folder = find_folder(path)
    assert [file.name for file in (folder / "additional_chat_templates").iterdir()] == ["tool_use.jinja"]
    write_model(path, tokenizer__chat_template=None, **others)
    template = ChatTemplate(load_tokenizer(find_folder(path)), 64)
    assert template.text(with_tools=False) == template.text() == "tools{{ messages[0].content }}"


def test_templates_are_written_to_a_file_by_their_names() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools", "a b": "other"}
    written = tokenizer_metadata(tokenizer, 96)
    assert written["tokenizer.chat_template"] == "plain"
    assert written["tokenizer.chat_templates"] == ["tool_use", "a_b"]
    assert (written["tokenizer.chat_template.tool_use"], written["tokenizer.chat_template.a_b"]) == ("tools", "other")


def test_contractions_and_three_digits_are_pieces_by_the_rule_of_gpt_4o(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tokenizer__ggml__pre="gpt-4o")
    cut = load_tokenizer(find_folder(tmp_path / "m.gguf")).backend_tokenizer.pre_tokenizer
    pieces = ["It's", "\u0120", "123", "45", "\u0120HTTPServer", "\u0120isn't", "\u010a\u010a", "x", "//", "y"]
    assert [piece for piece, _ in cut.pre_tokenize_str("It's 12345 HTTPServer isn't\n\nx//y")] == pieces


def test_marks_belong_to_their_letters_by_the_rule_of_qwen_3_5(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tokenizer__ggml__pre="qwen35")
    cut = load_tokenizer(find_folder(tmp_path / "m.gguf")).backend_tokenizer.pre_tokenizer.pre_tokenize_str
    assert [place for _, place in cut("e\u0301a,\u0301 12")] == [(0, 3), (3, 5), (5, 6), (6, 7), (7, 8)]


def test_chinese_characters_are_pieces_of_their_own_by_the_rule_of_kimi(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tokenizer__ggml__pre="kimi-k2")
    cut = load_tokenizer(find_folder(tmp_path / "m.gguf")).backend_tokenizer.pre_tokenizer.pre_tokenize_str
    text = "It's\u4e16\u754cabc\u4e16 1234"
    assert [text[slice(*place)] for _, place in cut(text)] == ["It's", "\u4e16\u754c", "abc", "\u4e16", " ", "123", "4"]


def test_signs_begin_words_and_kana_are_pieces_by_the_rule_of_deepseek(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tokenizer__ggml__pre="deepseek-v3")
    cut = load_tokenizer(find_folder(tmp_path / "m.gguf")).backend_tokenizer.pre_tokenizer.pre_tokenize_str
    text = "It's 12345x\u4e16\u3042\u30a2 =(a [b]\n\n"
    pieces = ["It", "'s", " ", "123", "45", "x", "\u4e16\u3042\u30a2", " =(", "a", " [", "b", "]\n\n"]
    assert [text[slice(*place)] for _, place in cut(text)] == pieces


def test_digits_are_single_tokens_by_the_rule_of_smollm(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    cut = load_tokenizer(find_folder(tmp_path / "m.gguf")).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in cut.pre_tokenize_str("in 1234  x")] == [
        "in",
        "\u0120",
        "1",
        "2",
        "3",
        "4",
        "\u0120",
        "\u0120x",
    ]


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(64)), "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab",
          "ba", "  ", "<end_of_turn>"]  # fmt: skip


def sentencepiece(**changes: Any) -> dict[str, Any]:
    size = len(PIECES)
    scores = [-float(PIECES.index(token)) for token in PIECES]
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<end_of_turn>": 3, "  ": 4}
    types = [6 if token.startswith("<0x") else kinds.get(token, 1) for token in PIECES]
    named = {"model": "llama", "pre": "default", "tokens": PIECES, "scores": scores, "token_type": types,
             "merges": None, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | changes  # fmt: skip
    return {f"tokenizer__ggml__{name}": value for name, value in named.items()} | {"vocab_size": size}


def test_sentencepiece_merges_what_scores_best_and_falls_back_to_bytes(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", **sentencepiece(add_space_prefix=False))
    tokenizer = load_tokenizer(find_folder(tmp_path / "m.gguf"))
    texts = {
        "ab": ["<s>", "ab"],
        "aba ab": ["<s>", "ab", "a", "\u2581ab"],
        "a  b": ["<s>", "a", "  ", "b"],
        "a!": ["<s>", "a", "<0x21>"],
        "<end_of_turn>a": ["<s>", "<end_of_turn>", "a"],
    }
    for text, tokens in texts.items():
        ids = tokenizer.encode(text)
        assert tokenizer.convert_ids_to_tokens(ids) == tokens
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert load(tmp_path / "m.gguf").eos_token_ids == (2, len(PIECES) - 1)


def test_a_space_comes_before_the_text_unless_the_file_turns_it_off(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", **sentencepiece(add_bos_token=False))
    tokenizer = load_tokenizer(find_folder(tmp_path / "m.gguf"))
    ids = tokenizer.encode("ab")
    assert tokenizer.convert_ids_to_tokens(ids) == ["\u2581ab"]
    assert tokenizer.decode(ids) == "ab"


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "rwkv7"}, "models of architecture 'rwkv7' are not read from GGUF"),
        ({"llama__block_count": 2**22}, "llama.block_count is 4194304"),
        ({"llama__block_count": 3}, "the tensor 'blk.2.attn_norm.weight' is missing"),
        ({"llama__block_count": 1}, "the tensor 'blk.1.attn_k.weight' has no place"),
        ({"llama__embedding_length": 2**31}, "llama.embedding_length is 2147483648, not a number from 1"),
        ({"llama__embedding_length": 2**20}, "'token_embd.weight' has the shape .* ask for"),
        ({"llama__attention__head_count": None}, "llama.attention.head_count is missing"),
        ({"llama__attention__head_count": "four"}, "llama.attention.head_count is 'four', which is of the wrong type"),
        ({"llama__attention__head_count_kv": [2, 1]}, "head_count_kv has 2 numbers for different layers"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is nan, not a number above 0"),
        ({"llama__attention__value_length": 16}, "value_length is not the size of a head, 8"),
        ({"llama__rope__scaling__type": "longrope"}, "positions scaled by 'longrope' are not read"),
        ({"split__count": 2}, "one of 2 parts; name the first one, which ends in -00001-of-00002"),
        ({"general__alignment": 33}, "alignment of 33 is not a power of two"),
        (
            {"tokenizer__ggml__pre": "new-rule"},
            "its pre-tokenizer, 'new-rule', is not known; take the model as a folder",
        ),
        ({"tokenizer__ggml__model": "rwkv"}, "tokenizer is of kind 'rwkv'"),
        ({"tokenizer__ggml__tokens": ["a"] * 97}, "names 97 tokens, and has embeddings of 96"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "tokens is a list of int"),
        ({"tokenizer__ggml__token_type": [1]}, "1 types for 96 tokens"),
        ({"tokenizer__ggml__eos_token_id": "</s>"}, "eos_token_id is '</s>', which is of the wrong type"),
        ({"tokenizer__ggml__merges": None}, "it has no merges of tokens; take the model as a folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_metadata_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "bad.gguf"
    arch = changes.pop("arch", None)
    write_model(path, **changes)
    if arch is not None:
        path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0rwkv7", 1))
    with pytest.raises(ModelError, match=rf"^model: .*bad\.gguf: .*{message}"):
        find_folder(path)


def edited(path: Path, at: int, form: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at, value)
    path.write_bytes(data)


@pytest.mark.parametrize("size", [0, 3, 20, 24, 60, 1000, -1, -5000])
def test_files_that_are_cut_short_are_refused(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"tiny\.gguf: .*(cut short|not a GGUF file|ends before)"):
        find_folder(file)


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "<I", 0, "it is not a GGUF file; name one"),
        (4, "<I", 1, "version 1 of the format is not read"),
        (
            4,
            "<I",
            3 << 24,
            "version 50331648 of the format is not read",
        ),  # of a machine that writes bytes the other way
        (8, "<Q", 2**62, "cut short or damaged|has 0 dimensions"),  # tensors: what follows is taken for more of them
        (16, "<Q", 2**62, "cut short or damaged|there twice"),  # keys
        (24, "<Q", 2**62, "cut short or damaged"),  # length of the first key
    ],
)
def test_counts_that_lie_are_refused_without_taking_memory(
    file: Path, at: int, form: str, value: int, message: str
) -> None:
    edited(file, at, form, value)
    tracemalloc.start()
    with pytest.raises(ModelError, match=message):
        find_folder(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


def place_of(path: Path, name: str) -> int:
    """Where the entry of a tensor begins in the file, after its name."""
    return path.read_bytes().index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def test_tensors_of_unknown_types_shapes_and_places_are_refused(file: Path) -> None:
    place, whole = place_of(file, "token_embd.weight"), file.read_bytes()
    for offset, form, value, message in (
        (0, "<I", 2**31, "has 2147483648 dimensions"),
        (4, "<Q", 2**60, "ends before the tensor 'token_embd.weight' does"),
        (4, "<Q", 0, "has a shape"),
        (20, "<I", 99, "of type number 99, which is not read; take a file of types BF16, F16"),
        (20, "<I", 15, "of type Q8_K, which is not read"),
        (24, "<Q", 2**63, "ends before"),
    ):
        file.write_bytes(whole)
        edited(file, place + offset, form, value)
        with pytest.raises(ModelError, match=rf"tiny\.gguf: .*{message}"):
            find_folder(file)


def test_a_missing_tensor_and_weights_that_are_no_numbers_are_refused_by_name(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelError, match=r"tiny\.gguf: the tensor 'blk\.1\.ffn_up\.weight' is missing; fetch"):
        find_folder(file)
    place = read_header_of(whole, file)["blk.1.ffn_up.weight"].offset
    edited(file, place, "<I", 0x7F800000)
    with pytest.raises(ModelError, match=r"weight model\.layers\.1\.mlp\.up_proj\.weight of .*tiny\.gguf has NaN"):
        load(file)


def read_header_of(data: bytes, path: Path) -> Any:
    path.write_bytes(data)
    return read_header(path).tensors


def test_arrays_that_lie_about_their_length_are_refused(tmp_path: Path) -> None:
    for kind in (0, 4, 8, 9, 77):
        key = b"some.key"
        entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, kind, 2**61)
        (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(64))
        with pytest.raises(ModelError, match=r"a\.gguf: .*(cut short|is not read)"):
            find_folder(tmp_path / "a.gguf")


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    def entry(name: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 256, 0, 0)  # at the same place

    header = b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entry(b"a") + entry(b"b")
    with pytest.raises(ModelError, match=r"a\.gguf: its tensors overlap"):
        read_header_of(header + bytes(1100), tmp_path / "a.gguf")


def test_a_file_that_was_replaced_is_read_anew(file: Path) -> None:
    before = find_folder(file)
    assert find_folder(file) == before
    write_model(file, num_hidden_layers=3)
    after = find_folder(file)
    assert load_config(after).num_hidden_layers == 3
    assert json.loads((before / "config.json").read_text())["num_hidden_layers"] == 2


def test_a_folder_that_somebody_spoiled_is_made_anew(file: Path) -> None:
    folder = find_folder(file)
    (folder / WEIGHTS).unlink()
    assert find_folder(file) == folder
    assert weights_file(folder) == file


def test_a_cache_that_cannot_be_written_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file where a folder is to be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ModelError, match=r"cannot be written .*; set XDG_CACHE_HOME to a folder that can"):
        find_folder(file)
