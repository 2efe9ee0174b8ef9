"""The command that shows a trace: the tree of each step, the text it led to, and statistics of all steps."""

import contextlib
import time
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from specinfer.cli.errors import checking
from specinfer.cli.options import flag
from specinfer.cli.recording import AcceptanceCounts, Recorded, Recording, Step, Tally
from specinfer.cli.screen import Colors, printable
from specinfer.cli.terminal import is_interactive, read_key, single_keys
from specinfer.cli.tree_view import render_tree
from specinfer.core.text import counted

_SHOWN = 600  # characters shown of the text so far
_HELP = "space: pause · ← →: step · home end · q: leave"


def trace(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Trace file written by specinfer serve --trace.")],
    *,
    request: Annotated[str | None, flag("Filter", "Show only this request.", metavar="ID")] = None,
    step: Annotated[int | None, flag("Filter", "Show only this step of each request, from 1.")] = None,
    summary: Annotated[
        bool, flag("Filter", "Show only acceptance totals by depth, rank and drafter.", "--summary")
    ] = False,
    delay: Annotated[
        float | None, flag("Replay", "Delay after each step, in seconds. (default: 0.5 at a terminal, else 0)")
    ] = None,
    speed: Annotated[float | None, flag("Replay", "Replay at the recorded pace times this factor.")] = None,
) -> None:
    """Replay the token trees of a server trace: accepted paths bold, rejected tokens dim."""
    with checking():
        if delay is not None and not 0 <= delay <= 3600:
            raise ValueError(f"--delay must be from 0 to 3600 seconds, not {delay:g}")
        if speed is not None and not 0 < speed <= 1e6:
            raise ValueError(f"--speed must be above 0 and at most 1e6, not {speed:g}")
        if delay is not None and speed is not None:
            raise ValueError("--delay and --speed: give one of them")
        recording = Recording(file)
    with contextlib.closing(recording):
        with checking():
            chosen = _choose(recording, request, step)
        player = Player(recording, chosen, step, delay, speed)
        if summary:
            player.summarize()
        elif step is None and is_interactive() and player.console.is_terminal:
            player.play()
        else:
            player.print_all()


def _choose(recording: Recording, name: str | None, step: int | None) -> list[Recorded]:
    chosen = [request for request in recording.requests if name is None or request.name == name]
    if name is not None and not chosen:
        known = ", ".join(request.name for request in recording.requests[:8]) or "none"
        raise ValueError(f"--request {name} is not in {recording.path}; there are {known}")
    most = max((len(request.offsets) for request in chosen), default=0)
    if step is not None and not 1 <= step <= most:
        raise ValueError(f"--step must be from 1 to {most}, the steps of the longest request, not {step}")
    return chosen


class Player:
    """A display of the chosen requests of a recording."""

    def __init__(
        self,
        recording: Recording,
        requests: list[Recorded],
        step: int | None,
        delay: float | None,
        speed: float | None,
    ) -> None:
        self.console = Console(highlight=False)
        self._recording, self._requests = recording, requests
        self._only, self._delay, self._speed = step, delay, speed
        self._color = Colors()
        self._emitted: dict[str, list[list[tuple[str, str | None]]]] = {}  # by request, the tokens of each step

    # ------------------------------------------------------------------------------------- showing

    def print_all(self) -> None:
        """Print one step after the other."""
        for request in self._requests:
            self.console.print(self._heading(request))
            tokens: list[tuple[str, str | None]] = []
            last = None
            for number, step in enumerate(self._recording.steps(request), start=1):
                tokens += step.tokens()
                if self._only is None or number == self._only:
                    self._wait(last, step)
                    self.console.print(self._step(request, number, step, tokens))
                    last = step
            self.console.print(self._ending(request))
        self._name_gaps()

    def play(self) -> None:
        """Show steps on a cleared screen, controlled by keys; without keys like `print_all`."""
        with single_keys() as has_keys:
            if not has_keys:
                self.print_all()
                return
            places = [(request, i) for request in self._requests for i in range(len(request.offsets))]
            at, runs = 0, True
            while places:
                request, place = places[at]
                step = self._recording.step(request, place)
                tokens = self._tokens_before(request, place) + list(step.tokens())
                self.console.clear()
                self.console.print(self._heading(request), self._step(request, place + 1, step, tokens))
                is_last = at == len(places) - 1
                if place == len(request.offsets) - 1:
                    self.console.print(self._ending(request))
                self.console.print(Text(_HELP, style="dim"))
                match read_key(self._pause(request, place, step) if runs and not is_last else None):
                    case "q":
                        return
                    case " ":
                        runs = not runs
                    case "left":
                        at, runs = max(at - 1, 0), False
                    case "right" | "\n":
                        at, runs = min(at + 1, len(places) - 1), False
                    case "home":
                        at, runs = 0, False
                    case "end":
                        at, runs = len(places) - 1, False
                    case None:
                        at += 1
            self.print_all()

    def summarize(self) -> None:
        """Print statistics of all steps of the chosen requests."""
        tally = Tally()
        for request in self._requests:
            tally.add(self._recording.steps(request))
        accepted = (
            f"{tally.num_accepted} of {tally.num_drafted} draft tokens accepted"
            if tally.num_drafted
            else "no draft tokens"
        )
        self.console.print(
            f"{counted(len(self._requests), 'request')} of {self._recording.model or 'a model'}: "
            f"{counted(tally.num_generated, 'token')} in {counted(tally.num_passes, 'pass')}, "
            f"{tally.tokens_per_pass:.2f} a pass; {accepted}"
        )
        spread = ", ".join(
            f"{tokens}: {tally.passes_by_generated[tokens]}" for tokens in sorted(tally.passes_by_generated)
        )
        if spread:
            self.console.print(f"passes by the tokens they emitted: {spread}")
        if tally.num_drafted:
            self.console.print("\nDraft tokens that were verified, because their parent was accepted:")
            self.console.print(_table("depth", {str(depth): tally.by_depth[depth] for depth in sorted(tally.by_depth)}))
            self.console.print(_table("rank", {str(rank): tally.by_rank[rank] for rank in sorted(tally.by_rank)}))
            self.console.print(_table("drafter", dict(sorted(tally.by_drafter.items()))))
            self.console.print(
                "q: mean probability by the drafters · p: mean probability by the target, which is the share to "
                "be expected where text is sampled from its plain distribution"
            )
        self._name_gaps()

    # -------------------------------------------------------------------------------------- pieces

    def _tokens_before(self, request: Recorded, place: int) -> list[tuple[str, str | None]]:
        """Return the tokens generated before a step; each step is read once."""
        known = self._emitted.setdefault(request.name, [])
        while len(known) < place:
            known.append(list(self._recording.step(request, len(known)).tokens()))
        return [pair for pairs in known[:place] for pair in pairs]

    def _heading(self, request: Recorded) -> Text:
        params = ", ".join(f"{name}={value}" for name, value in request.params.items())
        return Text(printable(f"── request {request.name}" + (f" ({params})" if params else "")), style="dim")

    def _ending(self, request: Recorded) -> Text:
        if request.end is None:
            return Text("the trace ends before this request does\n", style="dim")
        stats = request.end.get("speculative_decoding")
        per_pass = stats.get("tokens_per_pass") if isinstance(stats, dict) else None
        ending = f"ended: {request.end.get('finish_reason')}"
        if isinstance(per_pass, int | float):
            ending += f" · {per_pass:.2f} tokens a pass"
        error = request.end.get("error")
        return Text(printable(ending + (f" · {error}" if error else "") + "\n"), style="dim")

    def _step(self, request: Recorded, number: int, step: Step, tokens: list[tuple[str, str | None]]) -> RenderableType:
        accepted = (
            f"{len(step.path)} of {counted(len(step.nodes), 'draft token')} accepted"
            if step.nodes
            else "no draft tokens"
        )
        title = f"step {number} of {len(request.offsets)} · {accepted} · {counted(step.num_generated, 'token')}"
        return Group(Text(title, style="bold"), self._text(request, tokens), render_tree(step, self._color))

    def _text(self, request: Recorded, tokens: list[tuple[str, str | None]]) -> Text:
        text = Text.assemble(
            (printable(request.prompt), "dim"), *((printable(part), self._color(origin)) for part, origin in tokens)
        )
        cut = len(text) - _SHOWN
        return Text("…") + text[cut:] if cut > 0 else text

    def _name_gaps(self) -> None:
        if self._recording.is_cut:
            self.console.print("the last line is incomplete and ignored: the server was killed, or still writes")
        if self._recording.num_skipped:
            lines = counted(self._recording.num_skipped, "line")
            self.console.print(f"{lines} were skipped when this was written: the disk was too slow")

    # -------------------------------------------------------------------------------------- pauses

    def _wait(self, last: Step | None, step: Step) -> None:
        if self._speed is not None and last is not None:
            time.sleep(max(step.time - last.time, 0) / self._speed)
        elif self._delay is not None and last is not None:
            time.sleep(self._delay)

    def _pause(self, request: Recorded, place: int, step: Step) -> float:
        if self._speed is None:
            return 0.5 if self._delay is None else self._delay
        if place + 1 == len(request.offsets):
            return 1.0
        return max(self._recording.step(request, place + 1).time - step.time, 0) / self._speed


def _table(name: str, shares: dict[str, AcceptanceCounts]) -> Table:
    table = Table(name, box=None)
    for word in ("verified", "accepted", "share", "q", "p"):
        table.add_column(word, justify="right")
    for label, share in shares.items():
        parts = (share.accepted, share.q, share.p)
        table.add_row(
            label, str(share.verified), str(share.accepted), *(f"{part / share.verified:.1%}" for part in parts)
        )
    return table
