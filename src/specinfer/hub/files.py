"""Files of a model, by their names and the content of config.json: which are needed, and why they cannot be read."""

import json
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
TEMPLATE_FOLDER = "additional_chat_templates"  # those with a name, such as the one for conversations with tools
NOT_NEEDED = ("*/*", "consolidated*")  # usually the same weights in other formats
GGUF_LINK = "specinfer-weights.gguf"  # in a folder that was made of a GGUF file; a name that no other tool uses
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PARTIAL = (".part", ".partial", ".incomplete", ".crdownload", ".download", ".aria2", ".tmp")  # unfinished downloads
_GGUF_TYPES = ("q4_k_m", "q8_0", "q4_0", "")  # the preferred ones
_GGUF_PART = re.compile(r"^(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
# Of most of their variants; see `model.quantized.formats`.
READ_METHODS = frozenset({"compressed-tensors", "gptq", "awq", "auto-round", "fp8", "bitsandbytes", "mxfp4"})
_METHODS = {"awq": "AWQ", "gptq": "GPTQ", "fp8": "FP8", "bitsandbytes": "bitsandbytes", "mxfp4": "MXFP4"}
ASSISTANT, MTP_LAYER = "Gemma 4 assistant", "MTP"


class HeadKind(NamedTuple):
    """A format of drafters that read hidden states of their target.

    Attributes:
        words: Parts of the architecture or the model type in its configurations.
        path: Its class, or the function that loads it, as "module:name", imported when it is loaded. None if this
            format is known, but cannot be loaded.
    """

    words: tuple[str, ...]
    path: str | None

    def find(self) -> Any:
        """Return the class or the function."""
        assert self.path is not None
        module, name = self.path.split(":")
        return getattr(import_module(module), name)


# By the names of formats; the first one with a word of the configuration is taken.
HEADS = {
    ASSISTANT: HeadKind(
        ("gemma4_assistant", "gemma4_unified_assistant"), "specinfer.model.heads.assistant:AssistantHead"
    ),
    "EAGLE-3": HeadKind(("eagle3",), "specinfer.model.heads.eagle3:Eagle3Head"),
    "P-EAGLE": HeadKind(("peagle",), "specinfer.model.heads.eagle3:Eagle3Head"),
    "EAGLE": HeadKind(("eagle",), "specinfer.model.heads.pair:EagleHead"),
    "DSpark": HeadKind(("dspark",), "specinfer.model.heads.block:BlockHead"),
    "JetSpec": HeadKind(("jetspec",), "specinfer.model.heads.block:BlockHead"),
    "DFlash": HeadKind(("dflash",), "specinfer.model.heads.block:BlockHead"),
    MTP_LAYER: HeadKind((), "specinfer.model.heads.mtp:load_mtp"),  # in the files of its target
    "Medusa": HeadKind(("medusa",), None),
    "assistant": HeadKind(("assistant",), None),
}
SUPPORTED_HEADS = frozenset(name for name, head in HEADS.items() if head.path is not None)
PICKLE = "pytorch_model.bin"
_TEXT = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")


def needed_files(names: Iterable[str]) -> list[str]:
    """Return those files of a model that are downloaded and read."""
    needed = [name for name in names if _is_needed(Path(name))]
    others = [name for name in needed if not Path(name).match(NOT_NEEDED[1])]
    return others if any(name.endswith(".safetensors") for name in others) else needed


def _is_needed(path: Path) -> bool:
    if path.parent == Path(TEMPLATE_FOLDER):
        return path.suffix == ".jinja"
    return path.parent == Path() and any(map(path.match, NEEDED))


def choose_gguf(names: Iterable[str], wanted: str | None) -> str | None:
    """Return the GGUF file of a type such as Q4_K_M, or the usual one; None if there is none of that type.

    Of a file in several parts it is the first one.
    """
    files = sorted(name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower())
    for kind in _GGUF_TYPES if wanted is None else (wanted.lower().removesuffix(".gguf"),):
        for name in files:
            part = _GGUF_PART.match(name)
            whole = name.lower().removesuffix(".gguf") if part is None else part["name"].lower()
            if whole.endswith(kind):
                return name
    return None


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, by its suffix or its first bytes: those of a cache have other names."""
    if not path.is_file():
        return False
    return path.suffix.lower() == ".gguf" or _first_bytes(path).startswith(b"GGUF")


def fault_of(path: Path) -> str | None:
    """Return why a file does not have the content of its name, with the remedy, or None if nothing is known of it."""
    if _first_bytes(path) == _LFS_POINTER:
        return "is a Git LFS pointer, not the content; run git lfs pull, or fetch the file"
    if path.suffix.lower() in _PARTIAL:
        return "is an unfinished download; finish it, or fetch the file again"
    return None


def _first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, or none if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_POINTER))
    except OSError:
        return b""


def only_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no other weights and no other such file, or None."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    models = {gguf_parts(name)[0] for name in names if choose_gguf([name], "") is not None}
    if len(models) != 1 or GGUF_LINK in models or any(name.endswith(".safetensors") for name in names):
        return None
    file = folder / models.pop()
    return file if file.is_file() else None


def gguf_parts(name: str) -> list[str]:
    """Return the names of all parts of a GGUF file, given that of one; of a whole file only its own."""
    part = _GGUF_PART.match(name)
    if part is None:
        return [name]
    return [f"{part['name']}-{i:05d}-of-{part['count']}.gguf" for i in range(1, int(part["count"]) + 1)]


def refusal(names: Iterable[str], config: Mapping[str, Any] | None, adapter: Mapping[str, Any] | None) -> str | None:
    """Return why a model with these files cannot be loaded, with the remedy, or None if nothing is known against it.

    Args:
        config: Content of config.json, or None without one.
        adapter: Content of adapter_config.json, or None without one.
    """
    files = list(names)
    if adapter is not None and config is None:
        base = adapter.get("base_model_name_or_path") or "its base model"
        return f"it is an adapter (LoRA) of {base}; merge both with peft's merge_and_unload, and name the merged folder"
    if config is None:
        if file := choose_gguf(files, None):
            return f"it has no config.json, but GGUF files; name one of them, such as {file}"
        if "config.json" in files:
            return "config.json is damaged; fetch the model again"
        return _unfinished(files) or "it has no config.json; it is not a Hugging Face model folder"
    settings = quantization_settings(config)
    if settings is not None and str(settings.get("quant_method")) not in READ_METHODS:
        return already_quantized(settings)
    architectures = _architectures(config)
    if (head := head_format(config)) is not None:
        if head not in SUPPORTED_HEADS:
            return f"it is a drafter that reads hidden states of its target ({head}); these are not supported yet"
        has_weights = any(name.endswith(".safetensors") or name == PICKLE for name in files)
        return None if has_weights else f"it has neither model.safetensors nor {PICKLE}"
    if config.get("is_encoder_decoder") or (architectures and not any(map(_generates, architectures))):
        kind = ", ".join(architectures) or str(config.get("model_type"))
        return f"it is not a decoder that generates text ({kind:.200})"
    if may_be_eagle(config) and PICKLE in files:
        return None
    if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in files):
        if (unfinished := _unfinished(files)) is not None:
            return unfinished
        others = sorted(name for name in files if name.endswith((".bin", ".pt")))
        why = f"only {', '.join(others)}, which can run code when read" if others else "no weights"
        return f"it has {why}; convert or fetch the model as safetensors"
    return None


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _unfinished(names: Iterable[str]) -> str | None:
    file = next((name for name in sorted(names) if name.endswith(_PARTIAL)), None)
    return None if file is None else f"{file} is an unfinished download; finish it, or fetch the model again"


def head_format(config: Mapping[str, Any]) -> str | None:
    """Return the format of a drafter that reads hidden states of its target, or None for any other model."""
    if "draft_vocab_size" in config and "speculators_model_type" not in config:
        return "EAGLE-3"
    names = [*_architectures(config), config.get("speculators_model_type"), config.get("model_type")]
    kind = " ".join(map(str, names)).lower()
    return next((name for name, head in HEADS.items() if any(word in kind for word in head.words)), None)


def verifier_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the configuration of a head in the format of speculators states about its target."""
    settings = config.get("speculators_config")
    verifier = settings.get("verifier") if isinstance(settings, Mapping) else None
    return verifier if isinstance(verifier, Mapping) else {}


def stated_target(config: Mapping[str, Any]) -> str | None:
    """Return the name of the target that a head's configuration states, or None."""
    name = verifier_of(config).get("name_or_path") or config.get("base_model_name_or_path")
    return name if isinstance(name, str) else None


def may_be_eagle(config: Mapping[str, Any]) -> bool:
    """Return whether this may be an EAGLE head, whose configuration is that of a model of one layer."""
    return config.get("num_hidden_layers") == 1 and head_format(config) is None


def already_quantized(settings: Mapping[str, Any], field: str | None = None) -> str:
    """Return why a checkpoint with this quantization_config is refused; `field` is the part that is not read."""
    method = str(settings.get("quant_method") or settings.get("quant_algo") or "method not named")[:60]
    where = f" ({field})" if field else ""
    return (
        f"its weights are quantized already ({_METHODS.get(method, method)}) in a way that is not read{where}; use the "
        'original one with quantization="int4" or "int8", or a GGUF file'
    )


def folder_refusal(folder: Path) -> str | None:
    """Return why the model of a folder cannot be loaded, or None if nothing is known against it."""
    read = {name: read_object(folder / name) for name in ("config.json", "adapter_config.json")}
    names = [path.name for path in folder.iterdir()]
    if GGUF_LINK in names:  # made of a GGUF file
        return None
    return refusal(names, read["config.json"], read["adapter_config.json"])


TUNING_FILE = "tuning.json"  # in the folder of a tuned drafter: what it gained


def tuning_gain(folder: Path) -> float | None:
    """Return a tuned drafter's tokens per pass over those before its training, or None if they are not known."""
    gain = (read_object(folder / TUNING_FILE) or {}).get("gain")
    return gain if isinstance(gain, float) else None


def read_object(file: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or None if it is missing or no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def check_gguf_name(name: str) -> str | None:
    """Return why a GGUF file is refused by its name, or None."""
    first = gguf_parts(name)[:1] or [name]
    return None if name == first[0] else f"it is one of several parts; name the first one, {first[0]}"


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization_config of a config.json, or None for a model that is not quantized."""
    for part in (config, config.get("text_config")):
        settings = part.get("quantization_config") if isinstance(part, Mapping) else None
        if isinstance(settings, Mapping):
            return settings
    return None


def _generates(architecture: str) -> bool:
    return any(word in architecture for word in _TEXT)
