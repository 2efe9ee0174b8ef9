"""Options of `specinfer quantize`. Nothing here needs torch."""

from dataclasses import dataclass
from pathlib import Path

from specinfer.core.options import check_settings, setting
from specinfer.model.gguf.types import TYPES
from specinfer.reporting.files import check_files

FOLDER_TYPES = ("int4", "int8")
_OUTPUT, _CALIBRATION = "Output", "Calibration"  # sections of the help


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """Options of `specinfer quantize`.

    Attributes:
        model: A folder of safetensors, or a model of the hub.
        out: Folder to write, which must not exist or be empty, or the GGUF file, which must not exist.
        json: File to write the report to.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str = ""
    to: str = setting(
        "int4",
        _OUTPUT,
        f"Type of the weights of linear layers: int4 or int8; of a GGUF file: {', '.join(TYPES)}.",
        choices=(*FOLDER_TYPES, *TYPES),
    )
    out: str | Path | None = setting(None, _OUTPUT, "Folder or GGUF file to write.", metavar="PATH")
    data: tuple[str, ...] = setting(
        (),
        _CALIBRATION,
        "Text files, JSON lines of prompts or chats, or folders of these. Weights are rounded to fit nine tenths "
        "of them (GPTQ), and perplexity is measured on the others. May be repeated. (default: round to nearest)",
        metavar="FILE",
    )
    num_texts: int = setting(64, _CALIBRATION, "Number of calibration texts.", low=1)
    text_tokens: int = setting(512, _CALIBRATION, "Length of a text in tokens.", low=8)
    json: str | Path | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.out is None:
            return
        out = Path(self.out)
        if self.is_gguf != (out.suffix.lower() == ".gguf"):
            wanted = "a file that ends in .gguf" if self.is_gguf else "a folder"
            raise ValueError(f"out: {out}: {self.to} is written to {wanted}; name one")
        if self.is_gguf and self.data:
            raise ValueError(f"data: weights are not calibrated for {self.to}; leave data out, or use --to int4")
        if self.is_gguf and out.exists():
            raise ValueError(f"out: {out} exists; name a new file")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"out: {out} is not empty; name a new folder")
        check_files(self.json, None)

    @property
    def is_gguf(self) -> bool:
        return self.to in TYPES

    @property
    def path(self) -> Path:
        """The folder or file to write, which must have been named."""
        assert self.out is not None
        return Path(self.out)
