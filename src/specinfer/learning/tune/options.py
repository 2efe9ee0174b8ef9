"""Options of tuning runs. Nothing here needs torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specinfer.core.config import DTYPES
from specinfer.core.errors import check_float, check_int
from specinfer.core.sampling import MAX_SEED
from specinfer.demo import corpus

DEMO_DATA = "demo"  # the embedded pair's own text: its training files and its held-out files
SCHEMES = ("tokens", "prompts", "none")
MAX_DRAFTERS = 16
_PRECISIONS = ("auto", "no", "bf16")
TOP = 32  # tokens stored of a distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """One run of collective boost-tuning.

    Attributes:
        target: A folder, a hub name or "demo".
        drafters: The initial weights of each drafter: a folder or hub name, "layers:N" (layers of the target), "new:N"
            or "new:NxHIDDEN" (random), "new:hybrid" or "new:hybrid:LAYERSxWIDTH" (random, mostly recurrences),
            "new:eagle3", "new:dspark" or "new:dspark:LAYERSxWIDTH" (a head on hidden states), or "demo".
        beside: Drafters that are not tuned: the tuned ones learn what these do not predict.
        data: Text files, JSON lines of prompts or chats, traces of a server, or folders of them; or "demo".
        out: The folder of the run; an interrupted run resumes there.
        held_out: Files to measure on. If empty, a tenth of the data is used, which nothing is trained on.
        boosting: "tokens" (each is weighted by how far the drafters before do not cover it), "prompts" (as in the
            paper: prompts that one before predicts are left out), or "none".
        control: True to also tune the same drafters independently, for comparison.
        num_prompts: The number of prompts that the target continues.
        prompt_tokens: The length of a prompt that is cut from plain text.
        max_tokens: The number of tokens that the target generates after each prompt.
        num_texts: The number of parts of the plain texts that the target also reads, which is quicker than generating.
        temperatures: The temperatures that prompts take in turn; 0 is greedy.
        epochs: The number of times each example is trained on.
        learning_rate: The learning rate, or None to choose it by the drafter's size.
        token_map: The number of tokens, the most frequent ones, that drafters compute logits for, or None for all.
        freeze_embeddings: True to leave input embeddings, and an output head tied to them, as they are.
        depth: The length of the chains that are merged, used for boosting and for the report.
        top: The number of tokens stored of each of the target's distributions.
        dtype: The target's dtype while it generates the examples.
        mixed_precision: The precision of training; "auto" is bf16 where the hardware has it.
        save_every: Seconds between checkpoints.

    Raises:
        ValueError: A field cannot be used; the message names it.
    """

    target: str
    drafters: tuple[str, ...]
    data: tuple[str, ...]
    out: str
    held_out: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    boosting: str = "tokens"
    control: bool = False
    num_prompts: int = 2048
    num_held_out: int = 128
    prompt_tokens: int = 64
    max_tokens: int = 192
    num_texts: int = 4096
    temperatures: tuple[float, ...] = (0.0, 1.0)
    epochs: float = 2.5
    batch_tokens: int = 4096
    learning_rate: float | None = None
    token_map: int | None = None
    freeze_embeddings: bool = False
    depth: int = 8
    top: int = TOP
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    mixed_precision: str = "auto"
    save_every: float = 30.0
    tensorboard: bool = True
    json: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        number = len(self.drafters) + len(self.beside)
        if not self.drafters or number > MAX_DRAFTERS:
            raise ValueError(f"drafter: {number} given; name one that is to be tuned, and {MAX_DRAFTERS} at most")
        if not self.data:
            raise ValueError("data: none given; name text files, JSON lines of prompts, or folders of them")
        if DEMO_DATA in self.data and (len(self.data) > 1 or self.held_out):
            raise ValueError(f'data: "{DEMO_DATA}" brings its own held-out files; give it alone')
        if self.boosting not in SCHEMES:
            raise ValueError(f"boosting must be one of {', '.join(SCHEMES)}, not {self.boosting!r}")
        if self.mixed_precision not in _PRECISIONS:
            raise ValueError(f"mixed_precision must be one of {', '.join(_PRECISIONS)}, not {self.mixed_precision!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        for name, low, high in (
            ("num_prompts", 2, 10**8),
            ("num_held_out", 1, 10**6),
            ("num_texts", 0, 10**8),
            ("prompt_tokens", 1, 10**6),
            ("max_tokens", 2, 10**6),
            ("batch_tokens", 1, 10**8),
            ("depth", 1, 64),
            ("top", 1, 1024),
            ("seed", 0, MAX_SEED - MAX_DRAFTERS),  # drafters and held-out text use the seeds after it
        ):
            check_int(name, getattr(self, name), low, high)
        if self.token_map is not None:
            check_int("token_map", self.token_map, 16, 10**7)
        check_float("epochs", self.epochs, 0.0, 1e4, low_open=True)
        check_float("save_every", self.save_every, 0.0, 1e6)
        if self.learning_rate is not None:
            check_float("learning_rate", self.learning_rate, 0.0, 1.0, low_open=True)
        if not self.temperatures:
            raise ValueError("temperature: none given; 0 is greedy")
        for temperature in self.temperatures:
            check_float("temperature", temperature, 0.0, 2.0)

    @property
    def text_tokens(self) -> int:
        """The number of tokens in a text that is read: as long as a prompt and its output."""
        return self.prompt_tokens + self.max_tokens


def data_files(data: Sequence[str | Path], held_out: Sequence[str | Path] = ()) -> tuple[list[Path], list[Path]]:
    """Return the training files and the held-out files that options name."""
    if tuple(data) == (DEMO_DATA,):
        return corpus.training_files(), corpus.heldout_files()
    return [Path(name) for name in data], [Path(name) for name in held_out]
