"""A run of collective boost-tuning, from prompts to drafters: SpecInfer (arXiv 2305.09781), section 3.

Stages: the target generates the examples. Then drafter after drafter is tuned on them, and the next learns what those
before it do not predict. Each finished stage is stored in the run's folder, and an interrupted stage resumes from its
last file or checkpoint. So a run that is started again ends as if it had never stopped.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from specinfer.learning.examples import TrainingExamples
from specinfer.learning.loop import Progress, TrainingError, reporting_disk_errors
from specinfer.learning.optimizers import learning_rate_for
from specinfer.learning.trainable import TrainableDrafter, export
from specinfer.learning.tune.boosting import Predictions, is_predicted, load_predictions, predict, save_predictions
from specinfer.learning.tune.collection import Collection, load
from specinfer.learning.tune.corpus import Prompts, read_prompts
from specinfer.learning.tune.estimate import as_text, estimate_seconds
from specinfer.learning.tune.initial_weights import InitialWeights, build
from specinfer.learning.tune.options import TuneConfig, data_files
from specinfer.learning.tune.result import Result, StageCallback, TunedDrafter
from specinfer.learning.tune.run_folder import check_disk_space, find_models, open_run
from specinfer.learning.tune.training import TrainingConfig, fit, with_curves
from specinfer.llm import LLM
from specinfer.model.definition import known_positions, load_config, load_tokenizer
from specinfer.model.device import find_device
from specinfer.policy.cost_cache import cached_costs

_LONG = 7 * 24 * 3600  # seconds that one process may wait for another
_BATCH = 64  # prompts that the target completes at a time
_GROUP = 256  # examples between two progress reports


class Run:
    """One run, in one process or in one of several.

    Raises:
        ModelError: The target cannot be used.
        ValueError: An option cannot be used; the message names the field.
    """

    def __init__(self, config: TuneConfig, report: StageCallback) -> None:
        self.config = config
        device = find_device(config.device)
        self.target, self.starts, self.beside = find_models(config)
        # Collecting may take hours, so errors of making or loading a drafter must occur before.
        every = dict.fromkeys((*self.starts, *self.beside))
        built = {start: build(start, self.target, config.seed).num_parameters for start in every}
        self._parameters = [built[start] for start in self.starts]
        self._vocab_size = int(load_config(self.target).get_text_config().vocab_size)
        self.prompts = self._read_prompts()
        self.accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=_precision(config, device),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=_LONG))],
        )
        self.report: StageCallback = report if self.accelerator.is_main_process else lambda *_, **__: None
        with self.accelerator.main_process_first():
            self.folder = open_run(config, self.prompts.digest, writes=self.accelerator.is_main_process)
        check_disk_space(config, self.folder, max(built.values()))

    def _read_prompts(self) -> Prompts:
        config = self.config
        models = [start.folder for start in (*self.starts, *self.beside) if not start.is_head]
        folders = [self.target, *(folder for folder in models if folder is not None)]
        context = min(known_positions(folder) or 2**30 for folder in folders)
        most = context - config.max_tokens
        if most < 1:
            raise ValueError(
                f"max_tokens: {config.max_tokens} leave no space for a prompt in the context of {context} tokens that "
                "the target and the drafters have; lower max_tokens"
            )
        training_files, held_out_files = data_files(config.data, config.held_out)
        return read_prompts(
            training_files,
            load_tokenizer(self.target),
            count=config.num_prompts,
            num_held_out=config.num_held_out,
            length=min(config.prompt_tokens, most),
            num_texts=config.num_texts,
            text_length=min(config.text_tokens, context),
            most=most,
            vocab_size=self._vocab_size,
            held_out_paths=held_out_files,
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
            starts = [self._measure_untuned(f"start-{i}", start, held_out) for i, start in enumerate(self.starts, 1)]
            beside = [self._measure_untuned(f"beside-{i}", start, held_out) for i, start in enumerate(self.beside, 1)]
            drafters, num_left = self._tune_one_after_the_other(examples, held_out)
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
        """Return the examples to train on, and the held-out ones."""
        config = self.config
        process = (self.accelerator.process_index, self.accelerator.num_processes)
        folders = [self.folder / "examples", self.folder / "examples-held-out"]
        llm = LLM(
            self.target, tree="off", dtype=config.dtype, device=config.device, max_num_seqs=_BATCH,
            max_num_batched_tokens=4096, enable_prefix_caching=False, seed=config.seed,
        )  # fmt: skip
        if not folders[0].exists():
            self._estimate(llm)
        parts = zip(folders, (self.prompts.training, self.prompts.held_out), strict=True)
        for seed, (folder, prompts) in enumerate(parts, config.seed):
            folder.mkdir(exist_ok=True)
            note = self._stage(f"{folder.name}: the target generates", len(prompts))
            Collection(llm, config.top, note, process).generate(
                prompts, folder, max_tokens=config.max_tokens, temperatures=config.temperatures, seed=seed
            )
        if self.prompts.texts:
            note = self._stage("examples: the target reads", len(self.prompts.texts))
            Collection(llm, config.top, note, process).read(self.prompts.texts, folders[0])
        self.accelerator.wait_for_everyone()
        examples, held_out = map(load, folders)
        if not len(examples) or not len(held_out):
            raise TrainingError("data: the target generated nothing for any of the prompts; use others")
        return examples, held_out

    def _estimate(self, llm: LLM) -> None:
        """Report about how long the run takes."""
        costs, whole = cached_costs(llm.target, None), llm.target.loaded.num_parameters
        shares = [number / whole for number in self._parameters]
        seconds = estimate_seconds(
            lambda size: float(costs.target(size)), self.prompts, self.config, shares, _BATCH,
            self.accelerator.num_processes,
        )  # fmt: skip
        self.report(f"about {as_text(seconds)} in all", 1, 1)

    def _stage(self, name: str, total: int) -> Callable[[int], None]:
        """Begin a stage, and return the function that reports how much of it is done."""
        self.report(name, 0, total)
        return lambda done: self.report(name, done, total)

    def _tune_one_after_the_other(
        self, examples: TrainingExamples, held_out: TrainingExamples
    ) -> tuple[list[TunedDrafter], list[int]]:
        """Tune each drafter on what those before it do not predict; return also the number of examples of each."""
        drafters: list[TunedDrafter] = []
        num_left: list[int] = []
        before = [self._predict_training(f"beside-{i}", start, examples) for i, start in enumerate(self.beside, 1)]
        for i in range(len(self.starts)):
            chosen, predictions = self._remaining(examples, before)
            num_left.append(len(chosen))
            tuned = self._tune(f"drafter-{i + 1}", i, examples, chosen, predictions, held_out)
            drafters.append(tuned)
            if i + 1 < len(self.starts) and self.config.boosting != "none":
                start = InitialWeights(tuned.name, tuned.folder)
                before.append(self._predict_training(tuned.name, start, examples))
        return drafters, num_left

    def _remaining(
        self, examples: TrainingExamples, before: Sequence[Sequence[Predictions]]
    ) -> tuple[Sequence[int], list[list[Predictions]]]:
        """Return the examples that the next drafter is trained on, and the predictions of those before on each."""
        number = len(examples)
        if not before:
            return range(number), []
        by_example = [[predictions[i] for predictions in before] for i in range(number)]
        left = [i for i in range(number) if not is_predicted(by_example[i])]
        left = left or list(range(number))  # all are predicted: there is nothing else to train on
        return left, [by_example[i] for i in left] if self.config.boosting == "tokens" else []

    def _measure_untuned(self, name: str, start: InitialWeights, held_out: TrainingExamples) -> TunedDrafter:
        """Measure a drafter without tuning, or before it."""
        drafter = build(start, self.target, self.config.seed)
        path = self.folder / f"{name}.held-out.safetensors"
        predictions = self._predictions(path, f"{name}: measuring", lambda: drafter, held_out)
        return TunedDrafter(name, start.folder, predictions, drafter.num_parameters)

    def _predict_training(self, name: str, start: InitialWeights, examples: TrainingExamples) -> list[Predictions]:
        """Return a drafter's predictions on all training examples."""
        path = self.folder / f"{name}.marks.safetensors"
        return self._predictions(path, f"{name}: predicting", lambda: build(start, self.target, 0), examples)

    def _predictions(
        self, path: Path, stage: str, load_drafter: Callable[[], TrainableDrafter], examples: TrainingExamples
    ) -> list[Predictions]:
        """Return the predictions in a file, which is made first where it is missing."""
        if not path.exists() and self.accelerator.is_main_process:
            note = self._stage(stage, len(examples))
            drafter = load_drafter().to(self.accelerator.device)
            predictions: list[Predictions] = []
            for first in range(0, len(examples), _GROUP):
                predictions += predict(drafter, examples[first : first + _GROUP])
                note(len(predictions))
            save_predictions(predictions, path)
        self.accelerator.wait_for_everyone()
        return load_predictions(path, examples)

    def _tune(
        self,
        name: str,
        i: int,
        examples: TrainingExamples,
        chosen: Sequence[int],
        predictions: list[list[Predictions]],
        held_out: TrainingExamples,
    ) -> TunedDrafter:
        """Train the i-th drafter on the chosen examples, write its folder and measure it."""
        config, folder = self.config, self.folder / name
        drafter = build(self.starts[i], self.target, config.seed + i, self._token_map(examples))
        if config.freeze_embeddings:
            drafter.freeze_embeddings()
        training = self._training_config(drafter, i, sum(len(example.tokens) for example in examples))
        stage = f"{name}: tuning"
        self.report(stage, 0, training.num_steps)
        progress = Progress()
        is_shown = config.tensorboard and self.accelerator.is_main_process
        learned, checkpoint = [examples[j] for j in chosen], self.folder / f"{name}.checkpoint.pt"
        steps = fit(self.accelerator, drafter, learned, predictions, training, checkpoint)
        for progress in with_curves(steps, self.folder / "tensorboard" / name if is_shown else None):
            self.report(stage, progress.step, training.num_steps, str(progress))
        path = self.folder / f"{name}.held-out.safetensors"
        if self.accelerator.is_main_process and not (path.exists() and folder.is_dir()):
            export(drafter, folder, None if self.starts[i].is_head else self.target)
            path.unlink(missing_ok=True)
        self.accelerator.free_memory()  # it would keep every drafter in memory to the end
        self.accelerator.wait_for_everyone()
        # Loaded again: the drafter just tuned still runs in the precision of its training.
        tuned = InitialWeights(name, folder)
        measured = self._predictions(path, f"{name}: measuring", lambda: build(tuned, self.target, 0), held_out)
        return TunedDrafter(
            name, folder, measured, drafter.num_parameters, progress.seconds, progress.tokens, progress.step,
            progress.loss,
        )  # fmt: skip

    def _training_config(self, drafter: TrainableDrafter, i: int, num_tokens: int) -> TrainingConfig:
        config = self.config
        num_trained = sum(weight.numel() for weight in drafter.parameters() if weight.requires_grad)
        return TrainingConfig(
            # All drafters take the same number of steps, however much is left for them.
            num_steps=max(round(config.epochs * num_tokens / config.batch_tokens), 1),
            batch_tokens=config.batch_tokens,
            learning_rate=config.learning_rate or learning_rate_for(num_trained),
            depth=config.depth,
            seed=config.seed + i,
            save_every=config.save_every,
        )

    def _token_map(self, examples: TrainingExamples) -> list[int] | None:
        """Return the tokens that the target most expects in all examples, ascending, or None for all.

        Frequency-ranked vocabulary compression: FR-Spec (arXiv 2502.14856).
        """
        count = self.config.token_map
        if count is None:
            return None
        expected = np.zeros(self._vocab_size)
        for example in examples:
            weights = np.exp(example.top_logprobs.astype(np.float32)).ravel()
            expected += np.bincount(example.top_ids.ravel(), weights, self._vocab_size)
        best = np.argsort(-expected, kind="stable")[:count]
        chosen: list[int] = np.sort(best[expected[best] > 0]).tolist()
        return chosen


def _precision(config: TuneConfig, place: torch.device) -> str:
    if config.mixed_precision != "auto":
        return config.mixed_precision
    if place.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    flags = Path("/proc/cpuinfo")
    has_bf16 = place.type == "cpu" and flags.exists() and "avx512_bf16" in flags.read_text(encoding="utf-8")
    return "bf16" if has_bf16 else "no"
