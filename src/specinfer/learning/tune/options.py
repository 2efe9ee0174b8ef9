"""Options of tuning runs. Nothing here needs torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specinfer.core.config import DTYPES, DType
from specinfer.core.errors import check_float
from specinfer.core.options import check_settings, setting
from specinfer.core.sampling import MAX_SEED
from specinfer.demo import corpus

DEMO_DATA = "demo"  # the embedded pair's own text: its training files and its held-out files
SCHEMES = ("tokens", "prompts", "none")
MAX_DRAFTERS = 16
_DATA, _DRAFTERS, _OUTPUT, _TRAINING = "Data", "Drafters", "Output", "Training"  # sections of the help


def _numbers(words: Sequence[str]) -> tuple[float, ...]:
    try:
        return tuple(map(float, words))
    except ValueError as error:
        raise ValueError(f"temperature: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """One run of collective boost-tuning.

    Raises:
        ValueError: A field cannot be used; the message names it.
    """

    target: str = ""
    drafters: tuple[str, ...] = setting(
        (),
        _DRAFTERS,
        "Initial weights of a drafter: a folder, a Hugging Face model ID, demo, layers:N (N layers of the target), "
        "new:N or new:NxHIDDEN (random), new:hybrid or new:hybrid:LAYERSxWIDTH (random, mostly recurrences), "
        "new:eagle3, new:dspark or new:dspark:LAYERSxWIDTH (a head on hidden states). May be "
        "repeated; each drafter learns what the earlier ones do not predict.",
        name="drafter",
        metavar="START",
    )
    data: tuple[str, ...] = setting(
        (),
        _DATA,
        "Text files, JSON lines of prompts or chats, server traces, or folders of these; demo is the training data "
        "of the embedded models. May be repeated.",
        metavar="FILE",
    )
    held_out: tuple[str, ...] = setting(
        (), _DATA, "Evaluation data, in the same formats. (default: a tenth of --data)", metavar="FILE"
    )
    out: str | None = setting(None, _OUTPUT, "Output folder; an existing run is resumed.", metavar="FOLDER")
    beside: tuple[str, ...] = setting(
        (), _DRAFTERS, "Drafter that is not trained; the others learn what it does not predict.", metavar="NAME"
    )
    boosting: str = setting(
        "tokens",
        _DRAFTERS,
        "What later drafters learn: tokens or prompts (as in the paper) that earlier ones miss, or none.",
        choices=SCHEMES,
    )
    control: bool = setting(False, _DRAFTERS, "Also train the same drafters independently, for comparison.")
    num_prompts: int = setting(2048, _DATA, "Number of prompts that the target completes.", low=2, high=10**8)
    num_held_out: int = setting(128, _DATA, "Number of prompts for evaluation.", low=1, high=10**6)
    prompt_tokens: int = setting(64, _DATA, "Length of prompts cut from plain text, in tokens.", low=1, high=10**6)
    max_tokens: int = setting(192, _DATA, "Maximum number of tokens to generate for each prompt.", low=2, high=10**6)
    num_texts: int = setting(
        4096, _DATA, "Number of passages of plain text to train on in addition.", low=0, high=10**8
    )
    temperatures: tuple[float, ...] = setting(
        (0.0, 1.0),
        _DATA,
        "Temperature of the completions, for each prompt in turn. May be repeated. (default: 0 and 1)",
        name="temperature",
        metavar="<float>",
        repeats=True,
        read=_numbers,
    )
    epochs: float = setting(
        2.5, _TRAINING, "Number of passes over the training examples.", low=0, high=1e4, low_open=True
    )
    batch_tokens: int = setting(4096, _TRAINING, "Number of tokens in an optimizer step.", low=1, high=10**8)
    learning_rate: float | None = setting(
        None,
        _TRAINING,
        "Peak learning rate. (default: by the size of the drafter)",
        low=0,
        high=1,
        low_open=True,
    )
    token_map: int | None = setting(
        None,
        _DRAFTERS,
        "Restrict the output head to the N most frequent tokens (FR-Spec).",
        metavar="N",
        low=16,
        high=10**7,
    )
    freeze_embeddings: bool = setting(False, _TRAINING, "Do not train the embeddings, nor an output head tied to them.")
    depth: int = setting(8, _TRAINING, "Depth of the chains that the drafters should predict together.", low=1, high=64)
    top: int = setting(
        32,
        _DATA,
        "Number of most probable tokens stored of each distribution of the target.",
        low=1,
        high=1024,
    )
    # Drafters and held-out text use the seeds after it.
    seed: int = setting(
        0,
        _TRAINING,
        "Random seed of the order of the data and of sampled text.",
        low=0,
        high=MAX_SEED - MAX_DRAFTERS,
    )
    dtype: DType = setting("auto", _TRAINING, "Data type of the target: {choices}.", choices=DTYPES)
    device: str = setting("auto", _TRAINING, "Device: auto, cpu, cuda, ...")
    mixed_precision: str = setting("auto", _TRAINING, "Mixed precision: {choices}.", choices=("auto", "no", "bf16"))
    save_every: float = setting(30.0, _TRAINING, "Time between checkpoints, in seconds.", low=0, high=1e6)
    tensorboard: bool = setting(True, _OUTPUT, "Log curves to FOLDER/tensorboard.")
    json: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.temperatures:
            raise ValueError("temperature: none given; 0 is greedy")
        for temperature in self.temperatures:
            check_float("temperature", temperature, 0.0, 2.0)

    def check_complete(self) -> None:
        """Check that the options name all that a run needs.

        Raises:
            ValueError: Something is missing; the message names it.
        """
        if self.out is None:
            raise ValueError("out: name a folder with --out; drafters, examples and checkpoints go there")
        number = len(self.drafters) + len(self.beside)
        if not self.drafters or number > MAX_DRAFTERS:
            raise ValueError(f"drafter: {number} given; name one that is to be tuned, and {MAX_DRAFTERS} at most")
        if not self.data:
            raise ValueError("data: none given; name text files, JSON lines of prompts, or folders of them")
        if DEMO_DATA in self.data and (len(self.data) > 1 or self.held_out):
            raise ValueError(f'data: "{DEMO_DATA}" brings its own held-out files; give it alone')

    @property
    def text_tokens(self) -> int:
        """The number of tokens in a text that is read: as long as a prompt and its output."""
        return self.prompt_tokens + self.max_tokens


def data_files(data: Sequence[str | Path], held_out: Sequence[str | Path] = ()) -> tuple[list[Path], list[Path]]:
    """Return the training files and the held-out files that options name."""
    if tuple(data) == (DEMO_DATA,):
        return corpus.training_files(), corpus.heldout_files()
    return [Path(name) for name in data], [Path(name) for name in held_out]
