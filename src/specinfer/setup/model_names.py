"""Built-in model names that are not a folder, file or hub name: the code pair "demo" and the chat model "demo-chat"."""

from pathlib import Path
from typing import Any

from specinfer.core.errors import ModelError
from specinfer.demo import chat_drafter, chat_model
from specinfer.demo.chat_model import CHAT, CODE, DRAFTER_NAMES, MISSING
from specinfer.demo.pair import demo_folders
from specinfer.hub.auto_drafter import auto_drafters
from specinfer.hub.locate import locate_tokenizer
from specinfer.model.definition import load_tokenizer
from specinfer.model.folder import find_folder
from specinfer.model.gguf.folder import find_gguf_folder, is_gguf
from specinfer.model.heads.load import find_format
from specinfer.model.load import LoadedModel


def find_target(model: str | Path) -> Path:
    """Return the folder of a target.

    Raises:
        ModelError: There is no such model.
    """
    if str(model) == CODE:
        return demo_folders().target
    if str(model) != CHAT:
        folder = find_folder(model)
        if (head := find_format(folder)) is not None:
            raise ModelError(f"model: {folder} is a drafter ({head}); name its target as the model, and it in drafters")
        return folder
    file = chat_model.find_chat_model()
    if file is None:
        raise ModelError(MISSING)
    return find_folder(file)


def find_drafter(name: str) -> Path:
    """Return the folder of a drafter that is a model.

    Raises:
        ModelError: There is no such model.
    """
    if name in DRAFTER_NAMES:
        return demo_folders().drafters[name]
    if name != CHAT:
        return find_folder(name)
    folder = chat_drafter.chat_drafter_folder()
    if folder is None:
        raise ModelError(MISSING)
    return folder


def find_tokenizer(name: str | Path, target: LoadedModel) -> Any:
    """Return the tokenizer of a folder, a GGUF file or a model of the hub, for a target.

    Raises:
        ModelError: There is no such tokenizer, or it has more tokens than the target.
    """
    path = demo_folders().target if str(name) == CODE else locate_tokenizer(name)
    tokenizer = load_tokenizer(find_gguf_folder(path) if is_gguf(path) else path)
    if len(tokenizer) > target.vocab_size:
        raise ModelError(
            f"tokenizer: it has {len(tokenizer)} tokens and the model {target.vocab_size}; name the model's own"
        )
    return tokenizer


def usual_drafters(model: str | Path, *, small_models: bool = True) -> tuple[str, ...]:
    """Return the names of the drafters of a target for which none are chosen.

    Args:
        small_models: Whether a known small model may be among them, if the target is not an embedded one.
    """
    if str(model) == CHAT:
        return (CHAT, "suffix")
    if str(model) == CODE:
        return (CODE,)
    return auto_drafters(model) if small_models else ("ngram",)
