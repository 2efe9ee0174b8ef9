"""Tables of a tuning report on a terminal."""

from rich.console import Console
from rich.table import Table

from specinfer.learning.tune.evaluation import MODES, RANKS
from specinfer.learning.tune.report import TuneReport
from specinfer.reporting.tables import new_table, print_models, print_table


def print_report(report: TuneReport, console: Console) -> None:
    """Print the hit rates of each drafter, what it adds to those before, and passes with one, two, ... of them."""
    print_models(report, console)
    cut = f"; {report.num_cut} prompts were too long and were cut to their ends" if report.num_cut else ""
    console.print(
        f"{report.num_examples} examples with {report.num_tokens / 1e6:.2f} M tokens of the target, generated in "
        f"{report.collecting_seconds:.0f} s; examples trained on, by drafter: "
        + ", ".join(map(str, report.num_left))
        + cut
    )
    print_table(console, "Training", _training_table(report))
    for mode in MODES:
        tables = (
            (report.hit_rates, "target tokens among the k best tokens of the drafter", _hit_rate_table),
            (report.coverage, "target tokens predicted by the drafters of a set", _coverage_table),
            (report.passes, "tokens per target pass (draft tokens per pass, after merging)", _passes_table),
        )
        for values, title, make_table in tables:
            if any(one.mode == mode for one in values):
                heading = f"{mode.capitalize()} held-out text: {title}"
                print_table(console, heading, make_table(report, mode))
    console.print()
    for name, folder in report.folders.items():
        console.print(f"{name}: {folder}", soft_wrap=True)


def _training_table(report: TuneReport) -> Table:
    table = new_table("drafter", "parameters", "steps", "tokens", "seconds", "loss, nats")
    for name, numbers in report.training.items():
        table.add_row(
            name,
            f"{numbers['parameters'] / 1e6:.2f} M",
            f"{numbers['steps']:.0f}",
            f"{numbers['tokens'] / 1e6:.2f} M",
            f"{numbers['seconds']:.0f}",
            f"{numbers['loss']:.3f}",
        )
    return table


def _hit_rate_table(report: TuneReport, mode: str) -> Table:
    table = new_table("drafter", *(f"k={k}" for k in range(1, RANKS + 1)))
    for one in report.hit_rates:
        if one.mode == mode:
            table.add_row(one.drafter, *(f"{rate:.1%}" for rate in one.hit_rates))
    return table


def _coverage_table(report: TuneReport, mode: str) -> Table:
    table = new_table("drafter", "alone", "added", "overlap")
    for one in report.coverage:
        if one.mode == mode:
            table.add_row(one.drafter, f"{one.alone:.1%}", f"{one.added:.1%}", f"{one.overlap:.1%}")
    return table


def _passes_table(report: TuneReport, mode: str) -> Table:
    chosen = [one for one in report.passes if one.mode == mode]
    counts = sorted({len(one.arm.drafters) for one in chosen})
    table = new_table("drafters", "tree of each", *(str(count) for count in counts), num_labels=2)
    for kind in dict.fromkeys(one.arm.kind for one in chosen):
        of_kind = [one for one in chosen if one.arm.kind == kind]
        for tree in dict.fromkeys(one.arm.tree for one in of_kind):
            cells = {
                len(one.arm.drafters): f"{one.tokens_per_pass:.3f} ({one.nodes:.1f})"
                for one in of_kind
                if one.arm.tree == tree
            }
            table.add_row(kind, shown_tree(tree), *(cells.get(count, "") for count in counts))
    return table


def shown_tree(tree: str) -> str:
    """Return a readable name of a tree."""
    return tree if ":" in tree else f"chain of {tree.count(',') + 1}"
