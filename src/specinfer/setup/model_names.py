"""Built-in model names that are not a folder, file or hub name: the code pair "demo" and the chat model "demo-chat"."""

import logging
from pathlib import Path
from typing import Any

import torch

from specinfer.core.errors import ModelError
from specinfer.core.lookups import is_model
from specinfer.demo import chat_model
from specinfer.demo.chat_model import CHAT, CHAT_HEADS, CODE, DRAFTER_NAMES, HEAD_NAMES, MISSING
from specinfer.demo.pair import chat_drafter_folder, chat_head_folder, demo_folders, head_folder
from specinfer.hub.files import ASSISTANT, SUPPORTED_HEADS, is_gguf, tuning_gain
from specinfer.hub.known_drafters import LOOKUP, LOOKUP_WITH_MODEL, DrafterChoice, auto_drafters
from specinfer.hub.locate import locate_tokenizer
from specinfer.model.definition import load_config, load_tokenizer
from specinfer.model.folder import find_folder
from specinfer.model.gguf.folder import find_gguf_folder
from specinfer.model.heads.load import find_format, shows_hidden_states
from specinfer.model.heads.mtp import has_mtp
from specinfer.model.load import LoadedModel

logger = logging.getLogger(__name__)


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
    if name in CHAT_HEADS:
        folder = chat_head_folder(name)
    elif name in HEAD_NAMES:
        return head_folder(name)
    elif name == CHAT:
        folder = chat_drafter_folder()
    else:
        folder = find_folder(name)
        if (gain := tuning_gain(folder)) is not None and gain <= 1:
            logger.warning("drafter %s: its training made it worse (%.2f times its tokens per pass)", name, gain)
        return folder
    if folder is None:
        raise ModelError(MISSING)
    return folder


def named_tokenizer(name: str | Path) -> Any:
    """Return the tokenizer of a folder, a GGUF file, a model of the hub or an embedded one.

    Raises:
        ModelError: There is no such tokenizer.
    """
    path = find_target(name) if str(name) in (CODE, CHAT) else locate_tokenizer(name)
    return load_tokenizer(find_gguf_folder(path) if is_gguf(path) else path)


def find_tokenizer(name: str | Path, target: LoadedModel) -> Any:
    """Return the tokenizer of a folder, a GGUF file or a model of the hub, for a target.

    Raises:
        ModelError: There is no such tokenizer, or it has more tokens than the target.
    """
    tokenizer = named_tokenizer(name)
    if len(tokenizer) > target.vocab_size:
        raise ModelError(
            f"tokenizer: it has {len(tokenizer)} tokens and the model {target.vocab_size}; name the model's own"
        )
    return tokenizer


def usual_drafters(
    model: str | Path,
    folder: Path,
    device: torch.device,
    *,
    small_models: bool = True,
    copy: str | None = None,
    is_whole: bool = True,
) -> DrafterChoice:
    """Return the drafters of a target for which none are chosen.

    Args:
        folder: Folder of the target.
        device: The target's device.
        small_models: Whether a model that this machine happens to have, or can download, may be among them.
        copy: A copy of the target in fewer bits that should pay, which drafts where no small model may, or None.
        is_whole: Whether the target is in one process, whose drafters may read its cache.
    """
    choice = _usual_drafters(model, folder, small_models=small_models, copy=copy, is_whole=is_whole)
    if device.type != "cuda" or copy is not None or not is_whole:
        return choice
    # Lookups need to know all tokens, so with them no step begins on a GPU before the last one has been read.
    models = tuple(name for name in choice.names if is_model(name))
    return choice._replace(names=models or choice.names)


def _usual_drafters(
    model: str | Path, folder: Path, *, small_models: bool, copy: str | None, is_whole: bool
) -> DrafterChoice:
    if str(model) == CHAT:
        return DrafterChoice((CHAT, LOOKUP_WITH_MODEL), "its own drafter")
    if str(model) == CODE:
        return DrafterChoice((CODE,), "its own drafter")
    uses_heads = shows_hidden_states(load_config(folder))
    if uses_heads and has_mtp(folder):
        return auto_drafters(model, has_mtp=True)
    if small_models:
        kinds = (SUPPORTED_HEADS if is_whole else SUPPORTED_HEADS - {ASSISTANT}) if uses_heads else ()
        return auto_drafters(model, heads=kinds)
    if copy is not None:
        return DrafterChoice((copy, LOOKUP_WITH_MODEL), "this copy should gain most within the memory budget")
    return DrafterChoice((LOOKUP,), "models are not chosen for streamed targets and for several machines")
