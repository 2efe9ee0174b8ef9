"""Downloads from a hub on this machine, its cache, and the drafters chosen for a known target."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assistants import save_assistant
from fake_hub import FakeHub, fake_hub
from heads import save_eagle3
from pair_heads import save_mtp
from specinfer.core.errors import ModelError
from specinfer.core.sampling import SamplingParams
from specinfer.core.vllm_names import from_speculative_config
from specinfer.engine_args import EngineArgs
from specinfer.hub import cache
from specinfer.hub.cache import damaged_files, find_cached
from specinfer.hub.files import HEADS, SUPPORTED_HEADS, choose_gguf, head_format, refusal
from specinfer.hub.known_drafters import auto_drafters, known_drafters, known_names, near_names
from specinfer.hub.locate import hub_name, locate, locate_tokenizer, without_revision
from specinfer.hub.store import cached_models, download, remove
from specinfer.llm import LLM
from specinfer.setup.model_names import usual_drafters
from tiny import save_model, save_tokenizer

BIG, SMALL = "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(tmp_path / "hub", tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def offer(hub: FakeHub, model_folder: Callable[..., Path]) -> Callable[..., Path]:
    """A function that puts a model on the hub."""

    def put(name: str, files: dict[str, str] | None = None) -> Path:
        folder = hub.root / name
        folder.mkdir(parents=True)
        if files is None:
            for file in model_folder(tokenizer=True).iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
        for file_name, text in (files or {}).items():
            (folder / file_name).parent.mkdir(parents=True, exist_ok=True)
            (folder / file_name).write_text(text)
        return folder

    return put


def test_only_what_is_needed_is_downloaded_and_the_progress_ends_at_the_total(
    hub: FakeHub, offer: Callable[..., Path]
) -> None:
    folder = offer(BIG)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("much")
    calls: list[tuple[str, int, int]] = []
    path = locate(BIG, lambda *call: calls.append(call))
    sent = {name.removeprefix(f"{BIG}/") for name in hub.requested}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert sent == {file.name for file in path.iterdir()} == needed
    total = sum((folder / name).stat().st_size for name in needed)
    assert calls[-1] == (f"downloading {BIG}", total, total)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    hub.requested.clear()
    assert locate(BIG) == locate(f"https://huggingface.co/{BIG}") == path
    assert hub.requested == []


def test_a_gguf_file_is_chosen_by_its_type(hub: FakeHub, offer: Callable[..., Path]) -> None:
    name = "someone/Model-GGUF"
    offer(name, {f"model.{kind}.gguf": kind for kind in ("Q2_K", "Q4_K_M", "Q8_0")} | {"mmproj-f16.gguf": "picture"})
    assert locate(name).read_text() == "Q4_K_M"
    assert hub.requested == [f"{name}/model.Q4_K_M.gguf"]
    assert locate(f"{name}:q8_0").read_text() == "Q8_0"
    with pytest.raises(ModelError, match=r"no GGUF file of type Q6_K; it has .*model\.Q2_K\.gguf"):
        locate(f"{name}:Q6_K")
    assert choose_gguf(["a.safetensors"], None) is None


def test_all_parts_of_a_gguf_file_are_downloaded(hub: FakeHub, offer: Callable[..., Path]) -> None:
    parts = [f"Q4_K_M/m-Q4_K_M-{i:05d}-of-00002.gguf" for i in (1, 2)]
    offer("someone/Split", {part: part for part in parts} | {"m-Q8_0-00001-of-00002.gguf": ""})
    path = locate("someone/Split:Q4_K_M")
    assert path.read_text() == parts[0]
    assert path.with_name("m-Q4_K_M-00002-of-00002.gguf").read_text() == parts[1]
    assert sorted(hub.requested) == [f"someone/Split/{part}" for part in parts]
    hub.requested.clear()
    assert locate("someone/Split:Q4_K_M") == path
    assert hub.requested == []
    with pytest.raises(ModelError, match=r"its part m-Q8_0-00002-of-00002\.gguf is missing"):
        locate("someone/Split:Q8_0")


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"adapter_config.json": '{"base_model_name_or_path": "org/base"}', "adapter_model.safetensors": ""},
         r"adapter \(LoRA\) of org/base; merge both"),
        ({"config.json": '{"quantization_config": {"quant_method": "modelopt"}}', "model.safetensors": ""},
         r"quantized already \(modelopt\)"),
        ({"config.json": '{"quantization_config": {"quant_method": "quark"}}', "model.safetensors": ""},
         r"quantized already \(quark\)"),
        ({"config.json": '{"text_config": {"quantization_config": {"quant_method": "hqq"}}}', "m.safetensors": ""},
         r"quantized already \(hqq\).*GGUF file"),
        ({"config.json": '{"architectures": ["LlamaForCausalLMMedusa"]}', "model.safetensors": ""},
         r"hidden states of its target \(Medusa\); these are not supported yet"),
        ({"config.json": '{"architectures": ["BertForMaskedLM"]}', "model.safetensors": ""},
         r"not a decoder that generates text \(BertForMaskedLM\)"),
        ({"config.json": '{"architectures": ["LlamaForCausalLM"]}', "pytorch_model.bin": ""},
         r"only pytorch_model\.bin, which can run code"),
        ({"README.md": ""}, r"no config\.json"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_loaded_are_refused_before_their_weights_are_downloaded(
    hub: FakeHub, offer: Callable[..., Path], files: dict[str, str], part: str
) -> None:
    folder = offer("org/model", files)
    with pytest.raises(ModelError, match=rf"^model: org/model cannot be loaded: .*{part}"):
        locate("org/model")
    assert not [name for name in hub.requested if not name.endswith(".json")]
    with pytest.raises(ModelError, match=part):
        locate(folder)


def test_a_name_that_is_not_on_the_hub_gets_near_names(hub: FakeHub, offer: Callable[..., Path]) -> None:
    offer("me/my-own-model")
    locate("me/my-own-model")
    for wrong, near in (("Qwen/Qwen3-8", BIG), ("Qwen3-0.6B", SMALL), ("me/my-own-modle", "me/my-own-model")):
        with pytest.raises(ModelError, match=rf"no model '{wrong}' on the hub.*did you mean .*{near}"):
            locate(wrong)
    with pytest.raises(ModelError, match=r"or it is private .*; check the name, or give a folder$"):
        locate("nobody/zzzzzzzzzzz")
    hub.gated.add("google/gemma-3-270m-it")
    with pytest.raises(ModelError, match=r"accept its terms.*hf auth login"):
        locate("google/gemma-3-270m-it")


def test_a_hub_that_cannot_be_reached_is_named_without_the_names_of_classes(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"the hub \(http://127\.0\.0\.1:9\) cannot be reached.*HF_ENDPOINT") as raised:
        locate("org/model")
    assert "Error" not in str(raised.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids asking the hub"):
        locate("org/model")


def test_a_damaged_answer_of_the_hub_is_one_line(hub: FakeHub, offer: Callable[..., Path]) -> None:
    offer("org/model", {"config.json": "{", "model.safetensors": ""})
    with pytest.raises(ModelError, match=r"^model: org/model cannot be loaded: config\.json is damaged"):
        locate("org/model")


def test_the_cache_lists_models_with_what_is_wrong_with_them(hub: FakeHub, offer: Callable[..., Path]) -> None:
    assert cached_models() == []
    offer(BIG)
    offer("a/b-GGUF", {"m.Q8_0.gguf": "12345"})
    path = download(BIG)
    download("a/b-GGUF")
    gguf, big = cached_models()
    assert (gguf.name, gguf.format, gguf.num_bytes, gguf.refusal) == ("a/b-GGUF", "GGUF", 5, None)
    assert (big.name, big.format, big.refusal) == (BIG, "safetensors", None)
    assert big.num_bytes == sum(file.stat().st_size for file in path.iterdir())
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    assert "incomplete" in str(cached_models()[1].refusal)
    assert find_cached(BIG) is None
    with pytest.raises(ModelError, match=f"not in the cache; did you mean {BIG}"):
        remove("Qwen/Qwen3-8b-")
    assert remove("a/b-gguf") == 5
    assert [model.name for model in cached_models()] == [BIG]


def test_auto_chooses_a_known_drafter_from_the_cache_or_else_the_hub_or_else_a_lookup(
    hub: FakeHub, offer: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specinfer")
    here = tmp_path / "Qwen3-8B"
    here.mkdir()
    assert auto_drafters("some/model").names == ("ngram",)
    assert "ngram: no head or small model is known for it" in caplog.text
    assert auto_drafters(BIG, heads=()).names == ("ngram",)
    assert f"{SMALL} cannot be downloaded" in caplog.text
    offer(SMALL)
    assert auto_drafters(here).names == ("ngram",)  # nothing is downloaded for a folder
    assert hub.requested == []
    assert auto_drafters(BIG, heads=()) == ((SMALL, "suffix"), f"{SMALL} was downloaded")
    quantized = f"unsloth/{here.name}-GGUF:Q4_K_M"
    assert auto_drafters(here) == auto_drafters(quantized) == ((SMALL, "suffix"), f"{SMALL} is in the cache")


def test_auto_prefers_heads_to_small_models(hub: FakeHub, offer: Callable[..., Path], tmp_path: Path) -> None:
    head = "AngelSlim/Qwen3-8B_eagle3"
    folder = save_eagle3(tmp_path / "head")
    offer(head, {"config.json": (folder / "config.json").read_text()})
    (hub.root / head / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    offer(SMALL)
    assert auto_drafters(BIG).names == (head, "suffix")
    assert auto_drafters(BIG, has_mtp=True) == (("mtp", "suffix"), "its checkpoint has MTP layers")


def test_auto_finds_drafters_next_to_the_target(tmp_path: Path) -> None:
    target = save_model(tmp_path / "Big-Model", num_hidden_layers=8)
    save_tokenizer(target)
    alone = auto_drafters(target)
    assert alone.names == ("ngram",)
    save_model(tmp_path / "other-tokenizer", num_hidden_layers=1)
    save_tokenizer(save_model(tmp_path / "as-large", num_hidden_layers=8))
    assert auto_drafters(target) == alone
    save_tokenizer(save_model(tmp_path / "small", num_hidden_layers=1))
    small = (str(tmp_path / "small"), "suffix")
    assert auto_drafters(target) == (small, "small is in a folder next to it")
    verifier = {"verifier": {"name_or_path": "org/some-other-model"}}
    save_eagle3(tmp_path / "another-head", "speculators", speculators_config=verifier)
    assert auto_drafters(target).names == small
    verifier = {"verifier": {"name_or_path": "org/Big-Model"}}
    head = save_eagle3(tmp_path / "head", "speculators", speculators_config=verifier)
    assert auto_drafters(target).names == (str(head), "suffix")
    assert auto_drafters(target, heads=()).names == small


def test_auto_finds_the_assistant_of_a_target_in_one_process(tmp_path: Path) -> None:
    target = save_model(tmp_path / "gemma-4-E2B-it", "gemma4_text")
    assistant = save_assistant(tmp_path / "gemma-4-E2B-it-assistant")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert usual_drafters(target, target, cpu).names == (str(assistant), "suffix")
    assert usual_drafters(target, target, gpu).names == (str(assistant),), "a lookup would end steps side by side"
    for device in (cpu, gpu):
        assert usual_drafters(target, target, device, is_whole=False).names == ("ngram",)


def test_mtp_layers_of_the_checkpoint_draft_by_themselves(tmp_path: Path) -> None:
    save_mtp(tmp_path / "target", "mimo")
    with LLM(tmp_path / "target", dtype="float32", tree="1") as llm:
        assert list(llm.small_models) == ["mtp"]
        assert llm.drafter_choice == "mtp and suffix: its checkpoint has MTP layers"
        assert llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=3))[0].error is None


def test_a_known_target_of_the_hub_is_served_with_its_drafter(hub: FakeHub, offer: Callable[..., Path]) -> None:
    offer(BIG)
    offer(SMALL)
    with LLM(BIG, dtype="float32") as llm:
        assert list(llm.small_models) == [SMALL]
        assert llm.drafter_choice == f"{SMALL} and suffix: {SMALL} was downloaded"
        assert llm.drafter is not None
        assert llm.drafter.num_drafters == 2
    hub.requested.clear()
    with LLM(BIG, dtype="float32", tree="off") as llm:
        assert llm.drafter is None


def test_a_pickled_model_of_one_layer_may_be_an_eagle_head() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    names = ["config.json", "pytorch_model.bin"]
    assert refusal(names, config, None) is None
    why = refusal(names, config | {"num_hidden_layers": 2}, None)
    assert why is not None
    assert why.startswith("it has only pytorch_model.bin")


def test_the_table_has_small_models_first_and_says_what_is_not_supported() -> None:
    drafters = known_drafters(BIG)
    assert (drafters[0].name, drafters[0].parameters, drafters[0].is_supported) == (SMALL, 0.6, True)
    assert {drafter.kind for drafter in drafters} == {"small model", "EAGLE-3", "DFlash"}
    assert {drafter.kind for drafter in drafters if drafter.is_supported} == {"small model", "EAGLE-3", "DFlash"}
    assert known_drafters(SMALL) == []  # none is small enough
    for same in ("/models/Qwen3-8B-Q4_K_M.gguf", "qwen/qwen3-8b", "cache/models--Qwen--Qwen3-8B/snapshots/0123"):
        assert known_drafters(same) == drafters
    assert [drafter.kind for drafter in known_drafters("deepseek-ai/DeepSeek-V3")] == ["MTP"]
    names = known_names()
    assert len(names) == len(set(names)) > 100
    assert all(hub_name(name) == (name, None, None) for name in names)


def test_near_names_are_not_far() -> None:
    assert near_names("qwen/qwen3-8b", known_names())[0] == BIG
    assert near_names("lama-3.2-1b-instruct", known_names())[0] == "meta-llama/Llama-3.2-1B-Instruct"
    assert near_names("n-gram", [])[0] == "ngram"
    assert near_names("zzzz/yyyy", ["a/b"]) == []


def test_names_of_the_hub_and_paths() -> None:
    assert hub_name("hf.co/a/b:Q4_K_M") == ("a/b", "Q4_K_M", None)
    for path in ("/a/b", "./a", "a/b/c", "C:\\models\\a", ""):
        assert hub_name(path) is None
    assert refusal(["m.safetensors"], {"architectures": ["LlamaForCausalLM"]}, None) is None


def test_a_tokenizer_from_elsewhere(
    hub: FakeHub, offer: Callable[..., Path], tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    bare = str(save_model(tmp_path / "bare"))
    tokenizer = save_tokenizer(tmp_path / "tokenizer", "{{ messages[0].content }}")
    options: dict[str, Any] = {"drafters": [], "dtype": "float32"}
    with LLM(bare, **options) as llm:
        assert llm.tokenizer is None
    with LLM(bare, tokenizer=tokenizer, **options) as llm:
        without = llm.generate("the story")[0]
        assert without.outputs[0].text
        assert llm.chat([{"role": "user", "content": "the"}])[0].outputs[0].token_ids
    folder = offer("org/tokens")
    assert (locate_tokenizer("org/tokens") / "tokenizer.json").is_file()
    assert f"{folder.parent.name}/tokens/model.safetensors" not in hub.requested
    with pytest.raises(ModelError, match=r"^tokenizer: .* has no tokenizer\.json"):
        LLM(bare, tokenizer=bare, **options)
    with pytest.raises(ModelError, match=r"^tokenizer: no folder '/nowhere/at/all'"):
        LLM(bare, tokenizer="/nowhere/at/all", **options)
    small = json.loads((tokenizer / "tokenizer.json").read_text())
    number = len(small["model"]["vocab"])
    with pytest.raises(ModelError, match=rf"^tokenizer: it has {number} tokens and the model 64"):
        LLM(str(save_model(tmp_path / "small", vocab_size=64)), tokenizer=tokenizer, **options)


# ------------------------------------------------------------------------------ revisions and checksums


def test_a_revision_is_downloaded_kept_apart_and_found_again(
    hub: FakeHub, offer: Callable[..., Path], model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer("me/model")
    offer("me/model@v2", {"config.json": (model_folder() / "config.json").read_text()})
    (hub.root / "me/model@v2/model.safetensors").write_bytes((model_folder(seed=1) / "model.safetensors").read_bytes())
    main, second = locate("me/model"), locate("me/model@v2")
    assert main != second
    assert (main / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()
    hub.requested.clear()
    assert locate(f"me/model@{second.name}") == second, "by its commit"
    assert locate("me/model@v2") == second
    assert locate("me/model@main") == locate("me/model") == main
    assert hub.requested == []
    with pytest.raises(ModelError, match=r"me/model has no revision 'v3'; .*/me/model/commits/main has its commits"):
        locate("me/model@v3")
    assert locate_tokenizer("me/model@main") == main
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="'me/model@v4' is not in the cache, and HF_HUB_OFFLINE forbids"):
        locate("me/model@v4")


def test_a_model_without_a_known_branch_is_taken_from_its_only_commit(
    hub: FakeHub, offer: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer("me/model")
    folder = locate("me/model")
    commit = folder.name
    shutil.rmtree(folder.parents[1] / "refs")
    assert locate(f"me/model@{commit}") == locate(f"me/model@{commit[:7]}") == folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("me/model", "me/model@main", f"me/model@{commit[:7]}"):
        assert locate(name) == locate_tokenizer(name) == folder
    assert f"me/model is taken from commit {commit}, the only one in the cache" in caplog.text
    with pytest.raises(
        ModelError, match=rf"'me/model@v2' is not in the cache.*what the cache has: me/model@{commit[:12]}$"
    ):
        locate("me/model@v2")
    shutil.copytree(folder, folder.with_name("f" * 40))
    with pytest.raises(ModelError, match=rf"'me/model' is not in .*: me/model@{commit[:12]}, me/model@ffffffffffff$"):
        locate("me/model")
    assert locate("me/model@ffff") == folder.with_name("f" * 40)
    shutil.rmtree(folder.parent)
    with pytest.raises(ModelError, match=r"'me/model' is not in the cache.* or give a folder or a GGUF file$"):
        locate("me/model")


def test_templates_with_a_name_and_weights_of_another_name_are_downloaded(
    hub: FakeHub, offer: Callable[..., Path]
) -> None:
    folder = offer("me/model")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    copy = locate("me/model")
    assert (copy / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert (copy / "consolidated.safetensors").is_file()
    assert locate("me/model") == copy


def test_revisions_are_part_of_names() -> None:
    assert hub_name("org/name:Q4_K_M@refs/pr/1") == ("org/name", "Q4_K_M", "refs/pr/1")
    assert hub_name("name@a/../b") is None
    assert without_revision("org/name:Q8_0@v1") == "org/name:Q8_0"
    assert without_revision("/a/folder@home") == "/a/folder@home"
    args = EngineArgs("org/name", revision="v1", tokenizer_revision="v2")
    assert (args.model, args.tokenizer, args.revision) == ("org/name@v1", "org/name@v2", None)
    assert replace(args, seed=1).model == "org/name@v1"
    assert EngineArgs("demo", revision="main").model == "demo"
    assert known_drafters(f"{BIG}@v1") == known_drafters(BIG) != []
    config = from_speculative_config({"model": "a/b", "revision": "v1"})
    assert config == {"drafters": ["a/b@v1"]}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("demo", {"revision": "v1"}, "revision: demo is part of the package; leave revision out"),
        ("demo-chat", {"tokenizer_revision": "v1"}, "tokenizer_revision: demo-chat is part of the package"),
        ("/", {"revision": "v1"}, "revision: '/' is not a model of the hub; leave revision out"),
        ("a/b@v1", {"revision": "v2"}, "revision: 'a/b@v1' names a revision already; leave one out"),
        ("a/b", {"revision": "../../etc"}, "revision: '../../etc' is not a branch, tag or commit"),
        ("a/b", {"revision": ""}, "revision: '' is not a branch, tag or commit"),
    ],
)
def test_revisions_that_cannot_be_are_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        EngineArgs(model, **options)


def test_a_revision_of_several_drafters_is_refused() -> None:
    with pytest.raises(ValueError, match="revision is for one model of the hub; of several, name NAME@REVISION"):
        from_speculative_config({"model": ["a/b", "c/d"], "revision": "v1"})


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_byte_that_changes_in_the_cache_is_found_and_not_loaded(
    hub: FakeHub, offer: Callable[..., Path], name: str
) -> None:
    offer("me/model")
    path = locate("me/model")
    assert damaged_files(path) == []
    assert cached_models(verify=True)[0].refusal is None
    file = (path / name).resolve()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert damaged_files(path) == [name]
    assert cached_models(verify=True)[0].refusal == f"damaged: {name}; remove it, and pull it again"
    for model in ("me/model", path):
        with pytest.raises(ModelError, match=rf"is damaged: {name}, .*; remove it with specinfer rm, and pull"):
            locate(model)


def test_files_that_agreed_with_their_checksums_are_not_read_again(
    hub: FakeHub, offer: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer("me/twice", {"config.json": '{"model_type": "llama"}', "model.safetensors": "weights"})
    path = locate("me/twice")
    monkeypatch.setattr(cache, "_digest", lambda content, size: pytest.fail(f"{content} is read again"))
    assert locate("me/twice") == locate(path) == path
    monkeypatch.undo()
    (path / "model.safetensors").resolve().write_text("Weights")
    with pytest.raises(ModelError, match=r"damaged: model\.safetensors"):
        locate("me/twice")
    (path / "model.safetensors").resolve().write_text("weights")
    assert locate("me/twice") == path


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_every_format_are_known_by_their_words_and_have_a_class(name: str) -> None:
    head = HEADS[name]
    assert {head_format({"model_type": f"{word}-1"}) for word in head.words} <= {name}
    assert (name in SUPPORTED_HEADS) == (head.path is not None and callable(head.find()))
