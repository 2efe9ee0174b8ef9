"""The results of training a scheduler, as tables on a terminal."""

from rich.console import Console

from specinfer.bench.table import new_table, print_table
from specinfer.tuning.policy_report import PolicyReport


def print_policy(report: PolicyReport, console: Console) -> None:
    """Print the predictors, the effect of each group of features, and the best single configuration."""
    name, rate = report.best_fixed
    table = new_table("predictor", "weights", "error", "tokens/s", "over best single")
    for row in (*report.architectures, *report.left_out):
        worth = row.worth
        table.add_row(
            f"[bold]{row.name}[/bold]" if row.name == report.chosen else row.name,
            f"{worth.num_weights}",
            f"{worth.error:.3f}",
            f"{worth.rate:.1f}",
            f"{worth.rate / rate:.3f}",
            end_section=row is report.architectures[-1],
        )
    heading = (
        f"Predictors of what a tree yields: {report.num_steps} steps learned from, {report.num_held_out} judged by"
    )
    print_table(console, heading, table)
    console.print(
        "error: of expected tokens, mean and absolute; tokens/s: of the configurations it would choose, by the cost "
        f"model and the logged trees; the best single configuration is {name} with {rate:.1f}"
    )
    console.print(f"wrote {report.chosen} to {report.out}")
