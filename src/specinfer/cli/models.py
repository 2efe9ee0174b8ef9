"""The commands for models on this machine: pull, list and rm."""

import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from specinfer.cli.errors import checking
from specinfer.cli.loading import loading_bar
from specinfer.cli.options import flag
from specinfer.cli.screen import Screen
from specinfer.core.errors import ModelError
from specinfer.core.lookups import MTP
from specinfer.demo.chat_model import CHAT, CODE, DRAFTERS, EMBEDDED, INSTALL, PACKED_HEADS, find_chat_model
from specinfer.hub.files import head_format, read_object
from specinfer.hub.known_drafters import did_you_mean, known_drafters, known_names
from specinfer.hub.locate import at_revision, hub_name, is_on_hub

_DAY = 24 * 3600


def pull(
    model: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="Hugging Face model ID; ID:Q4_K_M for a GGUF file; ID@REVISION."),
    ],
    *,
    revision: Annotated[
        str | None, flag("Model", "Branch, tag or commit of the models, as in MODEL@REVISION.", "--revision")
    ] = None,
) -> None:
    """Download models from the Hugging Face Hub into its cache, or update them, and compare their checksums."""
    screen = Screen()
    for each in model:
        name = hub_name(each)
        if each in EMBEDDED:
            raise ModelError(f"model: {each} is part of the package; there is nothing to download")
        if name is None or not is_on_hub(each):
            raise ModelError(f"model: {each!r} is not the name of a model on the hub, such as Qwen/Qwen3-0.6B")
        from specinfer.hub.cache import damaged_files
        from specinfer.hub.store import download

        with checking():
            if revision is not None:
                name = hub_name(at_revision("revision", each, revision)) or name
            with loading_bar(screen.err, f"pulling {each} ...") as progress:
                path = download(*name, progress=progress)
        if damaged := damaged_files(path):
            raise ModelError(f"model: {each} is damaged: {', '.join(damaged)}; remove it with specinfer rm, pull again")
        files = [path] if path.is_file() else list(path.iterdir())
        screen.note(f"{each}: {_size(sum(file.stat().st_size for file in files))} in {path}")


def list_models(
    *,
    drafters: Annotated[
        str | None, flag("Output", "List the drafters known for this target instead.", "--drafters", metavar="MODEL")
    ] = None,
    verify: Annotated[
        bool, flag("Output", "Read all files in the cache and compare them with the checksums of the Hub.", "--verify")
    ] = False,
) -> None:
    """List the models in the cache of the Hugging Face Hub, and the embedded ones."""
    screen = Screen()
    rows = _models(verify=verify) if drafters is None else _drafters(drafters)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NAME", "FORMAT", "SIZE", "MODIFIED", "STATE") if drafters is None else ("NAME", "KIND", "STATE"):
        table.add_column(title, overflow="fold", justify="right" if title == "SIZE" else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    screen.out.print(table, soft_wrap=False)
    if verify and any("damaged: " in row[-1] for row in rows):
        raise typer.Exit(1)


def rm(
    model: Annotated[list[str], typer.Argument(metavar="MODEL", help="Model in the cache, as list shows it.")],
) -> None:
    """Remove models from the cache of the Hugging Face Hub."""
    screen = Screen()
    for name in model:
        if name in EMBEDDED:
            raise ModelError(f"model: {name} is part of the package; only models in the cache can be removed")
        from specinfer.hub.store import remove

        screen.note(f"{name}: removed, {_size(remove(name))} freed")


def _models(*, verify: bool) -> list[tuple[str, ...]]:
    from specinfer.hub.store import cached_models

    chat = find_chat_model()
    rows: list[tuple[str, ...]] = [(CODE, "embedded", "", "", _embedded_state() if verify else "can be loaded")]
    if chat is None:
        rows.append((CHAT, "GGUF", "", "", f"not installed; {INSTALL}"))
    else:
        rows.append((CHAT, "GGUF", _size(chat.stat().st_size), _age(chat.stat().st_mtime), "can be loaded"))
    for model in cached_models(verify=verify):
        state = "can be loaded" if model.refusal is None else f"cannot be loaded: {model.refusal}"
        rows.append((model.name, model.format, _size(model.num_bytes), _age(model.modified), state))
    return rows


def _embedded_state() -> str:
    from specinfer.demo.pair import verify_all

    try:
        verify_all()
    except ModelError as error:
        return f"cannot be loaded: damaged: {error}"
    return "can be loaded"


def _embedded_kind(name: str) -> str:
    return head_format(read_object(PACKED_HEADS / name / "config.json") or {}) or "small model"


def _drafters(model: str) -> list[tuple[str, ...]]:
    if model in (CODE, CHAT):
        return [(name, _embedded_kind(name), "embedded") for name in DRAFTERS[model]]
    known = known_drafters(model)
    if not known:
        raise ModelError(
            f"drafters: none are known for {model}{did_you_mean(model, known_names())}; any small model can draft, and "
            "suffix needs none"
        )
    from specinfer.hub.cache import find_cached

    rows: list[tuple[str, ...]] = []
    for drafter in known:
        state = "in the cache" if find_cached(drafter.name) is not None else "can be pulled"
        size = "" if drafter.parameters is None else f", {drafter.parameters:g} B"
        state = state if drafter.is_supported else "not supported yet"
        is_own = drafter.name == model
        name, kind = (MTP, f"{drafter.kind} layers of the target") if is_own else (drafter.name, drafter.kind)
        rows.append((name, kind + size, state))
    return [*rows, ("suffix", "lookup", "built in"), ("ngram", "lookup", "built in")]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _age(modified: float) -> str:
    days = int((time.time() - modified) / _DAY)
    return "today" if days < 1 else "1 day ago" if days == 1 else f"{days} days ago"
