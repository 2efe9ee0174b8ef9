"""Terminal output: text as it is generated, coloured by drafter, and statistics below it.

Text goes to standard output, statistics and messages to standard error, so a pipe carries text only. Colours are used
only on a terminal, and not if NO_COLOR is set.
"""

import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specinfer.cli.loading import FirstToken
from specinfer.cli.stretches import Painter, Piece, Stretch, WordWrap, id_stretches, pieces_of
from specinfer.core.progress import gigabytes
from specinfer.core.text import counted

if TYPE_CHECKING:  # importing these imports torch, which takes seconds
    from specinfer.core.lora import LoRARequest
    from specinfer.core.outputs import RequestOutput
    from specinfer.core.sampling import SamplingParams
    from specinfer.inputs.arguments import Prompt
    from specinfer.llm import LLM
    from specinfer.model.offload.streamed_layer import LayerStream
    from specinfer.policy.rule_choice import RuleChoice

TARGET_COLOR = "yellow"
DRAFTER_COLORS = ("green", "cyan", "magenta", "blue")
_EXCERPT = 60  # characters
# A model may generate any byte; those that would move the cursor, change the terminal or reverse the text are replaced.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text without characters that would move the cursor or change the terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class Colors:
    """The colours of the origins of tokens, given to drafters in the order in which they are seen."""

    def __init__(self) -> None:
        self.seen: dict[str | None, str] = {}

    def __call__(self, origin: str | None) -> str:
        if origin not in self.seen:
            met = sum(name is not None for name in self.seen)
            self.seen[origin] = TARGET_COLOR if origin is None else DRAFTER_COLORS[met % len(DRAFTER_COLORS)]
        return self.seen[origin]


@dataclass(frozen=True, slots=True)
class Answer:
    """The text that was shown, with its statistics and output; both are None if it was stopped early."""

    text: str
    numbers: str | None
    output: "RequestOutput | None" = None


class Screen:
    """A display of the outputs of one model.

    Args:
        stats: Colour text by origin, and print statistics below it.
        wraps: Break lines of streamed text between words, on a terminal.
    """

    def __init__(self, *, stats: bool = False, wraps: bool = False) -> None:
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)
        self.stats = stats
        self.is_terminal = self.out.is_terminal
        self._wraps = wraps and self.is_terminal
        self.paints = stats and self.out.color_system is not None and not self.out.no_color
        self.color = Colors()
        self._stream: LayerStream | None = None
        self._read_before = 0  # bytes read when statistics were last printed
        self._rules: RuleChoice | None = None
        self._about_models: list[str] = []  # lines on drafters and compute paths, until they have been printed

    def watch(self, llm: "LLM") -> None:
        """Include what was chosen and computed how in the statistics, and reads of weights if streamed."""
        self._stream = llm.target.loaded.stream
        self._rules = llm.engine.rules
        self._num_read()
        if llm.drafter_choice is not None:
            self._about_models.append(f"drafters chosen: {llm.drafter_choice}")
        paths = " · ".join(f"{name}: {path}" for name, path in llm.compute_paths.items())
        self._about_models.append(f"computed by {paths}")

    def _num_read(self) -> int:
        """Return the bytes of weights that were read since the last call."""
        before = self._read_before
        self._read_before = 0 if self._stream is None else self._stream.bytes_read
        return self._read_before - before

    def write(self, stretches: Iterable[Stretch]) -> None:
        for origin, group in itertools.groupby(stretches, key=lambda stretch: stretch[1]):
            text = "".join(text for text, _ in group)
            if self.is_terminal:
                text = printable(text)
            if self.paints:
                self.out.out(text, style=self.color(origin), end="")
            else:
                sys.stdout.write(text)
        sys.stdout.flush()

    def end_line(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()

    def note(self, message: str) -> None:
        """Print one line on standard error."""
        self.err.print(Text(f"specinfer: {message}"))

    def note_if_empty(self, text: str, finish_reason: str | None, stop_reason: int | str | None) -> None:
        """Explain an output without text on standard error."""
        if text or finish_reason not in ("stop", "length"):
            return
        if stop_reason is not None:
            cause = f"it began with the stop {'string' if isinstance(stop_reason, str) else 'token'} {stop_reason!r}"
        else:
            ended = "the model ended it at once, with its end-of-text token"
            cause = ended if finish_reason == "stop" else "its tokens have no text"
        self.note(f"the output is empty: {cause}")

    def heading(self, text: str) -> None:
        self.out.print(Text(text, style="dim"))

    def stream(
        self,
        llm: "LLM",
        prompt: "Prompt",
        params: "SamplingParams",
        *,
        stoppable: bool,
        lora_request: "LoRARequest | None" = None,
    ) -> Answer:
        """Generate and show one completion; if `stoppable`, Ctrl-C ends only this completion."""
        outputs: list[RequestOutput] = []
        pieces = pieces_of(llm, llm.stream(prompt, params, lora_request=lora_request), outputs)
        text, _ = self.play(self._after_first(pieces, llm), stoppable=stoppable)
        lines = self._lines(outputs)
        for done in (done for output in outputs for done in output.outputs):
            self.note_if_empty(done.text, done.finish_reason, done.stop_reason)
        self.lines_of_numbers(lines)
        self.name_failures(outputs)
        numbers = "\n".join(lines[: 1 if self._rules is None else 2])  # without those about models
        return Answer(text, numbers or None, outputs[0] if outputs else None)

    def _after_first(self, pieces: Iterator[Piece], llm: "LLM") -> Iterator[Piece]:
        """Yield the pieces; until the first one, show on a terminal how far a streamed target is with the prompt."""
        if self._stream is not None and self.err.is_terminal:
            with self.err.status(FirstToken(llm)):
                first = next(pieces, None)
            if first is not None:
                yield first
        yield from pieces

    def play(self, pieces: Iterable[Piece], *, stoppable: bool) -> tuple[str, bool]:
        """Show the pieces of one text as they come; return the text, and whether it is complete."""
        shown: list[str] = []
        wrap = WordWrap(self.out.width) if self._wraps else None
        try:
            for text, stretches in pieces:
                self.write(stretches if wrap is None else wrap.add(stretches))
                shown.append(text)
            if wrap is not None:
                self.write(wrap.flush())
        except KeyboardInterrupt:
            self.end_line()
            if not stoppable:
                raise
            return "".join(shown), False
        self.end_line()
        return "".join(shown), True

    def show(self, llm: "LLM", outputs: Sequence["RequestOutput"]) -> None:
        """Show finished texts one after the other; on a terminal several texts get headings."""
        texts = [(i, done) for i, output in enumerate(outputs) if not output.error for done in output.outputs]
        for i, done in texts:
            if self.is_terminal and len(texts) > 1:
                part = f", output {done.index}" if len(outputs[i].outputs) > 1 else ""
                self.heading(f"── prompt {i}{part}: {_excerpt(outputs[i].prompt)}")
            if llm.tokenizer is None:
                self.write(id_stretches(done.token_ids, done.token_origins))
            else:
                painter = Painter(llm.tokenizer)
                painter.add(done.token_ids, done.token_origins)
                self.write(painter.cut(done.text))
            self.end_line()
            self.note_if_empty(done.text, done.finish_reason, done.stop_reason)
        self.numbers(outputs)

    def name_failures(self, outputs: Sequence["RequestOutput"]) -> bool:
        """Print the errors of prompts that were refused or failed; return whether there were any."""
        for i, output in enumerate(outputs):
            if output.error is not None:
                self.note(f"prompt {i}: {output.error}")
        return any(output.error is not None for output in outputs)

    def numbers(self, outputs: Sequence["RequestOutput"]) -> None:
        """Print the legend of the colours, and a line of statistics for each prompt."""
        self.lines_of_numbers(self._lines(outputs))

    def _lines(self, outputs: Sequence["RequestOutput"]) -> list[str]:
        served = [(i, output) for i, output in enumerate(outputs) if output.error is None]
        lines = [(f"prompt {i}: " if len(outputs) > 1 else "") + numbers_line(output) for i, output in served]
        num_read = self._num_read()
        if num_read and served:  # for all prompts together
            ends = [output.metrics.finished_time or 0.0 for _, output in served]
            seconds = max(ends) - min(output.metrics.arrival_time for _, output in served)
            lines[-1] += f" · read {gigabytes(num_read, seconds)}" if len(served) == 1 else ""
            lines += [f"all prompts: read {gigabytes(num_read, seconds)}"] if len(served) > 1 else []
        if served:
            lines += [] if self._rules is None else [self._rules.summary()]
            lines, self._about_models = [*lines, *self._about_models], []
        return lines

    def lines_of_numbers(self, lines: Sequence[str]) -> None:
        if not (self.stats and lines):
            return
        if self.paints and self.color.seen:
            legend = Text("\n")
            for origin in sorted(self.color.seen, key=lambda origin: origin is None):
                words = "generated by the target" if origin is None else f"drafted by {origin}, accepted"
                legend.append(f"■ {words}   ", style=self.color(origin))
            self.out.print(legend)
        for line in lines:
            self.err.print(Text(line, style="dim"), soft_wrap=not self.err.is_terminal)


def numbers_line(output: "RequestOutput") -> str:
    """Return one prompt's tokens, tokens per target pass, acceptance, time and speed."""
    tokens = sum(len(done.token_ids) for done in output.outputs)
    seconds = (output.metrics.finished_time or 0.0) - output.metrics.arrival_time
    origins = [origin for done in output.outputs for origin in done.token_origins]
    return stats_line(tokens, seconds, output.metrics.speculative_decoding, origins)


def stats_line(tokens: int, seconds: float, stats: Any, origins: Sequence[str | None] = ()) -> str:
    """Return a line of statistics, and one on why no tree was used; without `stats` it has no passes.

    Args:
        origins: The drafter of each token, or None for the target; of several drafters, the tokens of each are shown.
    """
    seconds = max(seconds, 1e-9)
    speed = f"{seconds:.2f} s · {tokens / seconds:.1f} tokens/s"
    if not stats:
        return f"{counted(tokens, 'token')} · {speed}"
    num_accepted, num_drafted = stats["num_accepted_draft_tokens"], stats["num_draft_tokens"]
    drafted = (
        f"{num_accepted} of {num_drafted} draft tokens accepted ({num_accepted / num_drafted:.0%})"
        if num_drafted
        else "no draft tokens"
    )
    drafters = Counter(origin for origin in origins if origin is not None)
    if len(drafters) > 1:
        drafted += ", by " + ", ".join(f"{name} {count}" for name, count in drafters.most_common())
    made = f"{counted(tokens, 'token')} in {counted(stats['num_target_passes'], 'target pass')}"
    reason = f"\n{stats['reason']}" if stats.get("reason") else ""
    return f"{made}: {stats['tokens_per_pass']:.2f} a pass · {drafted} · {speed}{reason}"


def _excerpt(prompt: str | None) -> str:
    words = " ".join((prompt or "token ids").split())
    return words if len(words) <= _EXCERPT else words[: _EXCERPT - 1] + "…"
