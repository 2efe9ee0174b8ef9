"""Files of weights that have other names than usual, that are unfinished, or that are no weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specinfer import LLM, ModelError, SamplingParams
from specinfer.hub.locate import locate_tokenizer
from specinfer.model.definition import load_plain, load_tokenizer
from specinfer.model.folder import find_folder
from specinfer.model.gguf.folder import weights_file
from specinfer.model.load import load_model
from specinfer.model.offload.shards import weight_paths
from tests.model.gguf_files import write_model, write_parts
from tiny import make_model, save_tokenizer

WEIGHTS = "model.safetensors"
_TOOL_USE = "additional_chat_templates/tool_use.jinja"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "alone").mkdir()
    write_model(tmp_path / "alone" / "tiny.gguf")
    return tmp_path / "alone" / "tiny.gguf"


@pytest.mark.parametrize(
    "name", ["model.fp16.safetensors", "consolidated.safetensors", "model-00001-of-00001.safetensors"]
)
def test_the_only_file_of_weights_may_have_any_name(folder: Path, name: str) -> None:
    wanted = load_plain(folder, torch.float32).state_dict()
    prompt, whole = {"prompt_token_ids": [3, 1, 4, 5]}, LLM(folder, dtype="float32", drafters=["ngram"])
    (folder / WEIGHTS).rename(folder / name)
    found = load_plain(find_folder(folder), torch.float32).state_dict()
    assert all(torch.equal(found[key], weight) for key, weight in wanted.items())
    options = [{}, {"offload": "disk", "memory_budget": "6GiB"}]
    texts = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for llm in
             (whole, *(LLM(folder, dtype="float32", drafters=["ngram"], **each) for each in options))]  # fmt: skip
    assert texts[0] == texts[1] == texts[2]


def test_parts_of_weights_need_no_index_or_one_of_another_precision(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    index, parts = tmp_path / f"{WEIGHTS}.index.json", sorted(tmp_path.glob("*.safetensors"))
    assert len(parts) > 1
    index.rename(tmp_path / "model.safetensors.index.fp16.json")
    assert weight_paths(find_folder(tmp_path)) == parts
    (tmp_path / "model.safetensors.index.fp16.json").unlink()
    assert weight_paths(find_folder(tmp_path)) == parts
    load_model(tmp_path, torch.float32, torch.device("cpu"))
    parts[1].unlink()
    with pytest.raises(ModelError, match=rf"{parts[1].name} is missing, though the other parts are there; fetch"):
        load_model(find_folder(tmp_path), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("options", [{}, {"offload": "disk", "memory_budget": "6GiB"}], ids=["whole", "streamed"])
def test_several_files_of_weights_are_refused_with_one_message(folder: Path, options: dict[str, str]) -> None:
    shutil.copy(folder / WEIGHTS, folder / "model.fp16.safetensors")
    assert weight_paths(folder) == [folder / WEIGHTS]
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    with pytest.raises(
        ModelError, match=r"several files of weights, a\.safetensors, model\.fp16\.safetensors, and no ind"
    ):
        LLM(folder, dtype="float32", drafters=["ngram"], **options)


def test_an_index_does_not_name_files_of_other_folders(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"x": "../../a.safetensors"}}))
    assert weight_paths(folder) == [folder / "a.safetensors"]


# ------------------------------------------------------------------------------------------------ GGUF


@pytest.mark.parametrize("name", ["4f1c", "tiny.gguf.part", "tiny.GGUF", "tiny.bin"])
def test_a_gguf_file_is_known_by_its_content(file: Path, name: str) -> None:
    renamed = file.rename(file.with_name(name))
    assert weights_file(find_folder(renamed)) == renamed
    assert locate_tokenizer(renamed) == renamed


def test_an_unfinished_gguf_file_is_refused_for_what_it_lacks(file: Path) -> None:
    part = file.with_name("tiny.gguf.part")
    part.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"tiny\.gguf\.part: the file ends before the tensor .*; fetch the file again"):
        find_folder(part)
    part.write_bytes(b"")
    with pytest.raises(ModelError, match=r"tiny\.gguf\.part' is an unfinished download; finish it"):
        find_folder(part)


def test_the_only_gguf_file_of_a_folder_is_its_model(file: Path, tmp_path: Path) -> None:
    assert weights_file(find_folder(file.parent)) == file
    assert locate_tokenizer(file.parent) == file
    (file.parent / "config.json").write_text("{}")  # as repositories of GGUF files have it
    (file.parent / "mmproj-f16.gguf").write_bytes(b"GGUF")
    assert weights_file(find_folder(file.parent)) == file
    save_tokenizer(file.parent)
    assert locate_tokenizer(file.parent) == file.parent
    (tmp_path / "parts").mkdir()
    parts = write_parts(file, 2)
    parts = [part.rename(tmp_path / "parts" / part.name) for part in parts]
    assert weights_file(find_folder(tmp_path / "parts")) == parts[0]


def test_of_several_gguf_files_one_is_to_be_named(file: Path) -> None:
    shutil.copy(file, file.with_name("other.gguf"))
    with pytest.raises(ModelError, match=r"no config\.json, but GGUF files; name one of them, such as other\.gguf"):
        find_folder(file.parent)


def test_files_that_are_no_content_are_named_for_what_they_are(folder: Path, file: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n"
    for path in (file, folder / WEIGHTS):
        path.write_bytes(pointer)
        with pytest.raises(
            ModelError, match=rf"{path.name}:? (it )?is a Git LFS pointer, not the content; run git lfs pull"
        ):
            find_folder(path if path == file else folder)
    (folder / WEIGHTS).rename(folder / f"{WEIGHTS}.incomplete")
    with pytest.raises(ModelError, match=r"model\.safetensors\.incomplete is an unfinished download; finish it"):
        find_folder(folder)


# ------------------------------------------------------------------------------ tokenizers and templates


@pytest.mark.parametrize("kind", ["GemmaTokenizerFast", "CodeLlamaTokenizerFast", "LlamaTokenizer"])
def test_a_tokenizer_whose_class_does_not_fit_its_file_is_read_from_the_file(folder: Path, kind: str) -> None:
    save_tokenizer(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": kind}))
    text, wanted = "the other one 123", Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode(text, add_special_tokens=False) == wanted.encode(text).ids


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"chat_template.jinja": "a"}, "a"),
        ({"chat_template.json": '{"chat_template": "a"}'}, "a"),
        ({"chat_template.json": "[1"}, None),
        ({"chat_template.jinja": "a", _TOOL_USE: "b"}, {"default": "a", "tool_use": "b"}),
        ({_TOOL_USE: "b"}, {"default": "b", "tool_use": "b"}),
    ],
    ids=["jinja", "processor", "damaged", "named", "only-named"],
)  # fmt: skip
def test_templates_are_read_from_the_files_that_have_them(
    tmp_path: Path, files: dict[str, str], wanted: object
) -> None:
    save_tokenizer(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert load_tokenizer(tmp_path).chat_template == wanted


def test_templates_of_the_tokenizers_configuration_have_names_or_not(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config.write_text(json.dumps(fields | {"chat_template": named}))
    assert load_tokenizer(tmp_path).chat_template == {"default": "a", "tool_use": "b"}
    config.write_text(json.dumps(fields | {"chat_template": "a"}))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("b")
    assert load_tokenizer(tmp_path).chat_template == {"default": "a", "tool_use": "b"}
