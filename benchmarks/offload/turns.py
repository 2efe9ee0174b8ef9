"""Turns of a measurement on streamed targets: runs of each arm, their results, and checks of their outputs."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.disk import forget_pages
from benchmarks.offload.engine import OwnSetup
from benchmarks.offload.own import OwnArms
from benchmarks.offload.plans import OffloadBenchConfig, Turn, schedule
from benchmarks.offload.report import ResidentCheck
from benchmarks.peers.race import Peers
from benchmarks.resident import peak_resident, reset_peak
from specinfer.bench.comparisons import Comparison
from specinfer.bench.options import PLAIN
from specinfer.bench.results import Arm, Run
from specinfer.reporting.spread import first_difference, partings


class Turns:
    """Runner of turns, one after another, that keeps the measured runs."""

    def __init__(self, config: OffloadBenchConfig, prompts: Sequence[list[int]], own: OwnArms, peers: Peers) -> None:
        self._config, self._prompts = config, prompts
        self._own, self._peers = own, peers
        self._runs: dict[tuple[int, float, str], list[Run]] = {}  # by batch size, temperature and arm
        self._theirs: dict[tuple[str, float], list[Run]] = {}

    def prepare(self, stage: Callable[[str], None]) -> None:
        """Load the peers, and tune and warm up each on the first prompt."""
        long, short = (self._config.sampling_params(0, 0.0, most) for most in (None, self._config.peer_tokens))
        self._peers.start(long, stage)
        for name in self._peers.names:
            self._peers.tune(self._prompts[:1], long if self._peers.drafts(name) else short, stage, [name])

    def run(
        self, turn: Turn, look: Callable[[], float], stage: Callable[[str], None], done: Callable[[], None]
    ) -> None:
        """Run all arms of a turn, and call `done` after each.

        Args:
            look: Function that measures the bytes per second of the disk or link now. The rate of a shared disk varies,
                so a run is compared with the mean of the rates just before and just after it.

        Raises:
            RuntimeError: A request failed, or in float32 a tree changed a greedy output.
        """
        made: dict[str, Run] = {}
        before = None  # the rate after the previous arm, if that was one of ours
        for name in turn.arms:
            is_own, doing = name in (PLAIN, *self._config.trees), f"{len(turn.prompts)} together, "
            if is_own and turn.repeat >= 0 and before is None:
                before = look()
            stage(f"{doing}temperature {turn.temperature:g}: {name}" + ("" if turn.repeat >= 0 else ", to warm up"))
            if is_own:
                run = measure(self._own, name, turn, self._prompts, self._config)
                if before is not None:
                    after = look()
                    run, before = _with(run, disk_rate=(before + after) / 2), after
                made[name] = run
            else:
                before = None
            if name in self._peers.names:
                self._measure_peer(name, turn)
            done()
        plain = made[PLAIN].outputs
        for name, run in made.items():
            if is_exact(turn.temperature, self._own.loaded.dtype, self._config):
                what = f"{len(turn.prompts)} requests together, prompt {{}}: with tree {name}, output token {{}} is "
                _check_same(turn.prompts, plain, run.outputs, what + "another than without")
            if turn.repeat >= 0:
                self._runs.setdefault((len(turn.prompts), turn.temperature, name), []).append(run)

    def results(self) -> tuple[Comparison, ...]:
        made = []
        for size in self._config.batch_sizes:
            for temperature in self._config.temperatures:
                runs = {name: tuple(self._runs[size, temperature, name]) for name in (PLAIN, *self._config.trees)}
                plain, *trees = (Arm(name, kept) for name, kept in runs.items())
                made.append(Comparison(plain, tuple(trees), {"temperature": temperature}))
        return tuple(made)

    def peer_results(self) -> tuple[Arm, ...]:
        """Return an arm for each temperature of each peer that was not skipped, which has all its runs."""
        made = []
        for arm in self._peers.report().arms:
            cap = self._peers.process(arm.name).cap
            details = {**arm.details, "cap": cap.method, "limit": cap.limit}
            for temperature in self._config.temperatures:
                runs = tuple(self._theirs[arm.name, temperature])
                made.append(Arm(arm.name, runs, details | {"temperature": temperature}))
        return tuple(made)

    def _measure_peer(self, name: str, turn: Turn) -> None:
        (number,) = turn.prompts
        most = None if self._peers.drafts(name) else self._config.peer_tokens
        params, pid = self._config.sampling_params(number, turn.temperature, most), self._peers.process(name).pid
        forget_pages(self._peers.files(name))
        reset_peak(pid)
        run = self._peers.measure(name, self._prompts[number], params, number, turn.repeat)
        if run is not None:
            self._theirs.setdefault((name, turn.temperature), []).append(_with(run, peak_resident=peak_resident(pid)))


def measure(own: OwnArms, arm: str, turn: Turn, prompts: Sequence[list[int]], config: OffloadBenchConfig) -> Run:
    """Run one turn with one of our arms."""
    limits = turn.most_tokens, config.plain_tokens if arm == PLAIN else None
    most = min((limit for limit in limits if limit is not None), default=None)
    params = [config.sampling_params(number, turn.temperature, most) for number in turn.prompts]
    return own.measure(arm, turn.repeat, turn.prompts, [prompts[i] for i in turn.prompts], params)


def compare_resident(
    results: Sequence[Comparison], config: OffloadBenchConfig, prompts: Sequence[list[int]], job: OwnSetup
) -> ResidentCheck:
    """Repeat the plain decoding of the first repeat with the same weights in memory, and compare the outputs.

    Args:
        job: Setup that loads the whole target into memory.

    Raises:
        RuntimeError: A greedy output in float32 differs.
    """
    streamed = {
        (result.situation["temperature"], run.prompts): run.outputs
        for result in results
        for run in result.plain.runs
        if run.repeat == 0
    }
    num_outputs, parted = 0, list[int]()
    with OwnArms(replace(job, trees=[])) as whole:
        for turn in schedule(config, len(prompts)):
            if turn.repeat != 0:
                continue
            generated = measure(whole, PLAIN, turn, prompts, config).outputs
            expected = streamed[turn.temperature, turn.prompts]
            if is_exact(turn.temperature, whole.loaded.dtype, config):
                what = "prompt {}: streamed from the disk, output token {} is another than in memory"
                _check_same(turn.prompts, generated, expected, what)
            num_outputs += len(generated)
            parted += partings(zip(generated, expected, strict=True))
    return ResidentCheck(num_outputs, tuple(parted))


def is_exact(temperature: float, dtype: str, config: OffloadBenchConfig) -> bool:
    """Return whether passes of any size must give the same tokens.

    In half precision their rounding differs, and outputs that differ are counted.
    """
    return temperature == 0 and dtype == "float32" and config.quantization is None


def _check_same(
    numbers: Sequence[int], expected: Sequence[tuple[int, ...]], generated: Sequence[tuple[int, ...]], what: str
) -> None:
    for number, one, other in zip(numbers, expected, generated, strict=True):
        if one != other[: len(one)]:  # plain decoding may have been stopped earlier
            raise RuntimeError(what.format(number, first_difference(one, other)))


def _with(run: Run, **counters: float) -> Run:
    return replace(run, counters={**run.counters, **counters})
