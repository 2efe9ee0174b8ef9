"""Examples: what the target said, and how likely it found that and the best other tokens, kept compactly.

A drafter learns from the target's own distributions. Of each only the best few tokens are kept, in two bytes each for
the id and the logarithm; what all others have together follows from them.
"""

import enum
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from specinfer.errors import first_line
from specinfer.request import Request
from specinfer.tree import TokenTree
from specinfer.verify import Acceptance

TOP = 32  # tokens of a distribution that are kept


class DamagedError(ValueError):
    """A file that an earlier part of a run left and that cannot be used; the message names it."""


class Source(enum.IntEnum):
    """Where the tokens of an example come from."""

    SAMPLED = 0  # the target, at temperature 1 or another
    GREEDY = 1  # the target, each token its best one
    READ = 2  # a text that the target has read


@dataclass(frozen=True, slots=True, eq=False)
class TrainingExample:
    """One output with its prompt; or a text that was read, of which all but the first token counts as output.

    Attributes:
        tokens: [num_tokens] int32, prompt then output.
        num_prompt: How many of them are the prompt's.
        top_ids: [num_output, top] int32, the target's best tokens at each place of the output, the best first.
        top_logprobs: [num_output, top] float16, of its distribution at temperature 1, before processing.
        generated_logprobs: [num_output] float16, of the token said.
        seed: Of the noise that chose the tokens of sampled text.
        source: How its tokens came about.
    """

    tokens: npt.NDArray[np.int32]
    num_prompt: int
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float16]
    generated_logprobs: npt.NDArray[np.float16]
    seed: int = 0
    source: Source = Source.GREEDY

    def __post_init__(self) -> None:
        assert 1 <= self.num_prompt <= len(self.tokens)
        assert len(self.top_ids) == len(self.top_logprobs) == len(self.generated_logprobs) == self.num_output

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


class ExampleRecorder:
    """An observer of the engine that makes an example of each request that ends well.

    It keeps what it saw of a request until `finish` or `forget` is called with it.

    Args:
        top: Tokens of each distribution that are kept.
    """

    reads_logits = True

    def __init__(self, top: int = TOP) -> None:
        self._top = top
        self._ids: dict[str, list[Tensor]] = {}
        self._logprobs: dict[str, list[Tensor]] = {}
        self._said: dict[str, list[Tensor]] = {}

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        places = torch.tensor((0, *acceptance.path)[:num_generated], device=logits.device)
        logprobs = logits[places].float().log_softmax(-1)
        best = logprobs.topk(min(self._top, logprobs.shape[-1]), dim=-1)
        tokens = torch.tensor(request.token_ids[len(request.token_ids) - num_generated :], device=logits.device)
        name = request.request_id
        self._ids.setdefault(name, []).append(best.indices.int().cpu())
        self._logprobs.setdefault(name, []).append(best.values.half().cpu())
        self._said.setdefault(name, []).append(logprobs.gather(1, tokens[:, None])[:, 0].half().cpu())

    def on_step(self, record: object) -> None:
        pass

    def finish(self, request: Request) -> TrainingExample | None:
        """The example of a request that has ended; None if it said nothing, or not all of it was seen."""
        ids, logprobs, said = (notes.pop(request.request_id, []) for notes in (self._ids, self._logprobs, self._said))
        if not ids or sum(map(len, ids)) != request.num_output:
            return None
        return TrainingExample(
            np.asarray(request.token_ids, dtype=np.int32),
            len(request.prompt_ids),
            torch.cat(ids).numpy(),
            torch.cat(logprobs).numpy(),
            torch.cat(said).numpy(),
            request.seed,
            Source.GREEDY if request.params.is_greedy else Source.SAMPLED,
        )

    def forget(self, request: Request) -> None:
        """Drops what was seen of a request that was aborted or failed, if anything was."""
        for notes in (self._ids, self._logprobs, self._said):
            notes.pop(request.request_id, None)


class TrainingExamples(Sequence[TrainingExample]):
    """Some examples in common arrays, as they lie in a file."""

    def __init__(self, examples: Iterable[TrainingExample]) -> None:
        self._examples = list(examples)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # both a number and a slice
        return self._examples[index]

    @property
    def num_tokens(self) -> int:
        """Said by the target."""
        return sum(example.num_output for example in self._examples)

    def save(self, path: Path) -> None:
        """Writes one file, in one move.

        Raises:
            OSError: It cannot be written; a file that was there stays as it was.
        """
        assert self._examples
        is_small = max(int(example.top_ids.max(initial=0)) for example in self._examples) < 2**16
        meta = np.asarray(
            [(len(one.tokens), one.num_prompt, one.seed, int(one.source)) for one in self._examples], dtype=np.int64
        )
        arrays = {
            "meta": meta,
            "tokens": np.concatenate([one.tokens for one in self._examples]),
            "top_ids": np.concatenate([one.top_ids for one in self._examples]).astype(
                np.uint16 if is_small else np.int32
            ),
            "top_logprobs": np.concatenate([one.top_logprobs for one in self._examples]),
            "generated_logprobs": np.concatenate([one.generated_logprobs for one in self._examples]),
        }
        write_atomically(path, lambda partial: save_file(arrays, partial))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises DamagedError if the file is none of these."""
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            meta = arrays["meta"]
            lengths, prompts = meta[:, 0], meta[:, 1]
            ends = lengths.cumsum()
            output_ends = (lengths - prompts).cumsum()
            found = []
            for (length, num_prompt, seed, source), end, output_end in zip(
                meta.tolist(), ends.tolist(), output_ends.tolist(), strict=True
            ):
                part = slice(output_end - (length - num_prompt), output_end)
                found.append(
                    TrainingExample(
                        arrays["tokens"][end - length : end],
                        num_prompt,
                        arrays["top_ids"][part].astype(np.int32),
                        arrays["top_logprobs"][part],
                        arrays["generated_logprobs"][part],
                        seed,
                        Source(source),
                    )
                )
        except (OSError, SafetensorError, KeyError, IndexError, ValueError, AssertionError) as error:
            raise DamagedError(f"{path} cannot be read as examples ({type(error).__name__}); delete it") from error
        return cls(found)


def write_atomically(path: Path, write: Callable[[str], None]) -> None:
    """Calls `write` with a name beside `path`, and moves what it wrote there into place.

    Raises:
        OSError: It cannot be written; a file that was there stays as it was.
    """
    partial = path.with_name(f".{path.name}-partial")  # of one that was cut off, the next is written over it
    try:
        write(str(partial))
        os.replace(partial, path)
    except SafetensorError as error:  # so it tells of a full disk
        raise OSError(first_line(error)) from error
    finally:
        partial.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples side by side, padded at the end.

    Attributes:
        tokens: [rows, length] int64.
        rows, places: [said] where the logits stand that foresee each token said by the target.
        top_ids: [said, top] int64.
        top_logprobs: [said, top] float32.
        said: [said] int64, the token itself.
        generated_logprobs: [said] float32.
    """

    tokens: Tensor
    rows: Tensor
    places: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    said: Tensor
    generated_logprobs: Tensor

    def to(self, device: torch.device) -> Self:
        return type(self)(*(getattr(self, name).to(device) for name in self.__slots__))


def collate(examples: Sequence[TrainingExample]) -> Batch:
    """A batch of these examples."""
    length = max(len(example.tokens) for example in examples)
    tokens = torch.zeros((len(examples), length), dtype=torch.long)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = torch.from_numpy(example.tokens)
    counts = [example.num_output for example in examples]
    # What foresees the first token of the output stands at the last one of the prompt.
    places = np.concatenate([np.arange(example.num_prompt - 1, len(example.tokens) - 1) for example in examples])
    return Batch(
        tokens,
        torch.from_numpy(np.repeat(np.arange(len(examples)), counts)),
        torch.from_numpy(places),
        torch.from_numpy(np.concatenate([example.top_ids for example in examples])).long(),
        torch.from_numpy(np.concatenate([example.top_logprobs for example in examples])).float(),
        torch.from_numpy(np.concatenate([example.tokens[example.num_prompt :] for example in examples])).long(),
        torch.from_numpy(np.concatenate([example.generated_logprobs for example in examples])).float(),
    )
