"""The turns of a run on split targets: the requests to each arm, the measured runs that are kept, and predictions."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.parallel.engine import EngineAsk
from benchmarks.parallel.plans import WHOLE, ParallelBenchConfig, Setting, Turn
from benchmarks.parallel.prediction import HereCosts, predict
from benchmarks.parallel.processes import Engine
from specinfer.bench.comparisons import Comparison
from specinfer.bench.options import PLAIN
from specinfer.bench.results import Arm, Run
from specinfer.planning.cluster import TargetShape


class ParallelTurns:
    """Execution of turns one after the other, which keeps all runs but the warm-up runs.

    Args:
        engines: Engine of each split.
    """

    def __init__(
        self,
        config: ParallelBenchConfig,
        prompts: Sequence[list[int]],
        engines: Mapping[str, Engine],
        shape: TargetShape,
        here: HereCosts,
    ) -> None:
        self._config, self._prompts, self._engines = config, prompts, engines
        self._shape, self._here = shape, here
        self._runs: dict[tuple[Setting, int, float, str], list[Run]] = {}

    def run(self, turn: Turn, setting: Setting, stage: Callable[[str], None], done: Callable[[], None]) -> None:
        """Run all arms of a turn in one setting, and call `done` after each.

        Raises:
            RuntimeError: A request or a process failed.
        """
        size = len(turn.prompts)
        for tree in turn.trees:
            stage(f"{setting.name}, {size} together, temperature {turn.temperature:g}: {tree}")
            params = [self._config.sampling_params(i, turn.temperature, turn.most_tokens) for i in turn.prompts]
            most = params[0].max_tokens
            assert most is not None
            ask = EngineAsk(
                setting.name,
                tree,
                turn.repeat,
                turn.temperature,
                most,
                list(turn.prompts),
                [self._prompts[i] for i in turn.prompts],
                [one.seed or 0 for one in params],
            )
            made = self._engines[setting.split].measure(ask)
            if turn.repeat >= 0:
                self._runs.setdefault((setting, size, turn.temperature, tree), []).append(made)
            done()

    def results(self) -> tuple[Comparison, ...]:
        """Return the result of every setting and situation, with predictions."""
        situations = [(size, heat) for size in self._config.batch_sizes for heat in self._config.temperatures]
        return tuple(self._result(setting, *one) for setting in self._config.settings for one in situations)

    def _result(self, setting: Setting, size: int, temperature: float) -> Comparison:
        plain, *trees = (self._arm(setting, size, temperature, tree) for tree in (PLAIN, *self._config.trees))
        return Comparison(plain, tuple(trees), {"setting": setting, "temperature": temperature})

    def _arm(self, setting: Setting, size: int, temperature: float, tree: str) -> Arm:
        runs = tuple(self._runs[setting, size, temperature, tree])
        if setting == WHOLE:
            return Arm(tree, runs, {"predicted": None})
        alone = self._runs[WHOLE, size, temperature, tree]
        link = self._config.link(setting)
        return Arm(tree, runs, {"predicted": predict(setting, tree, size, alone, self._shape, self._here, link)})
