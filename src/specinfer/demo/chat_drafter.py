"""The drafters of the chat model: their layers are embedded, their embeddings are those of its GGUF file."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from torch import Tensor

from specinfer.demo import chat_model
from specinfer.demo.chat_model import PACKED_HEADS
from specinfer.demo.pair import PACKED, WEIGHTS, digest_of, unpacked, verify

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
    stored = next(tensor for tensor in GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    return torch.from_numpy(dequantize(stored.data, stored.tensor_type))
