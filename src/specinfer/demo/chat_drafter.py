"""The drafter of the chat model: its layers are embedded, its embeddings are those in the chat model's GGUF file."""

from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from torch import Tensor

from specinfer.demo import chat_model
from specinfer.demo.pair import PACKED, digest_of, unpacked, verify

EMBEDDING = "model.embed_tokens.weight"
CHAT_DRAFTER = PACKED / "chat-drafter"


def chat_drafter_folder() -> Path | None:
    """Return the embedded drafter of the chat model as an ordinary folder, or None without the chat model.

    The drafter's layers are embedded, as int8; its embeddings are the chat model's own. The first call assembles it in
    the user's cache.

    Raises:
        ModelError: An embedded file is damaged, or the cache cannot be written.
    """
    file = chat_model.find_chat_model()
    if file is None:
        return None
    sums = verify(CHAT_DRAFTER)
    key = digest_of({**sums, "target": str(file.stat().st_size)})
    return unpacked(CHAT_DRAFTER, f"demo-chat-{key}", sums, torch.bfloat16, lambda: {EMBEDDING: _embedding(file)})


def _embedding(file: Path) -> Tensor:
    """Return the input embeddings of a GGUF file, [vocab, hidden] float32."""
    stored = next(tensor for tensor in GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    return torch.from_numpy(dequantize(stored.data, stored.tensor_type))
