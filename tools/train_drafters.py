"""Train drafters of the embedded targets on a GPU for a given time, on text that the target writes there.

    python tools/train_drafters.py texts demo --out texts.pt --num 65536
    python tools/train_drafters.py train demo --texts texts.pt --drafter new:eagle3 --seconds 240 --out FOLDER

`specinfer tune` stores the target's distributions and is for any target and machine. Here the target computes them anew
for each batch, over the whole vocabulary, so there is no limit to the text. The loss adds the probability that a draft
token is rejected to the divergence. Matrices of heads are rounded to their stored precision in the last part of the
training, so that it learns around the rounding.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from chat_prompts import beginnings, is_turn, passages
from demo_pair.static_generation import StaticGenerator
from specinfer.demo.corpus import read_text, training_files
from specinfer.kernels.quantization import dequantize, quantize
from specinfer.learning.distillation import HeadLogits, draft_logits_of
from specinfer.learning.heads.trainable_head import TrainableHead
from specinfer.learning.training_examples import Batch
from specinfer.model.definition import load_plain, load_tokenizer
from specinfer.model.folder import read_token_map
from specinfer.setup.model_names import find_target
from specinfer.tuning.initial_weights import build, export, parse_initial_weights
from specinfer.tuning.training import learning_rate_for, make_optimizers

_ROWS = {"demo": 4096, "demo-chat": 2048}  # of text generated at once
_PROMPT, _NEW = 64, {"demo": 192, "demo-chat": 256}
_TEMPERATURES = {"demo": (0.0, 1.0), "demo-chat": (0.0, 0.7, 1.0)}
_LEVEL_SHARE = 0.8
_HELD_OUT = 512
_LONGEST = 640  # tokens of a text


def load_target(name: str, device: str) -> tuple[Path, Any]:
    """Return the folder and the model, in bfloat16 on a GPU."""
    folder = find_target(name)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return folder, load_plain(folder, dtype).eval().requires_grad_(False).to(device)


def code_prompts(folder: Path, corpus: Path | None, count: int, seed: int) -> list[list[int]]:
    """Return random spans of the training files' tokens, or of those that are stored in a file."""
    if corpus is None:
        tokenizer = load_tokenizer(folder)
        texts = tokenizer([read_text(path) for path in training_files()], add_special_tokens=False)["input_ids"]
        tokens = np.concatenate([np.array(text) for text in texts])
    else:
        tokens = np.load(corpus)
    starts = np.random.default_rng(seed).integers(0, len(tokens) - _PROMPT, count)
    return [tokens[start : start + _PROMPT].tolist() for start in starts]


def chat_prompts(generator: StaticGenerator, folder: Path, count: int, seed: int) -> list[list[int]]:
    """Return chats whose user turns the model has made up, and some about passages of documentation."""
    tokenizer = load_tokenizer(folder)
    before, words = beginnings(tokenizer, count, seed)
    stop = int(tokenizer.eos_token_id)
    turns = []
    ids = [tokenizer(before + one, add_special_tokens=False)["input_ids"] for one in words]
    for start in range(0, count, 4096):
        part = ids[start : start + 4096]
        answers = generator.generate(part, [0.9] * len(part), 160, stop)
        for one, said in zip(words[start : start + 4096], answers, strict=True):
            turn = (one + tokenizer.decode(said[:-1])).strip()
            if said[-1] == stop and is_turn(turn):
                turns.append(turn)
        print(f"{start + len(part)} of {count}: {len(turns)} kept", file=sys.stderr, flush=True)
    turns = list(dict.fromkeys(turns + passages(count // 8, seed)))
    chats = [[{"role": "user", "content": turn}] for turn in turns]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [prompt for prompt in prompts if len(prompt) + _NEW["demo-chat"] <= _LONGEST]


def write_texts(options: argparse.Namespace) -> None:
    """Generate texts and write their tokens, lengths and lengths of prompts."""
    name, began = options.target, time.monotonic()
    folder, model = load_target(name, options.device)
    generator = StaticGenerator(model)
    if name == "demo":
        prompts, stop = code_prompts(folder, options.corpus, options.num, options.seed), None
    else:
        prompts = chat_prompts(generator, folder, options.num, options.seed)
        stop = int(load_tokenizer(folder).eos_token_id)
    print(f"{len(prompts)} prompts after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    held_out, rest = prompts[:_HELD_OUT], sorted(prompts[_HELD_OUT:], key=len)
    groups = [held_out] + [rest[start : start + _ROWS[name]] for start in range(0, len(rest), _ROWS[name])]
    texts: list[list[int]] = []
    sizes: list[int] = []
    temperatures = _TEMPERATURES[name]
    order = [0, *(1 + np.random.default_rng(0).permutation(len(groups) - 1))]  # a run that is cut short has all lengths
    for group in (groups[i] for i in order):
        if time.monotonic() - began > options.seconds:
            break
        chosen = [temperatures[i % len(temperatures)] for i in range(len(group))]
        said = generator.generate(group, chosen, _NEW[name], stop)
        texts += [[*prompt, *more] for prompt, more in zip(group, said, strict=True)]
        sizes += [len(prompt) for prompt in group]
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    lengths, prompt_lengths = torch.tensor([len(text) for text in texts]), torch.tensor(sizes)
    torch.save({"tokens": tokens, "lengths": lengths, "prompts": prompt_lengths}, options.out)
    written = int((lengths - prompt_lengths).sum())
    print(f"{len(texts)} texts, {written} tokens, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


class Texts:
    """Texts on the device, and batches of them with the target's distributions and hidden states."""

    def __init__(
        self, path: Path, target: Any, kept: Tensor | None, device: str, reads: tuple[int, ...] | None
    ) -> None:
        stored = torch.load(path, weights_only=True)
        self.tokens = stored["tokens"].to(device)
        self.lengths, self.prompts = stored["lengths"].tolist(), stored["prompts"].tolist()
        self.target, self.kept, self.device, self.reads = target, kept, device, reads
        self._random = np.random.default_rng(0)
        self._queue: list[list[int]] = []

    def held_out(self, size: int) -> list[list[int]]:
        """Return rows that are not trained on, in groups."""
        rows = list(range(min(_HELD_OUT, len(self.lengths) // 2)))
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def next_rows(self, num_tokens: int) -> list[int]:
        """Return the rows of the next step, which are of about the same length."""
        if not self._queue:
            start = len(self.held_out(1))
            rows = sorted(range(start, len(self.lengths)), key=lambda i: (self.lengths[i] // 16, self._random.random()))
            count = max(num_tokens * (len(rows)) // sum(self.lengths[start:]), 1)
            self._queue = [rows[i : i + count] for i in range(0, len(rows), count)]
            self._random.shuffle(self._queue)
        return self._queue.pop()

    @torch.no_grad()
    def batch(self, rows: list[int]) -> tuple[Batch, Tensor, Tensor]:
        """Return a batch without top tokens, the [outputs, kept] distributions, and their [outputs] mass."""
        lengths, prompts = [self.lengths[i] for i in rows], [self.prompts[i] for i in rows]
        length = max(lengths)
        tokens = self.tokens[torch.tensor(rows, device=self.device), :length].long()
        counts = [n - p for n, p in zip(lengths, prompts, strict=True)]
        places = np.concatenate([np.arange(p - 1, n - 1) for n, p in zip(lengths, prompts, strict=True)])
        at = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(self.device)
        to = torch.from_numpy(places).to(self.device)
        states = self.target.base_model(input_ids=tokens, use_cache=False, output_hidden_states=self.reads is not None)
        probs = self.target.get_output_embeddings()(states.last_hidden_state[at, to]).float().softmax(-1)
        mass = torch.ones(len(probs), device=self.device)
        if self.kept is not None:
            probs = probs.index_select(1, self.kept)
            mass = probs.sum(1).clamp_min(1e-6)
            probs = probs / mass[:, None]
        taps = None if self.reads is None else {i: states.hidden_states[i].float() for i in self.reads}
        nothing = torch.empty(0, device=self.device)
        return Batch(tokens, at, to, nothing, nothing, tokens[at, to + 1], nothing, taps), probs, mass


def loss_of(found: Tensor | HeadLogits, probs: Tensor, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and of the first level the mean overlap and the part of equal best tokens."""
    if isinstance(found, Tensor):
        outputs = torch.arange(len(found), device=found.device)
        found = HeadLogits(found, outputs, torch.zeros_like(outputs), None)
    p = probs[found.outputs]
    log_q = found.logits.float().log_softmax(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    weights = _LEVEL_SHARE**found.levels * mass[found.outputs]
    divergence = (torch.xlogy(p, p) - p * log_q).sum(-1)
    loss = ((divergence + 1 - overlap) * weights).sum() / weights.sum()
    if found.accepted is not None:
        confidence = binary_cross_entropy(found.accepted.float(), overlap.detach().clamp(0, 1), reduction="none")
        loss = loss + (confidence * weights).sum() / weights.sum()
    first = found.levels == 0
    with torch.no_grad():
        equal = (p[first].argmax(-1) == log_q[first].argmax(-1)).float() * mass[found.outputs[first]]
        return loss, (overlap[first] * mass[found.outputs[first]]).mean(), equal.mean()


@torch.no_grad()
def rounded(matrices: list[torch.nn.Parameter]) -> list[Tensor]:
    """Round the matrices in place to 4 bits, as the package stores them, and return what they were."""
    before = [matrix.detach().clone() for matrix in matrices]
    for matrix in matrices:
        matrix.copy_(dequantize(quantize(matrix.detach(), 4)))
    return before


@torch.no_grad()
def restore(matrices: list[torch.nn.Parameter], before: list[Tensor]) -> None:
    for matrix, old in zip(matrices, before, strict=True):
        matrix.copy_(old)


def train(options: argparse.Namespace) -> None:
    """Train one drafter, and write its folder and record."""
    began, device = time.monotonic(), options.device
    folder, target = load_target(options.target, device)
    start = parse_initial_weights(options.drafter)
    vocab_size = int(target.config.vocab_size)
    kept = _token_map(options, start, vocab_size)
    model = build(start, folder, 0, None if kept is None else kept.tolist())
    if isinstance(model, TrainableHead):
        kept = model.token_map
        reads: tuple[int, ...] | None = tuple(model.model.reads)
        if options.freeze_ends and hasattr(model.model, "lm_head"):
            model.model.lm_head.requires_grad_(False)
    else:
        reads = None
        if options.freeze_ends:
            model.get_input_embeddings().requires_grad_(False)
    ends = () if reads is not None else (model.get_input_embeddings().weight,)  # their precision is not changed
    matrices = [one for one in model.parameters() if one.ndim == 2 and one.shape[1] % 32 == 0 and one not in set(ends)]
    matrices = matrices if options.rounding < 1 else []
    model.to(device)
    kept = None if kept is None else kept.to(device)
    drafter = draft_logits_of(model, kept).to(device)
    texts = Texts(options.texts, target, kept, device, reads)
    count = sum(one.numel() for one in model.parameters() if one.requires_grad)
    peak = options.learning_rate or learning_rate_for(count)
    optimizers = make_optimizers(model, peak, torch.device(device))
    drafter.train()
    step = tokens = 0
    began_training = time.monotonic()
    budget = options.seconds - (began_training - began) - options.reserve
    record: list[dict[str, float]] = [evaluated(drafter, texts, device) | {"step": 0}]
    print(json.dumps(record[-1]), file=sys.stderr, flush=True)
    while (part := (time.monotonic() - began_training) / budget) < 1:
        rate = peak * min(1.0, (step + 1) / 50) * (1 - 0.98 * part)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        rows = texts.next_rows(options.batch_tokens)
        batch, probs, mass = texts.batch(rows)
        before = rounded(matrices) if matrices and part > options.rounding else None
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            found = drafter(batch)
        loss, overlap, equal = loss_of(found, probs, mass)
        loss.backward()
        if before is not None:
            restore(matrices, before)
        torch.nn.utils.clip_grad_norm_([one for one in model.parameters() if one.requires_grad], 1.0, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + sum(texts.lengths[i] for i in rows)
        if step % 100 == 0 or step == 5:
            record.append(
                {"step": step, "tokens": tokens, "seconds": round(time.monotonic() - began_training, 1), "rate": rate,
                 "loss": round(float(loss), 4), "overlap": round(float(overlap), 4), "equal": round(float(equal), 4)}
            )  # fmt: skip
            print(json.dumps(record[-1]), file=sys.stderr, flush=True)
    if matrices:
        rounded(matrices)
    record.append(evaluated(drafter, texts, device) | {"step": step, "tokens": tokens})
    print(json.dumps(record[-1]), file=sys.stderr, flush=True)
    export(model, folder, options.out, None if isinstance(model, TrainableHead) or kept is None else kept.tolist())
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def evaluated(drafter: Any, texts: Texts, device: str) -> dict[str, float]:
    """Return the mean overlap and the part of equal best tokens of the first level, on texts that are held out."""
    drafter.eval()
    sums = np.zeros(3)
    for rows in texts.held_out(64):
        batch, probs, mass = texts.batch(rows)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            found = drafter(batch)
        _, overlap, equal = loss_of(found, probs, mass)
        sums += np.array([float(overlap), float(equal), 1.0]) * [len(probs), len(probs), len(probs)]
    drafter.train()
    return {"held-out overlap": round(sums[0] / sums[2], 4), "held-out equal": round(sums[1] / sums[2], 4)}


def _token_map(options: argparse.Namespace, start: Any, vocab_size: int) -> Tensor | None:
    if start.folder is not None and not start.is_head:
        return read_token_map(start.folder, vocab_size)
    if options.token_map is None:
        return None
    stored = torch.load(options.texts, weights_only=True)
    places = torch.arange(stored["tokens"].shape[1])
    is_output = (places >= stored["prompts"][:, None]) & (places < stored["lengths"][:, None])
    counts = torch.bincount(stored["tokens"][is_output], minlength=vocab_size)
    return counts.topk(options.token_map).indices.sort().values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["texts", "train"])
    parser.add_argument("target", choices=list(_ROWS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=240.0, help="that the whole stage may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=65_536, help="prompts, or user turns that the model is asked for")
    parser.add_argument(
        "--corpus", type=Path, help="tokens of the code target's training files, .npy; default: these files"
    )
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--drafter", default="new:eagle3")
    parser.add_argument("--token-map", type=int)
    parser.add_argument("--freeze-ends", action="store_true", help="train neither embeddings nor output heads")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument(
        "--rounding",
        type=float,
        default=0.6,
        help="part of the time after which matrices are rounded to 4 bits; 1: never",
    )
    parser.add_argument("--reserve", type=float, default=15.0, help="seconds kept for the last evaluation and writing")
    options = parser.parse_args()
    (write_texts if options.stage == "texts" else train)(options)


if __name__ == "__main__":
    main()
