"""`specinfer tune --policy`: a scheduler's predictor is trained from steps, and others are compared with it."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from specinfer.bench.table import new_table, print_table

if TYPE_CHECKING:  # torch comes with it
    from specinfer.tuning.policy import PolicyConfig
    from specinfer.tuning.policy_report import PolicyReport, Row


def tune_policy(config: "PolicyConfig", err: Console, out: Console) -> "PolicyReport":
    """Trains as the config says, and prints what came of it."""
    from specinfer.tuning.policy import train_policy

    report = train_policy(config, err)
    out.print(f"{report.num_steps} steps to learn from, {report.num_held_out} held out")
    print_table(out, "Predictors (layers x width), held-out steps", _table(report.architectures))
    print_table(out, "The same with a group of features left out", _table(report.left_out))
    fixed = new_table("configuration", "tokens/s")
    for name, rate in sorted(report.fixed.items(), key=lambda item: -item[1]):
        fixed.add_row(name, f"{rate:.4g}")
    print_table(out, "Each configuration if it alone were used, by the cost model", fixed)
    out.print(f"\n{report.chosen} is in {report.out}: use it with --scheduler {report.out}", soft_wrap=True)
    return report


def _table(rows: "tuple[Row, ...]") -> Table:
    table = new_table("predictor", *_COLUMNS.values())
    for row in rows:
        numbers = row.as_dict()
        table.add_row(row.name, *(f"{numbers[name]:.4g}" for name in _COLUMNS))
    return table


_COLUMNS = {"num_weights": "weights", "error": "error, tokens", "rate": "tokens/s"}
