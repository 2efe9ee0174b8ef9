"""A run of collective boost-tuning, from prompts to drafters: SpecInfer (arXiv 2305.09781), section 3.

Stages: the target generates the examples. Then drafter after drafter is tuned on them and marks what it predicts, and
the next learns what is left. Each finished stage is stored in the run's folder, and an interrupted stage resumes from
its last file or checkpoint. So a run that is started again ends as if it had never stopped.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from specinfer.bench.inputs import known_positions
from specinfer.learning.training_examples import TrainingExamples
from specinfer.llm import LLM
from specinfer.model.definition import load_config, load_tokenizer
from specinfer.model.device import find_device
from specinfer.model.folder import read_token_map
from specinfer.tuning.board import open_board
from specinfer.tuning.boosting import Marks, is_mastered, mark
from specinfer.tuning.collection import collect, load, read
from specinfer.tuning.corpus import Prompts, read_prompts
from specinfer.tuning.marks import load_marks, save_marks
from specinfer.tuning.plan import TuneConfig, check_room, open_run
from specinfer.tuning.starts import Start, build, export
from specinfer.tuning.training import (
    Progress,
    TrainingConfig,
    TrainingError,
    fit,
    learning_rate_for,
    reporting_disk_errors,
)

_COLLECTING = 64  # prompts continued at a time
_LONG = 7 * 24 * 3600  # seconds that one process may wait for another
_MARKING_ROWS = 16
_MARKING = 16 * _MARKING_ROWS  # examples between two progress notes


class Watcher(Protocol):
    """An observer of the progress of a run."""

    def stage(self, name: str, total: int) -> None:
        """Note that the next stage has begun, with a total of this many prompts or steps."""
        ...

    def advance(self, done: int, progress: Progress | None = None) -> None:
        """Note how much of the stage is done."""
        ...


@dataclass(frozen=True, slots=True)
class Tuned:
    """One drafter of a run.

    Attributes:
        name: "start-2", "beside-1", "drafter-2" or "control-2".
        held_out: Its marks on the held-out examples.
        seconds: Seconds of training; 0 if it was not tuned.
        tokens: The number of tokens trained on, including prompts.
    """

    name: str
    folder: Path | None
    held_out: list[Marks]
    parameters: int
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    loss: float = math.nan


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run."""

    target: Path
    folder: Path
    drafters: list[Tuned]
    controls: list[Tuned]
    starts: list[Tuned]
    beside: list[Tuned]
    held_out: TrainingExamples
    num_examples: int
    num_tokens: int  # output tokens of the target that are trained on
    num_left: list[int]  # number of examples that each drafter was trained on
    num_cut: int  # number of prompts longer than the context allows
    collecting_seconds: float


class Run:
    """One run, in one process or in one of several.

    Raises:
        ModelError: The target cannot be used.
        ValueError: An option cannot be used; the message names the field.
    """

    def __init__(self, config: TuneConfig, watcher: Watcher) -> None:
        self.config = config
        place = find_device(config.device)
        self.target, self.starts, self.beside = config.find()
        everyone = dict.fromkeys((*self.starts, *self.beside))
        # Collecting may take hours, so errors of making or loading a drafter must occur before.
        parameters = max(_count(build(start, self.target, config.seed)) for start in everyone)
        self.prompts = self._read_prompts()
        self.accelerator = Accelerator(
            cpu=place.type == "cpu",
            mixed_precision=_precision(config, place),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=_LONG))],
        )
        self.watcher = watcher if self.accelerator.is_main_process else _Nobody()
        with self.accelerator.main_process_first():
            self.folder = open_run(config, self.prompts.digest, writes=self.accelerator.is_main_process)
        check_room(config, self.folder, parameters)

    def _read_prompts(self) -> Prompts:
        config, text_config = self.config, load_config(self.target).get_text_config()
        folders = [self.target, *(start.folder for start in (*self.starts, *self.beside) if start.folder is not None)]
        room = min(known_positions(folder) or 2**30 for folder in folders)
        most = room - config.max_tokens
        if most < 1:
            raise ValueError(
                f"max_tokens: {config.max_tokens} leave no room for a prompt in the context of {room} tokens that the "
                "target and the drafters have; lower max_tokens"
            )
        return read_prompts(
            config.training_files,
            load_tokenizer(self.target),
            count=config.num_prompts,
            num_held_out=config.num_held_out,
            length=min(config.prompt_tokens, most),
            num_texts=config.num_texts,
            text_length=min(config.text_tokens, room),
            most=most,
            vocab_size=text_config.vocab_size,
            held_out_paths=config.held_out_files,
        )

    def run(self) -> Result:
        """Do all that is not done yet.

        Raises:
            TrainingError: It cannot continue; what was saved is intact.
            DamagedError: A file of the run is damaged.
        """
        with reporting_disk_errors(self.folder):
            began = time.monotonic()
            examples, held_out = self._collect()
            collecting = time.monotonic() - began
            starts = [self._as_it_is(f"start-{i + 1}", start, held_out) for i, start in enumerate(self.starts)]
            beside = [self._as_it_is(f"beside-{i + 1}", start, held_out) for i, start in enumerate(self.beside)]
            drafters: list[Tuned] = []
            num_left: list[int] = []
            before = [self._mark(one.name, start, examples) for one, start in zip(beside, self.beside, strict=True)]
            for i in range(len(self.starts)):
                chosen, marks = self._left(examples, before)
                num_left.append(len(chosen))
                tuned = self._tune(f"drafter-{i + 1}", i, examples, chosen, marks, held_out)
                drafters.append(tuned)
                if i + 1 < len(self.starts) and self.config.boosting != "none":
                    before.append(self._mark(tuned.name, Start(tuned.name, tuned.folder), examples))
            # The very first drafter is trained the same way in both sets.
            num_alike = 0 if beside else 1
            controls = [
                self._tune(f"control-{i + 1}", i, examples, range(len(examples)), [], held_out)
                for i in range(num_alike, len(self.starts))
                if self.config.control and self.config.boosting != "none"
            ]
        return Result(
            self.target, self.folder, drafters, [*drafters[:num_alike], *controls] if controls else [], starts, beside,
            held_out, len(examples), examples.num_tokens, num_left, self.prompts.num_cut, collecting,
        )  # fmt: skip

    def _collect(self) -> tuple[TrainingExamples, TrainingExamples]:
        config, accelerator = self.config, self.accelerator
        process = (accelerator.process_index, accelerator.num_processes)
        folders = [self.folder / "examples", self.folder / "examples-held-out"]
        llm = self._load_target()
        for folder, prompts, seed in zip(
            folders, (self.prompts.training, self.prompts.held_out), (config.seed, config.seed + 1), strict=True
        ):
            folder.mkdir(exist_ok=True)
            self.watcher.stage(f"{folder.name}: the target speaks", len(prompts))
            collect(
                llm,
                prompts,
                folder,
                max_tokens=config.max_tokens,
                temperatures=config.temperatures,
                seed=seed,
                top=config.top,
                note=self.watcher.advance,
                process=process,
            )
        if self.prompts.texts:
            self.watcher.stage("examples: the target reads", len(self.prompts.texts))
            read(llm, self.prompts.texts, folders[0], top=config.top, note=self.watcher.advance, process=process)
        accelerator.wait_for_everyone()
        examples, held_out = map(load, folders)
        if not len(examples) or not len(held_out):
            raise TrainingError("data: the target generated nothing for any of the prompts; use others")
        return examples, held_out

    def _load_target(self) -> LLM:
        return LLM(
            self.target,
            tree="off",
            dtype=self.config.dtype,
            device=self.config.device,
            max_num_seqs=_COLLECTING,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
            seed=self.config.seed,
        )

    def _left(
        self, examples: TrainingExamples, before: Sequence[Sequence[Marks]]
    ) -> tuple[Sequence[int], list[list[Marks]]]:
        """Return the examples that the next drafter is trained on, and the marks of those before on each."""
        number = len(examples)
        if not before:
            return range(number), []
        by_example = [[marks[i] for marks in before] for i in range(number)]
        left = [i for i in range(number) if not is_mastered(by_example[i])]
        left = left or list(range(number))  # all mastered: there is nothing else to train on
        return left, [by_example[i] for i in left] if self.config.boosting == "tokens" else []

    def _as_it_is(self, name: str, start: Start, held_out: TrainingExamples) -> Tuned:
        """Measure a drafter without tuning, or before it."""
        path = self.folder / f"{name}.held-out.safetensors"
        model = build(start, self.target, self.config.seed)
        if not path.exists() and self.accelerator.is_main_process:
            save_marks(self._foresee(f"{name}: measuring", model, start.folder, held_out), path)
        self.accelerator.wait_for_everyone()
        return Tuned(name, start.folder, load_marks(path, held_out), _count(model))

    def _tune(
        self,
        name: str,
        i: int,
        examples: TrainingExamples,
        chosen: Sequence[int],
        marks: list[list[Marks]],
        held_out: TrainingExamples,
    ) -> Tuned:
        config = self.config
        model = build(self.starts[i], self.target, config.seed + i)
        num_parameters = _count(model)
        if config.freeze_embeddings:
            model.get_input_embeddings().requires_grad_(False)
        learned = [examples[j] for j in chosen]
        num_tokens = sum(len(example.tokens) for example in examples)
        training = TrainingConfig(
            # All drafters take the same number of steps, however much is left for them.
            num_steps=max(round(config.epochs * num_tokens / config.batch_tokens), 1),
            batch_tokens=config.batch_tokens,
            learning_rate=config.learning_rate
            or learning_rate_for(sum(weight.numel() for weight in model.parameters() if weight.requires_grad)),
            depth=config.depth,
            seed=config.seed + i,
            save_every=config.save_every,
        )
        checkpoint = self.folder / f"{name}.checkpoint.pt"
        self.watcher.stage(f"{name}: tuning", training.num_steps)
        progress = Progress()
        is_shown = config.tensorboard and self.accelerator.is_main_process
        with open_board(self.folder / "tensorboard" / name if is_shown else None) as board:
            token_map = self._token_map(examples)
            for progress in fit(self.accelerator, model, learned, marks, training, checkpoint, token_map):
                self.watcher.advance(progress.step, progress)
                if board is not None:
                    board.note(progress)
        path = self.folder / f"{name}.held-out.safetensors"
        if self.accelerator.is_main_process and not (path.exists() and (self.folder / name).is_dir()):
            export(model, self.target, self.folder / name, None if token_map is None else token_map.tolist())
            # Loaded again: the model just tuned still runs in the precision of its training.
            tuned = build(Start(name, self.folder / name), self.target, 0)
            save_marks(self._foresee(f"{name}: measuring", tuned, self.folder / name, held_out), path)
        self.accelerator.free_memory()  # it would keep every drafter in memory to the end
        self.accelerator.wait_for_everyone()
        return Tuned(
            name, self.folder / name, load_marks(path, held_out), num_parameters, progress.seconds, progress.tokens,
            progress.step, progress.loss,
        )  # fmt: skip

    def _mark(self, name: str, start: Start, examples: TrainingExamples) -> list[Marks]:
        """Return a drafter's marks on all examples."""
        path = self.folder / f"{name}.marks.safetensors"
        if not path.exists() and self.accelerator.is_main_process:
            model = build(start, self.target, 0)
            save_marks(self._foresee(f"{name}: marking", model, start.folder, examples), path)
        self.accelerator.wait_for_everyone()
        return load_marks(path, examples)

    def _token_map(self, examples: TrainingExamples) -> torch.Tensor | None:
        """Return the tokens that the target most expects in all examples, ascending, [token_map] int64; None for all.

        Frequency-ranked vocabulary compression: FR-Spec (arXiv 2502.14856).
        """
        count = self.config.token_map
        if count is None:
            return None
        vocab_size = load_config(self.target).get_text_config().vocab_size
        expected = np.zeros(vocab_size)
        for example in examples:
            weights = np.exp(example.top_logprobs.astype(np.float32)).ravel()
            expected += np.bincount(example.top_ids.ravel(), weights, vocab_size)
        best = np.argsort(-expected, kind="stable")[:count]
        return torch.from_numpy(np.sort(best[expected[best] > 0]))

    def _foresee(self, stage: str, model: Any, folder: Path | None, examples: TrainingExamples) -> list[Marks]:
        """Return the marks of a model on these examples, with the token map in its folder if there is one."""
        vocab_size = load_config(self.target).get_text_config().vocab_size
        token_map = None if folder is None else read_token_map(folder, vocab_size)
        self.watcher.stage(stage, len(examples))
        device = self.accelerator.device
        model.to(device)
        marks: list[Marks] = []
        for start in range(0, len(examples), _MARKING):
            marks += mark(model, examples[start : start + _MARKING], device, _MARKING_ROWS, token_map)
            self.watcher.advance(len(marks))
        return marks


class _Nobody:
    """A watcher that shows nothing, for a run that another process shows."""

    def stage(self, name: str, total: int) -> None:
        pass

    def advance(self, done: int, progress: Progress | None = None) -> None:
        pass


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _precision(config: TuneConfig, place: torch.device) -> str:
    if config.mixed_precision != "auto":
        return config.mixed_precision
    if place.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    flags = Path("/proc/cpuinfo")
    return "bf16" if place.type == "cpu" and flags.exists() and "avx512_bf16" in flags.read_text() else "no"
