"""What the GPU path must show, held against reports of `specinfer bench`, and each report in a few words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Reports = Mapping[str, Any]  # name of a stage -> what its command wrote

FLOOR = 1.15  # the target's pass over its floor, up to 64 nodes
ARM = "batch-invariant"  # ends the names of arms whose passes are
BESIDE = 25.0  # percent of a step that is not the target's pass
GREEDY, SAMPLED, ASSISTED = 3.0, 2.3, 3.0  # over plain decoding, and over assisted generation, one request at a time
OF_EIGHT, OF_MANY = 1.8, 0.98  # over plain decoding, eight requests together and up to 64
INVARIANT = 1.1  # time of a pass of up to 64 rows with batch_invariant over that without


@dataclass(frozen=True, slots=True)
class Target:
    """A number that must be at most, or at least, what is asked."""

    name: str
    asked: float
    seen: float | None  # None: not measured
    is_limit: bool = False

    @property
    def is_met(self) -> bool | None:
        if self.seen is None:
            return None
        return self.seen <= self.asked if self.is_limit else self.seen >= self.asked

    def line(self) -> str:
        seen = "-" if self.seen is None else f"{self.seen:.2f}"
        sign = "<=" if self.is_limit else ">="
        said = {None: "not measured", True: "met", False: "MISSED"}[self.is_met]
        return f"{self.name:58}  {sign} {self.asked:5.2f}  {seen:>6}  {said}"


def targets(reports: Reports) -> list[Target]:
    """All of them, of the large target; those whose stage was not run have seen nothing."""
    greedy, sampled = reports.get("latency-large-greedy"), reports.get("latency-large-sampled")
    together, peers = _together(reports), reports.get("peers-large")
    compared, passes = reports.get("identity-large"), reports.get("passes-large")
    return [
        Target("target's pass over its floor, every tree", FLOOR, _worst_pass(greedy), is_limit=True),
        Target("draft, walk, commit, host: percent of a step", BESIDE, _beside(greedy), is_limit=True),
        Target("over plain decoding, greedy, alone", GREEDY, _get(greedy, "speedup")),
        Target("over plain decoding, sampled, alone", SAMPLED, _get(sampled, "speedup")),
        Target("over plain decoding, 8 together", OF_EIGHT, together.get(8)),
        Target("over plain decoding, the least up to 64 together", OF_MANY, min(together.values(), default=None)),
        Target("over transformers' assisted generation", ASSISTED, _over_assisted(peers)),
        Target("batch_invariant: tokens that differ", 0.0, _get(compared, "num_differing"), is_limit=True),
        Target("batch_invariant: time of a pass, the most", INVARIANT, _most_invariant(passes), is_limit=True),
    ]


def _get(report: Any, name: str) -> float | None:
    return None if report is None else report[name]


def _worst_pass(report: Any) -> float | None:
    arms = {} if report is None else report["arms"]
    ratios = [arm["stages"].get("over_floor", {}).get("target") for arm in arms.values()]
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _beside(report: Any) -> float | None:
    return None if report is None else report["arms"][report["tree"]]["stages"].get("percent_beside_target")


def _together(reports: Reports) -> dict[int, float]:
    """Batch size -> speedup, of all that were measured."""
    return _ratios(reports.get("throughput-more")) | _ratios(reports.get("throughput-large"))


def invariant_ratios(report: Any) -> dict[int, float]:
    """Rows of a pass -> time with `batch_invariant` over the time without."""
    rows = [] if report is None else report["trees"]
    times = {(row["arm"].endswith(ARM), row["rows"]): row["ms"] for row in rows}
    return {size: ms / times[False, size] for (is_invariant, size), ms in times.items() if is_invariant}


def _most_invariant(report: Any) -> float | None:
    return max(invariant_ratios(report).values(), default=None)


def _ratios(report: Any) -> dict[int, float]:
    """Batch size -> speedup of the first tree."""
    if report is None:
        return {}
    tree = report["options"]["trees"][0]
    return {batch["batch_size"]: batch["arms"][tree]["speedup"] for batch in report["batches"]}


def _over_assisted(report: Any) -> float | None:
    peers = {} if report is None else report.get("peers", {})
    return next(
        (peer["tree_over_peer"] for name, peer in peers.items() if name.startswith("transformers-assisted")), None
    )


def summary(report: Any) -> str:
    """The numbers of one report that one looks for first."""
    return "; ".join(_words(report))


def _words(report: Any) -> Iterator[str]:
    if not isinstance(report, dict):
        return
    if "batches" in report:
        yield "over plain " + ", ".join(f"{size}: {ratio:.2f}" for size, ratio in _ratios(report).items())
    elif "streamed" in report:  # offload
        for row in report["streamed"]:
            yield f"{row['arm']}, {row['batch_size']} together: {row['speedup']:.2f} over plain"
    elif "rules" in report:  # acceptance
        best = max(cell["tokens_per_pass"]["value"] for row in report["rules"] for cell in row["cells"].values())
        yield f"up to {best:.2f} tokens per pass"
    elif "bandwidth_gb_per_s" in report:  # kernels
        for row in report["trees"]:
            yield f"{row['arm']}, {row['rows']} rows {row['ms']:.2f} ms"
        if ratios := invariant_ratios(report):
            yield "over the default " + ", ".join(f"{size}: {ratio:.2f}" for size, ratio in ratios.items())
    elif "num_differing" in report:  # identity
        yield f"{report['num_differing']} tokens differ"
        for row in report["arms"]:
            yield f"T {row['temperature']:g}, {row['batch_size']} together, {row['arm']}: {row['num_parted']} outputs"
    elif "speedup" in report:  # latency
        for name, arm in report["arms"].items():
            ratio = f" ({arm['speedup']:.2f})" if "speedup" in arm else ""
            yield f"{name} {arm['tokens_per_second']:.1f}/s{ratio}"
        for name, peer in report.get("peers", {}).items():
            yield f"{name} {peer['tokens_per_second']:.1f}/s"
        for name, reason in report.get("peers_skipped", {}).items():
            yield f"{name} skipped: {reason}"
