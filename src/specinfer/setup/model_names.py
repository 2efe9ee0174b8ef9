"""Built-in model names that are not a folder, file or hub name: the code pair "demo" and the chat model "demo-chat"."""

from pathlib import Path

from specinfer.core.errors import ModelError
from specinfer.demo import chat_drafter, chat_model
from specinfer.demo.chat_model import CHAT, CODE, INSTALL
from specinfer.demo.pair import DRAFTER_NAMES, demo_folders
from specinfer.model.folder import find_folder

_MISSING = f"model: {CHAT} is not installed; {INSTALL}, or name another model"


def find_target(model: str | Path) -> Path:
    """Return the folder of a target.

    Raises:
        ModelError: There is no such model.
    """
    if str(model) == CODE:
        return demo_folders().target
    if str(model) != CHAT:
        return find_folder(model)
    file = chat_model.find_chat_model()
    if file is None:
        raise ModelError(_MISSING)
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
        raise ModelError(_MISSING)
    return folder


def usual_drafters(model: str | Path) -> tuple[str, ...]:
    """Return the names of the drafters of a target for which none are chosen."""
    if str(model) == CHAT:
        return (CHAT, "suffix")
    return (CODE,) if str(model) == CODE else ("ngram",)
