"""Throughput of batches: plain decoding and token trees, on the same loaded weights.

All prompts of a batch are submitted at once, and the clock of decoding starts after the prefill of the last. Each
request then runs to its end. An output that is easy to predict ends early, so the last passes serve fewer requests.
"""

from collections.abc import Mapping

from rich.console import Console

from specinfer.bench.loop import (
    Prepare,
    Turn,
    check_equal,
    comparisons,
    is_exact,
    open_session,
    schedule,
    take_turns,
    write_files,
)
from specinfer.bench.measurement import measure_batch
from specinfer.bench.options import ThroughputConfig
from specinfer.bench.results import Run
from specinfer.bench.throughput_report import ThroughputReport, plot_throughput
from specinfer.reporting.environment import Environment
from specinfer.reporting.files import options_of


def run_throughput(
    config: ThroughputConfig, console: Console | None = None, prepare: Prepare | None = None
) -> ThroughputReport:
    """Measure throughput, and write the requested files. Progress is shown if the console is a terminal.

    Args:
        prepare: Function that changes the models before they are loaded.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A request failed, or a tree changed a greedy output of a float32 target without quantization.
    """
    with open_session(config, console, prepare) as session:
        llm, exact = session.llm, is_exact(session.llm.target.loaded, config.temperature)

        def measure(turn: Turn, name: str) -> Run:
            prompts, params = session.batch(turn)
            policy = session.policies[len(turn.prompts), name]
            return measure_batch(llm, policy, turn.prompts, prompts, params, turn.repeat, roofline=session.roofline)

        def check(turn: Turn, made: Mapping[str, Run]) -> None:
            if exact:
                check_equal(turn, made)

        turns = list(schedule(config, len(session.prompts.token_ids)))
        report = ThroughputReport(
            comparisons(config, take_turns(turns, session.progress, measure, check)),
            options_of(config),
            Environment.from_llm(llm, session.models.drafter_parameters),
            session.roofline.ceilings,
            session.prompts.kinds,
        )
    write_files(report, config.json, config.plot, plot_throughput)
    return report
