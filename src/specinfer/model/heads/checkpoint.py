"""The files of a head: its configuration and its tensors, each checked before it is used."""

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.hub.files import PICKLE, read_object, verifier_of
from specinfer.model.offload.checkpoint import is_finite

_LAYERS = ("llama", "qwen2", "qwen3")  # families of heads' own layers
_UNREAD = ("rotary_emb.inv_freq", "t2d")  # computed, or for trainers only


class TensorSource(Protocol):
    """A tensor that is not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Tensor: ...


class HeadCheckpoint:
    """The configuration and the tensors of a head's folder, which are taken by name.

    Args:
        dtype: Type that taken weights are converted to.
        device: Device that they are moved to.
        tensors: The tensors by name, or None for all in the folder.

    Attributes:
        fields: Its config.json.

    Raises:
        ModelError: A file is missing or damaged.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        tensors: Mapping[str, TensorSource] | None = None,
    ) -> None:
        fields = read_object(folder / "config.json")
        if fields is None:
            raise ModelError(f"drafters: config.json of {folder} is missing or damaged; fetch the drafter again")
        self.folder, self.fields = folder, fields
        self.tensors: Mapping[str, Tensor | TensorSource] = _read_tensors(folder) if tensors is None else tensors
        self._taken = set[str]()
        self.dtype, self._device = dtype, device

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of this shape, in which None stands for any size.

        Args:
            dtype: Type of a weight, or None for that of the head.

        Raises:
            ModelError: There is no such tensor, its shape is another, or it has NaN or infinity.
        """
        found = self.tensors.get(name)
        if found is None:
            raise ModelError(f"drafters: {self.folder} has no tensor {name}; fetch the drafter again")
        if len(shape) != len(found.shape) or any(
            size not in (None, real) for size, real in zip(shape, found.shape, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ModelError(
                f"drafters: tensor {name} of {self.folder} has shape {list(found.shape)}, and [{wanted}] fits this "
                "target; take a drafter that was trained for it"
            )
        tensor = found if isinstance(found, Tensor) else found.read()
        if tensor.is_floating_point() and not is_finite(tensor):
            raise ModelError(f"drafters: tensor {name} of {self.folder} has NaN or infinity; fetch the drafter again")
        self._taken.add(name)
        return tensor.to(self._device, (dtype or self.dtype) if tensor.is_floating_point() else None)

    def get(self, name: str, *shape: int | None) -> Tensor | None:
        """Return a tensor as `take` does, or None if there is none of this name."""
        return self.take(name, *shape) if name in self else None

    def fill(self, module: nn.Module, prefix: str, precise: re.Pattern[str] | None = None) -> None:
        """Take every tensor of a module by its name after this prefix; those with `precise` names are float32."""
        for name, tensor in module.state_dict(keep_vars=True).items():
            is_precise = precise is not None and precise.fullmatch(name)
            weight = self.take(f"{prefix}{name}", *tensor.shape, dtype=torch.float32 if is_precise else None)
            parent, _, child = name.rpartition(".")
            if isinstance(tensor, nn.Parameter):
                weight = nn.Parameter(weight, requires_grad=False)
            setattr(module.get_submodule(parent), child, weight)

    def number(self, name: str, least: int, most: int, fields: Mapping[str, Any] | None = None) -> int:
        """Return an integer of the configuration, or of other fields.

        Raises:
            ModelError: It is missing, or outside of these bounds.
        """
        value = (self.fields if fields is None else fields).get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ModelError(
                f"drafters: {name} in config.json of {self.folder} is {value!r}, not a number from {least} to {most}"
            )
        return value

    @property
    def is_speculators(self) -> bool:
        """True for the format of the speculators library."""
        return "speculators_model_type" in self.fields

    def layer_fields(self) -> dict[str, Any]:
        """Return the fields of a configuration of transformers for the head's layers.

        Raises:
            ModelError: There are none, or their family is not supported.
        """
        own = self.fields.get("transformer_layer_config") if self.is_speculators else self.fields
        if not isinstance(own, Mapping):
            raise ModelError(f"drafters: config.json of {self.folder} has no transformer_layer_config")
        family = own.get("model_type", "llama")
        if family not in _LAYERS:
            raise ModelError(
                f"drafters: {self.folder} has layers of family {family!r}; {', '.join(_LAYERS)} are supported"
            )
        fields = {name: value for name, value in own.items() if name not in ("architectures", "torch_dtype", "dtype")}
        return fields | {"model_type": family, "num_hidden_layers": int(own.get("num_hidden_layers") or 1)}

    def token_map(self, vocab_size: int) -> Tensor | None:
        """Return the [draft vocabulary] target ids that the head's logits are of, or None for all of them.

        Raises:
            ModelError: `d2t` leads to tokens that the target does not have.
        """
        if "d2t" not in self:
            return None
        self.get("t2d", vocab_size)  # read by trainers only; its size is that of the target's vocabulary
        offsets = self.take("d2t", None).long()
        ids = offsets + torch.arange(len(offsets), device=offsets.device)
        if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) < len(ids):
            raise ModelError(
                f"drafters: tensor d2t of {self.folder} leads to tokens that the target's vocabulary of {vocab_size} "
                "does not have, or twice to one; take a drafter that was trained for this target"
            )
        return ids

    def wrong_layers(self, reads: Sequence[int], num_layers: int) -> ModelError:
        """Return the error of a head that reads hidden states after layers that its target does not have."""
        return ModelError(
            f"drafters: {self.folder} reads hidden states after layers {', '.join(map(str, reads))}, and the target "
            f"has {num_layers} layers; take a drafter that was trained for this target"
        )

    def check_all_taken(self) -> None:
        """Raise a `ModelError` if a tensor was not taken: the head would not compute what it was trained for."""
        rest = sorted(name for name in self.tensors if name not in self._taken and not name.endswith(_UNREAD))
        if rest:
            raise ModelError(
                f"drafters: {len(rest)} tensors of {self.folder} are not known, {rest[0]} among them; this kind of "
                "drafter is not supported"
            )


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder, without reading them; none if a file is damaged."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        if not files:
            return set(_read_tensors(folder, is_mapped=True))
        names = set()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                names |= set(opened.keys())
        return names
    except (ModelError, SafetensorError, OSError):
        return set()


def _read_tensors(folder: Path, *, is_mapped: bool = False) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    pickle = folder / PICKLE
    try:
        if files:
            return {name: tensor for file in files for name, tensor in load_file(file).items()}
        if pickle.is_file():
            is_archive = zipfile.is_zipfile(pickle)  # files of old releases cannot be mapped
            loaded = torch.load(pickle, map_location="cpu", weights_only=True, mmap=is_mapped and is_archive)
            if isinstance(loaded, dict) and all(isinstance(one, Tensor) for one in loaded.values()):
                return loaded
            raise ModelError(f"drafters: {pickle} has something other than tensors; fetch the drafter again")
    except ModelError:
        raise
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise ModelError(f"drafters: the weights in {folder} are damaged; fetch the drafter again") from error
    except Exception as error:  # unpickling raises many types
        raise ModelError(
            f"drafters: {pickle} has more than tensors, and code of a checkpoint is never run; convert it to "
            "safetensors"
        ) from error
    raise ModelError(f"drafters: {folder} has neither model.safetensors nor {PICKLE}; fetch the drafter again")


_TASK = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")  # targets with and without a vision tower are one family


def check_stated_target(checkpoint: HeadCheckpoint, config: Any) -> None:
    """Check the sizes and the architecture that a head's configuration states against its target's configuration.

    Raises:
        ModelError: The head was trained for another target.
    """
    fields, text = checkpoint.fields, config.get_text_config()
    for name, own in (("target_hidden_size", text.hidden_size), ("num_target_layers", text.num_hidden_layers)):
        if fields.get(name) not in (None, own):
            raise _other_target(checkpoint, name, fields[name], own)
    wanted, own = verifier_of(fields).get("architectures") or (), config.architectures or ()
    if wanted and own and not _has_common_family(wanted, own):
        raise _other_target(checkpoint, "verifier.architectures", ", ".join(map(str, wanted)), ", ".join(own))


def _has_common_family(wanted: Iterable[object], own: Iterable[object]) -> bool:
    """Return whether two are one family, perhaps with and without a vision tower: Mistral3 and Mistral."""
    pairs = product(map(_family, wanted), map(_family, own))
    return any(one.startswith(other) or other.startswith(one) for one, other in pairs)


def _family(architecture: object) -> str:
    return _TASK.sub("", str(architecture))


def _other_target(checkpoint: HeadCheckpoint, name: str, stated: object, own: object) -> ModelError:
    return ModelError(
        f"drafters: {name} in config.json of {checkpoint.folder} is {stated}, and the target's is {own}; take a "
        "drafter that was trained for this target"
    )
