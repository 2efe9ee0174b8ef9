"""Plot of a perplexity report: quality loss and size of the weights."""

from __future__ import annotations

from pathlib import Path

from specinfer.bench.perplexity_report import PerplexityReport
from specinfer.bench.plot import check_plot, new_figure


def plot_perplexity(report: PerplexityReport, path: str | Path) -> None:
    """Draw a report to a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    figure = new_figure(11, 1.6 + 0.5 * len(report.scores))
    environment = report.environment
    figure.suptitle(
        f"{Path(str(report.options['model'])).name}: {environment.target_parameters / 1e6:,.0f} M parameters, "
        f"{environment.precision}, {report.exact.num_tokens} tokens of {report.num_texts} texts"
    )
    panels = (
        ("Perplexity", [score.perplexity for score in report.scores], "{:.3f}"),
        ("Divergence from the unquantized model, bits", [score.divergence_bits for score in report.scores], "{:.4f}"),
        ("Weights, MiB", [score.num_bytes / 2**20 for score in report.scores], "{:,.1f}"),
    )
    rows = range(len(report.scores))
    for axes, (title, values, form) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        axes.barh(rows, values, 0.5, color="#0072B2")
        for row, value in zip(rows, values, strict=True):
            axes.annotate(f" {form.format(value)}", (value, row), va="center", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.set_xlim(0, 1.3 * max(values))
        axes.set_yticks(rows, [score.name for score in report.scores])
        axes.set_ylim(len(rows) - 0.5, -0.5)  # from top to bottom, as in the table
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)
