"""Latency of one request at a time: plain decoding and token trees, on the same loaded weights.

Each arm streams the same tokens. The clock starts at the first of them. Other engines, if given, take turns too.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from rich.console import Console

from specinfer.bench.latency_report import LatencyReport, plot_latency
from specinfer.bench.loop import (
    Prepare,
    Session,
    Turn,
    check_equal,
    comparisons,
    is_exact,
    open_session,
    schedule,
    take_turns,
    write_files,
)
from specinfer.bench.measurement import measure_request
from specinfer.bench.options import PLAIN, CompareConfig
from specinfer.bench.results import Run
from specinfer.core.sampling import SamplingParams
from specinfer.reporting.environment import Environment
from specinfer.reporting.files import options_of


class OtherEngines(Protocol):
    """Engines of other projects that are measured in turns with ours."""

    @property
    def names(self) -> list[str]:
        """Names of the engines that have not failed."""

    def measure(self, name: str, prompt: list[int], params: SamplingParams, number: int, repeat: int) -> Run | None:
        """Measure one run, or return None if the engine has failed."""


def run_latency(
    config: CompareConfig,
    console: Console | None = None,
    others: Callable[[Session], AbstractContextManager[OtherEngines]] | None = None,
    prepare: Prepare | None = None,
) -> LatencyReport:
    """Measure latency, and write the requested files. Progress is shown if the console is a terminal.

    Args:
        others: Function that starts other engines. The report is about our arms only.
        prepare: Function that changes the models before they are loaded.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A request failed, or a tree changed a greedy output of a float32 target without quantization.
    """
    with ExitStack() as stack:
        session = stack.enter_context(open_session(config, console, prepare))
        engines = None if others is None else stack.enter_context(others(session))
        exact = is_exact(session.llm.target.loaded, config.temperature)

        def measure(turn: Turn, name: str) -> Run | None:
            (number,), (prompt,), (params,) = turn.prompts, *session.batch(turn)
            if (policy := session.policies.get((1, name))) is not None:
                return measure_request(session.llm, policy, prompt, params, number, turn.repeat, session.roofline)
            assert engines is not None
            return engines.measure(name, prompt, params, number, turn.repeat)

        def check(turn: Turn, made: Mapping[str, Run]) -> None:
            if exact:
                check_equal(turn, {name: run for name, run in made.items() if (1, name) in session.policies})

        names = [PLAIN, *config.trees, *([] if engines is None else engines.names)]
        turns = list(schedule(config, len(session.prompts.token_ids), names))
        (result,) = comparisons(config, take_turns(turns, session.progress, measure, check))
        report = LatencyReport(
            result,
            options_of(config),
            Environment.from_llm(session.llm, session.models.drafter_parameters),
            session.roofline.ceilings,
            session.prompts.kinds,
        )
    write_files(report, config.json, config.plot, plot_latency)
    return report
