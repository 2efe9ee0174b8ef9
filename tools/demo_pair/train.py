"""Training of the embedded pair: `python tools/train_demo_pair.py --out DIR`.

Four stages, each resumable: the tokenizer; the target, on the standard library; the drafter,
distilled from the target; and the packing of both into the package. The other drafters of the set
come from `specinfer tune`; the stage "others" packs them.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from demo_pair import continuations, packing, report, vocabulary
from demo_pair.loop import (
    Budget,
    LoopConfig,
    Progress,
    Windows,
    fit,
    precision,
    save_atomically,
)
from specinfer.demo import chat_model, corpus, pair

Model = Callable[..., Any]  # a model, compiled or not

MAX_LENGTH = 1024
_STAGES = ("tokenizer", "target", "drafter", "pack")
_OTHERS = "others"
# Parts of the drafter's budget: plain language modeling, and generation of text by the target.
_START_PART = 0.25
_WRITING_PART = 0.15
_DRAFTER_PART = 0.28  # the drafter's budget as a part of the target's, in addition to it
_OWN_PART = 0.25  # part of each batch of the distillation: the target's own text


def _shape(**sizes: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary.VOCAB_SIZE,
        max_position_embeddings=MAX_LENGTH,
        head_dim=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
        **sizes,
    )


def target_config() -> LlamaConfig:
    """Return the config of a deep and narrow model, so that one pass takes long compared with the drafter's."""
    return _shape(
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
    )


def drafter_config() -> LlamaConfig:
    return _shape(
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
    )


def build(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Return a new model whose residual branches start small, which suits deep narrow models."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    scale = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(scale)
    return model


def next_token_loss(model: Model) -> Callable[[Tensor], Tensor]:
    def loss_of(windows: Tensor) -> Tensor:
        with precision(windows.device):
            logits = model(windows[:, :-1]).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    return loss_of


def distillation_loss(drafter: Model, target: Model) -> Callable[[Tensor], Tensor]:
    """Return the forward KL from the target's full distribution to the drafter's, at temperature 1."""

    def loss_of(windows: Tensor) -> Tensor:
        inputs = windows[:, :-1]
        with precision(inputs.device):
            with torch.no_grad():
                p = target(inputs).logits.float().log_softmax(-1).flatten(0, 1)
            q = drafter(inputs).logits.float().log_softmax(-1).flatten(0, 1)
        return functional.kl_div(q, p, log_target=True, reduction="batchmean")

    return loss_of


class Run:
    """One training run: its work folder, its device, and its stages."""

    def __init__(self, out: Path, device: torch.device, seed: int, compiles: bool = True) -> None:
        self.out = out
        self.device = device
        self.seed = seed
        self.compiles = compiles and any(map(shutil.which, ("g++", "c++", "clang++")))
        out.mkdir(parents=True, exist_ok=True)

    def tokenizer(self) -> None:
        folder = self.out / "tokenizer"
        if not folder.exists():
            texts = [corpus.read_text(path) for path in corpus.training_files()]
            vocabulary.save_tokenizer(vocabulary.train_tokenizer(texts), folder, MAX_LENGTH)

    def tokens(self, part: Literal["training", "heldout"]) -> Tensor:
        """Return the token stream of one part of the corpus, encoded once."""
        cached = self.out / f"{part}-tokens.pt"
        if not cached.exists():
            paths = corpus.training_files() if part == "training" else corpus.heldout_files()
            tokenizer = vocabulary.load_tokenizer(self.out / "tokenizer")
            encoded = tokenizer.encode_batch([corpus.read_text(path) for path in paths])
            end = tokenizer.token_to_id(vocabulary.END_OF_TEXT)
            ids = [token for item in encoded for token in (*item.ids, end)]
            save_atomically(torch.tensor(ids, dtype=torch.int32), cached)
        tokens: Tensor = torch.load(cached, weights_only=True)
        return tokens

    def target(self, budget: Budget) -> None:
        model = build(target_config(), self.seed).to(self.device)
        windows = Windows(self.tokens("training"), self.seed)
        loss_of = next_token_loss(self._compiled(model))
        self._fit("target", model, loss_of, windows.batch, LoopConfig(budget, self.seed))
        self._export("target", model)

    def drafter(self, budget: Budget) -> None:
        """Train on the corpus first, which is cheap, and then on the target's own distribution."""
        target = self.load("target")
        drafter = build(drafter_config(), self.seed + 1).to(self.device)
        windows = Windows(self.tokens("training"), self.seed + 1)
        config = LoopConfig(
            budget.part(_START_PART),
            self.seed,
            batch_tokens=4096,
            lengths=((0.0, 256),),
        )
        compiled = self._compiled(drafter)
        if not self._checkpoint("drafter").exists():
            self._fit("drafter-start", drafter, next_token_loss(compiled), windows.batch, config)

        own = Windows(self.own_text(target, budget), self.seed + 2)
        batch_at = continuations.mixed_batches(windows, own, _OWN_PART)
        config = LoopConfig(
            budget.part(1 - _START_PART - _WRITING_PART),
            self.seed,
            batch_tokens=4096,
            lengths=((0.0, 256), (0.7, 1024)),
        )
        loss_of = distillation_loss(compiled, self._compiled(target))
        self._fit("drafter", drafter, loss_of, batch_at, config)
        self._export("drafter", drafter)

    def own_text(self, target: LlamaForCausalLM, budget: Budget) -> Tensor:
        """Return the target's output after prompts from the training files, as one token stream."""
        cached = self.out / "own-tokens.pt"
        if not cached.exists():
            torch.manual_seed(self.seed)
            writing, progress, rows = budget.part(_WRITING_PART), Progress(), []
            corpus_tokens = self.tokens("training")
            while writing.spent(progress) < 1:
                began = time.monotonic()
                seed = self.seed * 1_000_003 + progress.step
                prompts = continuations.prompt_rows(corpus_tokens, 128, 64, seed)
                rows.append(continuations.continue_rows(target, prompts.to(self.device), 192, greedy_rows=64).cpu())
                progress.step += 1
                progress.tokens += 128 * 192
                progress.seconds += time.monotonic() - began
                print(f"own text: {progress.tokens} tokens, {progress.seconds:.0f} s", flush=True)
            save_atomically(torch.cat(rows).flatten().int(), cached)
        tokens: Tensor = torch.load(cached, weights_only=True)
        return tokens

    def pack(self, package: Path) -> None:
        """Pack both models into the package and measure what was packed."""
        shutil.rmtree(self.out / "unpacked", ignore_errors=True)
        for name in ("target", "drafter"):
            packing.pack(self.out / name, package / name)
            pair.unpack(package / name, self.out / "unpacked" / name)
        trained = report.Pair(self.load("target"), self.load("drafter"))
        packed = report.Pair(self.load("unpacked/target"), self.load("unpacked/drafter"))
        heldout = self.tokens("heldout")
        report.write_record(self.out, trained, packed, heldout, package / "training.json")

    def others(self, tuned: Path, package: Path) -> None:
        """Pack the drafters of a run of `specinfer tune demo --beside demo`, and record its report."""
        for number, other in enumerate(chat_model.OTHERS, start=1):
            packing.pack(tuned / f"drafter-{number}", package / f"drafter-{other}")
        found = json.loads((tuned / "report.json").read_text())
        record = json.loads((package / "training.json").read_text())
        record["others"] = {
            name: found[name] for name in ("training", "num_examples", "num_tokens", "foresight", "passes")
        }
        (package / "training.json").write_text(json.dumps(record, indent=2) + "\n")

    def load(self, name: str) -> LlamaForCausalLM:
        model = LlamaForCausalLM.from_pretrained(self.out / name, dtype=torch.float32)
        return model.to(self.device).eval()

    def _checkpoint(self, name: str) -> Path:
        return self.out / f"{name}.checkpoint.pt"

    def _compiled(self, model: LlamaForCausalLM) -> Model:
        # There are few lengths, so each is compiled separately.
        compiled: Model = torch.compile(model, dynamic=False) if self.compiles else model
        return compiled

    def _fit(
        self,
        name: str,
        model: LlamaForCausalLM,
        loss_of: Callable[[Tensor], Tensor],
        batch_at: Callable[[int, int, int], Tensor],
        config: LoopConfig,
    ) -> None:
        checkpoint = self._checkpoint(name)
        with Bar(BarColumn(), TextColumn("{task.percentage:.1f} % {task.description}"), TimeElapsedColumn()) as bar:
            task = bar.add_task(name, total=1.0)
            for progress in fit(model, loss_of, batch_at, config, checkpoint):
                line = _line(name, progress)
                bar.update(task, completed=config.budget.spent(progress), description=line)
                if progress.step % 20 == 0 and not bar.console.is_terminal:
                    print(line, flush=True)

    def _export(self, name: str, model: LlamaForCausalLM) -> None:
        """Write an ordinary Hugging Face folder."""
        model.config.use_cache = model.generation_config.use_cache = True
        model.save_pretrained(self.out / name)
        for file in (self.out / "tokenizer").iterdir():
            shutil.copy(file, self.out / name)


def _line(name: str, progress: Progress) -> str:
    rate = progress.tokens / max(progress.seconds, 1e-9)
    return f"{name} step {progress.step} loss {progress.loss:.3f} {progress.tokens / 1e6:.2f} M tokens, {rate:.0f}/s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="train_demo_pair.py", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="work folder; resumed if it exists")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="wall-clock training time of the target")
    budget.add_argument("--tokens", type=int, help="training tokens of the target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", default="all", choices=["all", *_STAGES, _OTHERS])
    parser.add_argument("--tuned", type=Path, help="of stage others: the folder of `specinfer tune demo --beside demo`")
    parser.add_argument("--package", type=Path, default=pair.PACKED, help="where to pack to")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    arguments = parser.parse_args()
    if arguments.minutes is None and arguments.tokens is None:
        arguments.minutes = 65.0

    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if arguments.device == "auto" else arguments.device)
    torch.set_flush_denormal(True)
    run = Run(arguments.out, device, arguments.seed, compiles=not arguments.no_compile)
    whole = Budget(arguments.minutes, arguments.tokens)
    stages: dict[str, Callable[[], None]] = {
        "tokenizer": run.tokenizer,
        "target": lambda: run.target(whole),
        "drafter": lambda: run.drafter(whole.part(_DRAFTER_PART)),
        "pack": lambda: run.pack(arguments.package),
    }
    if arguments.stage == _OTHERS:
        if arguments.tuned is None:
            parser.error("--stage others needs --tuned")
        run.others(arguments.tuned, arguments.package)
    for name, stage in stages.items():
        if arguments.stage in ("all", name):
            stage()
