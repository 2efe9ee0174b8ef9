"""Texts that an embedded target writes on a GPU, and batches of them for training."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chat_prompts import beginnings, is_turn, passages
from demo_pair.static_generation import StaticGenerator
from specinfer.demo.corpus import read_text, training_files
from specinfer.learning.batches import Batch
from specinfer.model.definition import load_plain, load_tokenizer
from specinfer.setup.model_names import find_target

TARGETS = ("demo", "demo-chat")
_ROWS, _CACHE_TOKENS = 4096, 1_500_000  # of texts that are written at once
_PROMPT, _NEW = 64, {"demo": 192, "demo-chat": 256}
_TEMPERATURES = {"demo": (0.0, 1.0), "demo-chat": (0.0, 0.7, 1.0)}
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
        for one, answer in zip(words[start : start + 4096], answers, strict=True):
            turn = (one + tokenizer.decode(answer[:-1])).strip()
            if answer[-1] == stop and is_turn(turn):
                turns.append(turn)
        print(f"{start + len(part)} of {count}: {len(turns)} kept", file=sys.stderr, flush=True)
    turns = list(dict.fromkeys(turns + passages(count // 8, seed)))
    chats = [[{"role": "user", "content": turn}] for turn in turns]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [prompt for prompt in prompts if len(prompt) + _NEW["demo-chat"] <= _LONGEST]


def groups_of(prompts: list[list[int]], num_new: int) -> list[list[list[int]]]:
    """Return prompts of about the same length together, as many as the cache can hold."""
    rest, groups = sorted(prompts, key=len, reverse=True), []
    while rest:
        count = max(1, min(_ROWS, _CACHE_TOKENS // (len(rest[0]) + num_new)))
        groups.append(rest[:count])
        rest = rest[count:]
    return groups


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
    groups = [prompts[:_HELD_OUT], *groups_of(prompts[_HELD_OUT:] * options.answers, _NEW[name])]
    texts: list[list[int]] = []
    sizes: list[int] = []
    temperatures = _TEMPERATURES[name]
    order = [0, *(1 + np.random.default_rng(0).permutation(len(groups) - 1))]  # a run that is cut short has all lengths
    for group in (groups[i] for i in order):
        if texts and time.monotonic() - began > options.seconds:
            break
        chosen = [temperatures[i % len(temperatures)] for i in range(len(group))]
        generated = generator.generate(group, chosen, _NEW[name], stop)
        texts += [[*prompt, *more] for prompt, more in zip(group, generated, strict=True)]
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
