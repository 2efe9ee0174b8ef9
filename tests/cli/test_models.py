"""run, pull, list and rm, with a hub on this machine."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_hub import FakeHub, fake_hub
from specinfer.cli.app import app
from specinfer.demo import chat_model, pair
from tiny import save_model, save_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
GREEDY = ("--temperature", "0", "--max-tokens", "12")
MODEL = "me/tiny-chat"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(tmp_path / "hub", tmp_path / "cache") as hub:
        save_tokenizer(save_model(hub.root / MODEL, max_position_embeddings=512), TEMPLATE)
        yield hub


def run(*words: str, stdin: str | None = None, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(words), input=stdin, env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result


def refusal(*words: str, **options: Any) -> str:
    (line,) = run(*words, code=2, **options).stderr.splitlines()
    return str(line).removeprefix("specinfer: error: ")


def rows(*words: Sequence[str]) -> list[str]:
    return [" ".join(line.split()) for line in run("list", *map(str, words)).stdout.splitlines()]


def test_run_downloads_a_model_once_and_answers_like_chat(hub: FakeHub) -> None:
    answer = run("run", MODEL, "the story", *GREEDY).stdout
    assert f"{MODEL}/model.safetensors" in hub.requested
    hub.requested.clear()
    assert run("chat", MODEL, "--quick", "the story", *GREEDY).stdout == answer
    assert run("run", MODEL, *GREEDY, stdin="the story\n").stdout == answer
    together = run("run", MODEL, "in", "short", *GREEDY, stdin="the story\n").stdout
    assert together == run("chat", MODEL, "--quick", "the story\n\nin short", *GREEDY).stdout
    assert hub.requested == []
    assert refusal("run", MODEL, stdin="") == "prompt: none given; name one after the model, or pipe it in"


def test_run_completes_text_with_a_model_that_has_no_chat_template(
    hub: FakeHub, model_folder: Callable[..., Path]
) -> None:
    folder = str(model_folder(tokenizer=True))
    assert run("run", folder, "the story", *GREEDY).stdout == run("generate", folder, "the story", *GREEDY).stdout


def test_models_are_pulled_listed_and_removed(hub: FakeHub) -> None:
    assert rows()[0] == "NAME FORMAT SIZE MODIFIED STATE"
    assert rows()[1] == "demo embedded can be loaded"
    assert not any(MODEL in row for row in rows())
    assert MODEL in run("pull", MODEL).stderr
    assert rows()[-1] == f"{MODEL} safetensors 0 MB today can be loaded"
    (hub.root / "me/quantized").mkdir()
    (hub.root / "me/quantized/config.json").write_text('{"quantization_config": {"quant_method": "quark"}}')
    assert "me/quantized cannot be loaded: its weights are quantized already (quark)" in refusal("pull", "me/quantized")
    assert any(row.startswith("me/quantized other 0 MB today cannot be loaded: its weights") for row in rows())
    assert "removed" in run("rm", MODEL, "me/quantized").stderr
    assert not any("me/" in row for row in rows())
    assert "not in the cache" in refusal("rm", MODEL)
    for command in ("rm", "pull"):
        assert "part of the package" in refusal(command, "demo")
    assert "not the name of a model on the hub" in refusal("pull", str(hub.root / MODEL))
    assert f"did you mean {MODEL}?" not in refusal("run", "me/tiny-chta", "hi")
    run("pull", MODEL)
    assert f"did you mean {MODEL}?" in refusal("run", "me/tiny-chta", "hi")


def test_drafters_of_a_target_are_listed_with_what_is_known_of_them(hub: FakeHub) -> None:
    save_tokenizer(save_model(hub.root / "Qwen/Qwen3-0.6B"))
    run("pull", "Qwen/Qwen3-0.6B")
    listed = rows("--drafters", "Qwen/Qwen3-8B")
    assert "Qwen/Qwen3-0.6B small model, 0.6 B in the cache" in listed
    assert "Qwen/Qwen3-1.7B small model, 1.7 B can be pulled" in listed
    assert "AngelSlim/Qwen3-8B_eagle3 EAGLE-3 can be pulled" in listed
    assert listed[-2:] == ["suffix lookup built in", "ngram lookup built in"]
    assert rows("--drafters", "deepseek-ai/DeepSeek-V3")[1] == "mtp MTP layers of the target can be pulled"
    assert "did you mean Qwen/Qwen3-8B" in refusal("list", "--drafters", "Qwen/Qwen3-8")


def test_damage_of_embedded_files_is_listed(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(chat_model.PACKED_HEADS / "demo-eagle3", tmp_path / "packed" / "demo-eagle3"))
    monkeypatch.setattr(pair, "PACKED", tmp_path / "packed")
    assert rows("--verify")[1] == "demo embedded can be loaded"
    (folder / "config.json").write_text("{}")
    assert "config.json is damaged: reinstall" in " ".join(run("list", "--verify", code=1).stdout.split())


def test_a_revision_is_pulled_and_damage_is_listed(hub: FakeHub) -> None:
    save_tokenizer(save_model(hub.root / f"{MODEL}@v2", seed=1))
    commit = Path(run("pull", MODEL, "--revision", "v2").stderr.rpartition(" in ")[2].replace("\n", ""))
    assert (commit / "model.safetensors").read_bytes() == (hub.root / f"{MODEL}@v2/model.safetensors").read_bytes()
    assert "has no revision 'v3'" in refusal("pull", f"{MODEL}@v3")
    assert "names a revision already" in refusal("pull", f"{MODEL}@v2", "--revision", "v3")
    assert rows("--verify")[-1].endswith("can be loaded")
    file = (commit / "model.safetensors").resolve()
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert rows()[-1].endswith("can be loaded"), "not every file is read each time"
    assert "damaged: model.safetensors; remove it" in run("list", "--verify", code=1).stdout
    assert "is damaged: model.safetensors; remove it with specinfer rm" in refusal("pull", f"{MODEL}@v2")
