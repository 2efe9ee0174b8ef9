"""Options of tuning runs, and of the training of a speculation policy. Nothing here needs torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from specinfer.core.config import DTYPES, parse_drafters
from specinfer.core.errors import check_float, check_int
from specinfer.core.sampling import MAX_SEED
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.demo import corpus

DEMO_DATA = "demo"  # the embedded pair's own text: its training files and its held-out files
SCHEMES = ("tokens", "prompts", "none")
MAX_DRAFTERS = 16
_PRECISIONS = ("auto", "no", "bf16")
ARCHITECTURES: dict[str, tuple[int, ...]] = {"linear": (), "1x16": (16,), "2x32": (32, 32), "3x64": (64, 64, 64)}
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

    @property
    def training_files(self) -> list[Path]:
        return corpus.training_files() if self.data == (DEMO_DATA,) else [Path(name) for name in self.data]

    @property
    def held_out_files(self) -> list[Path]:
        return corpus.heldout_files() if self.data == (DEMO_DATA,) else [Path(name) for name in self.held_out]


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Training data and settings of a speculation policy.

    Attributes:
        target: A local folder, a hub name, or "demo".
        drafters: The drafters, as for `LLM`.
        data: Text files, JSON lines of prompts or chats, or folders of them, that prompts are cut from; or "demo" for
            the embedded pair's training text.
        logs: Step logs of a server, used instead of a collection run.
        out: The file to write.
        num_prompts: The number of prompts to collect steps from.
        num_held_out: The number of prompts to evaluate on.
        prompt_tokens: The length of a prompt that is cut from plain text.
        max_tokens: The number of tokens generated after each prompt.
        temperatures: The temperatures that prompts take in turn; 0 is greedy.
        nodes, depth: The limits of the large trees.
        num_steps: The number of training steps, for each architecture.
        architectures: The names to compare, from `network_training.ARCHITECTURES`; the best is written.
        pass_costs: (rows, seconds) of the target that the choices are evaluated for, or None to measure them. With it,
            `level_seconds` is the cost of a model's draft level.
        keep_log: A file for the steps that were collected.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    target: str = "demo"
    drafters: str | tuple[str, ...] = "auto"
    data: tuple[str | Path, ...] = ()
    logs: tuple[str | Path, ...] = ()
    out: str | Path = "speculation-policy.safetensors"
    num_prompts: int = 192
    num_held_out: int = 32
    prompt_tokens: int = 160
    max_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0, 1.0)
    nodes: int = 96
    depth: int = 48
    num_steps: int = 2000
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    pass_costs: tuple[tuple[int, float], ...] | None = None
    level_seconds: float = 1e-3
    keep_log: str | Path | None = None

    def __post_init__(self) -> None:
        limits = {"num_prompts": 4, "num_held_out": 2, "prompt_tokens": 8, "max_tokens": 8, "num_steps": 1}
        for name, least in limits.items():
            check_int(name, getattr(self, name), least)
        check_int("nodes", self.nodes, 8, MAX_TREE_NODES)
        check_int("depth", self.depth, 4, self.nodes)
        check_int("seed", self.seed, 0, MAX_SEED - 1)
        if bool(self.data) == bool(self.logs):
            raise ValueError("data: give files of text to collect steps from, or logs of a server, and not both")
        if not self.temperatures or not all(0 <= temperature <= 100 for temperature in self.temperatures):
            raise ValueError(f"temperatures: {self.temperatures!r} given; give at least one, such as 0 and 1")
        unknown = set(self.architectures) - set(ARCHITECTURES)
        if unknown or not self.architectures:
            raise ValueError(f"architectures must be some of {', '.join(ARCHITECTURES)}, not {self.architectures!r}")
        parse_drafters(self.drafters)
        if self.pass_costs is not None:
            rows = [size for size, _ in self.pass_costs]
            if not rows or rows != sorted(set(rows)) or any(size < 1 or time <= 0 for size, time in self.pass_costs):
                raise ValueError("pass_costs: give (rows, seconds) with rows from 1 on, ascending, and times above 0")
        out = Path(self.out)
        if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
            raise ValueError(f"out: {out} cannot be written; name a file in a folder that exists and is writable")
