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

from demo_pair.target_texts import TARGETS, Texts, load_target, write_texts
from specinfer.learning.distillation import LEVEL_SHARE, HeadLogits
from specinfer.learning.heads.head import TrainableHead
from specinfer.learning.optimizers import learning_rate_for, make_optimizers
from specinfer.learning.trainable import export
from specinfer.learning.tune.initial_weights import build, parse_initial_weights
from specinfer.model.folder import read_token_map
from specinfer.ops.quantization import dequantize, quantize


def loss_of(
    found: Tensor | HeadLogits, probs: Tensor, mass: Tensor, *, is_recorded: bool
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss, and of the first level the mean overlap and the part of equal best tokens, if asked for."""
    if isinstance(found, Tensor):
        outputs = torch.arange(len(found), device=found.device)
        found = HeadLogits(found, outputs, torch.zeros_like(outputs), None)
    first, seen = found.levels == 0, {}
    if is_recorded:  # before the loss, which overwrites the logits
        with torch.no_grad():
            same = probs[found.outputs[first]].argmax(-1) == found.logits[first].argmax(-1)
            seen["equal"] = float((same * mass[found.outputs[first]]).mean())
    weights = LEVEL_SHARE**found.levels * mass[found.outputs]
    weights = weights / weights.sum()
    loss, overlap = rejection_loss(found.logits, probs, found.outputs, weights)
    if found.accepted is not None:
        confidence = binary_cross_entropy(found.accepted.float(), overlap.clamp(0, 1), reduction="none")
        loss = loss + (confidence * weights).sum()
    if is_recorded:
        seen["overlap"] = float((overlap[first] * mass[found.outputs[first]]).mean())
    return loss, seen


def rejection_loss(logits: Tensor, probs: Tensor, outputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of KL(p || q) + 1 - sum(min(p, q)), and the [rows] overlaps sum(min(p, q))."""
    if logits.device.type == "cuda":
        from demo_pair.gpu_rows import rejection_loss_on_gpu  # needs Triton

        return rejection_loss_on_gpu(logits, probs, outputs, weights)
    p, log_q = probs[outputs], logits.log_softmax(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    divergence = (torch.xlogy(p, p) - p * log_q).sum(-1)
    return ((divergence + 1 - overlap) * weights).sum(), overlap.detach()


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
    drafter = build(start, folder, 0, None if kept is None else kept.tolist()).to(device)
    reads: tuple[int, ...] | None = None
    ends: tuple[Tensor, ...] = ()  # whose precision is not changed
    if isinstance(drafter, TrainableHead):
        reads = tuple(drafter.model.reads)
        if options.freeze_ends and hasattr(drafter.model, "lm_head"):
            drafter.model.lm_head.requires_grad_(False)
    else:
        ends = (drafter.model.get_input_embeddings().weight,)
        if options.freeze_ends:
            drafter.freeze_embeddings()
    matrices = [one for one in drafter.parameters() if one.ndim == 2 and one.shape[1] % 32 == 0]
    matrices = [one for one in matrices if one not in set(ends)] if options.rounding < 1 else []
    texts = Texts(options.texts, target, drafter.token_map, device, reads)
    count = sum(one.numel() for one in drafter.parameters() if one.requires_grad)
    peak = options.learning_rate or learning_rate_for(count)
    optimizers = make_optimizers(drafter, peak, torch.device(device))
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
        is_recorded = (step + 1) % 100 == 0 or step == 4
        loss, seen = loss_of(found, probs, mass, is_recorded=is_recorded)
        loss.backward()
        if before is not None:
            restore(matrices, before)
        torch.nn.utils.clip_grad_norm_([one for one in drafter.parameters() if one.requires_grad], 1.0, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + sum(texts.lengths[i] for i in rows)
        if is_recorded:
            seen |= {"loss": float(loss.detach()), "seconds": time.monotonic() - began_training}
            rounded_off = {name: round(one, 4) for name, one in seen.items()}
            record.append({"step": step, "tokens": tokens, "rate": rate} | rounded_off)
            print(json.dumps(record[-1]), file=sys.stderr, flush=True)
    if matrices:
        rounded(matrices)
    record.append(evaluated(drafter, texts, device) | {"step": step, "tokens": tokens})
    print(json.dumps(record[-1]), file=sys.stderr, flush=True)
    export(drafter, options.out, None if isinstance(drafter, TrainableHead) else folder)
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
        _, seen = loss_of(found, probs, mass, is_recorded=True)
        sums += len(probs) * np.array([seen["overlap"], seen["equal"], 1.0])
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
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=240.0, help="that the whole stage may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=65_536, help="prompts, or user turns that the model is asked for")
    parser.add_argument("--answers", type=int, default=1, help="texts that are written after each prompt")
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
