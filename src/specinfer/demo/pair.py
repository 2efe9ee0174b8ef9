"""The embedded weights: a byte or half a byte per weight in the package, ordinary Hugging Face folders in use.

Each matrix is stored as int8 rows with one scale per row, or as 4-bit codes (`kernels/quantization.py`), next to a list
of checksums. The weights are unpacked once into the user's cache, under a name taken from the checksums, so that a new
pair never uses an old cache. Drafters of the chat model take their embeddings from its GGUF file.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.core.files import cache_folder
from specinfer.demo import chat_model
from specinfer.demo.chat_model import OTHERS, PACKED_HEADS
from specinfer.ops.quantization import dequantize
from specinfer.ops.quantized_weight import QuantizedWeight

PACKED = Path(__file__).parent  # holds target/, drafter/, drafter-2/ and drafter-3/
CHECKSUMS = "checksums.json"
WEIGHTS = "model.safetensors"
ROW_SCALE = ".row_scale"  # after the name of a matrix stored as int8
GROUP_SCALES = ".group_scales"  # after the name of a matrix stored as 4-bit codes, two in a byte
_DIGESTS = "unpacked.json"  # checksums of an unpacked folder's files: a damaged one is unpacked again


class DemoFilesError(ModelError):
    """A file of the embedded pair is missing or damaged."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{path} is {fault}: reinstall specinfer")


@dataclass(frozen=True, slots=True)
class DemoPair:
    """Ordinary Hugging Face folders with one tokenizer.

    Attributes:
        others: Drafters that were tuned to predict what `drafter` does not, by their names: "demo-2", ...
    """

    target: Path
    drafter: Path
    others: Mapping[str, Path] = field(default_factory=dict)

    @property
    def drafters(self) -> dict[str, Path]:
        """All drafters, by `DRAFTER_NAMES`."""
        return {"demo": self.drafter, **self.others}


def unpack(
    packed: Path,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    others: Callable[[], Mapping[str, Tensor]] = dict,
) -> None:
    """Make an ordinary Hugging Face folder of a packed one; two processes may do so at once.

    Args:
        others: Returns the weights that are not in the packed folder, by name.
    """
    sums = verify(packed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        stored = load_file(packed / WEIGHTS)
        names = [name for name in stored if not name.endswith((ROW_SCALE, GROUP_SCALES))]
        tensors = {name: _restored(name, stored, dtype) for name in names} | {
            name: tensor.to(dtype) for name, tensor in others().items()
        }
        save(tensors, partial / WEIGHTS)
        for name in sums.keys() - {WEIGHTS, "config.json"}:
            shutil.copyfile(packed / name, partial / name)
        config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        digests = {name: digest(partial / name) for name in sums}
        (partial / _DIGESTS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
        _move_into_place(partial, folder, sums)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _restored(name: str, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    tensor = stored[name]
    if name + GROUP_SCALES in stored:
        return dequantize(QuantizedWeight(tensor, stored[name + GROUP_SCALES], 4, 2 * tensor.shape[1]), dtype)
    if name + ROW_SCALE in stored:
        return (tensor * stored[name + ROW_SCALE]).to(dtype)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def verify(packed: Path) -> dict[str, str]:
    """Return the checksums of a packed folder, after comparing each with its file."""
    listing = packed / CHECKSUMS
    if not listing.is_file():
        raise DemoFilesError(listing, "missing")
    try:
        sums: dict[str, str] = json.loads(listing.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DemoFilesError(listing, "damaged") from error
    for name, expected in sums.items():
        if not (packed / name).is_file():
            raise DemoFilesError(packed / name, "missing")
        if digest(packed / name) != expected:
            raise DemoFilesError(packed / name, "damaged")
    return sums


def demo_folders() -> DemoPair:
    """Return the pair as ordinary folders in the user's cache; the first call unpacks it."""
    sums = _verified_pair()
    root = f"demo-{digest_of(sums)}"
    folders = {name: unpacked(PACKED / name, f"{root}/{name}", sums[name]) for name in sums}
    others = {f"demo-{number}": folders[f"drafter-{number}"] for number in OTHERS}
    return DemoPair(target=folders["target"], drafter=folders["drafter"], others=others)


def is_demo_target(folder: Path) -> bool:
    """Return whether a folder is the target of `demo_folders`; nothing is unpacked."""
    return folder == cache_folder() / f"demo-{digest_of(_verified_pair())}" / "target"


def _verified_pair() -> dict[str, dict[str, str]]:
    names = ("target", "drafter", *(f"drafter-{number}" for number in OTHERS))
    return {name: verify(PACKED / name) for name in names}


def head_folder(name: str) -> Path:
    """Return an embedded head of the code target as an ordinary folder in the cache.

    Raises:
        ModelError: An embedded file is damaged, or the cache cannot be written.
    """
    sums = verify(PACKED_HEADS / name)
    return unpacked(PACKED_HEADS / name, f"demo-{digest_of(sums)}/{name}", sums)


def verify_all() -> None:
    """Compare all embedded files with their checksums.

    Raises:
        DemoFilesError: One is missing or damaged.
    """
    for listing in PACKED.rglob(CHECKSUMS):
        verify(listing.parent)


def digest_of(sums: Mapping[str, object]) -> str:
    """Return a short name for files with these checksums."""
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:12]


def unpacked(
    packed: Path,
    name: str,
    sums: dict[str, str],
    dtype: torch.dtype = torch.float32,
    others: Callable[[], Mapping[str, Tensor]] = dict,
) -> Path:
    """Return a folder of this name in the user's cache, and unpack it unless it is complete; see `unpack`.

    Raises:
        ModelError: The cache cannot be written.
    """
    cache = cache_folder()
    try:
        if not _is_complete(cache / name, sums):
            unpack(packed, cache / name, dtype, others)
    except OSError as error:
        raise ModelError(
            f"demo: {cache} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder that can"
        ) from error
    return cache / name


def save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_complete(folder: Path, sums: dict[str, str]) -> bool:
    try:
        digests = json.loads((folder / _DIGESTS).read_text(encoding="utf-8"))
        return all(digest(folder / name) == digests[name] for name in sums)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _move_into_place(partial: Path, folder: Path, sums: dict[str, str]) -> None:
    partial.chmod(0o755)  # mkdtemp makes it private
    try:
        partial.rename(folder)
    except OSError:  # something is there: another process was first, or an older incomplete folder
        if _is_complete(folder, sums):
            return
        wreck = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        folder.rename(wreck / folder.name)
        partial.rename(folder)
        shutil.rmtree(wreck, ignore_errors=True)


EMBEDDING, OUTPUT_HEAD = "model.embed_tokens.weight", "lm_head.weight"
CHAT_DRAFTER = PACKED / "chat-drafter"


def chat_drafter_folder() -> Path | None:
    """Return the embedded drafter of the chat model as an ordinary folder, or None without the chat model.

    The first call assembles it in the user's cache, with the chat model's embeddings.

    Raises:
        ModelError: An embedded file is damaged, or the cache cannot be written.
    """
    return _assembled(CHAT_DRAFTER, "demo-chat-{}", lambda table: {EMBEDDING: table})


def chat_head_folder(name: str) -> Path | None:
    """Return an embedded head of the chat model, one of `CHAT_HEADS`, as `chat_drafter_folder` does.

    Its output head is the rows of the chat model's own for the tokens that it drafts.
    """
    packed = PACKED_HEADS / name

    def output_head(table: Tensor) -> Mapping[str, Tensor]:
        offsets = load_file(packed / WEIGHTS)["d2t"]
        return {OUTPUT_HEAD: table[torch.arange(len(offsets)) + offsets]}

    return _assembled(packed, f"demo-{{}}/{name}", output_head)


def _assembled(packed: Path, place: str, others: Callable[[Tensor], Mapping[str, Tensor]]) -> Path | None:
    """Unpack a drafter, with the weights that `others` makes of the chat model's [vocab, hidden] embeddings.

    Args:
        place: Its folder in the cache, with braces for a digest of the files.
    """
    file = chat_model.find_chat_model()
    if file is None:
        return None
    sums = verify(packed)
    key = digest_of({**sums, "target": str(file.stat().st_size)})
    return unpacked(packed, place.format(key), sums, torch.bfloat16, lambda: others(_embedding(file)))


def _embedding(file: Path) -> Tensor:
    """Return the input embeddings of a GGUF file, [vocab, hidden] float32."""
    stored = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    return torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
