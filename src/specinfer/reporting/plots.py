"""Plots. A plot is data: panels with series of values, drawn side by side into one file.

draw_plot("speed.svg", "demo", [Panel("Decoding", [Series("off", speeds, x=sizes)], y_label="tokens per second")])
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specinfer.reporting.spread import Spread

if TYPE_CHECKING:  # matplotlib is an optional extra that only drawing needs
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
# Colours that colour-blind readers can distinguish: Okabe and Ito's palette, and a grey.
PART_COLOURS = {"draft": "#E69F00", "target": "#0072B2", "verify": "#009E73", "rest": "#999999", "host": "#999999"}
SERIES_COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MARKERS = "osD^vPX"
_THICKNESS = 0.8  # of all bars of a group together
_TITLE_WIDTH = 64  # characters


@dataclass(frozen=True, slots=True)
class Series:
    """Values that are drawn in one colour.

    Attributes:
        values: Numbers, or spreads, which are drawn as their medians with bars between the quartiles.
        x: Positions of the values, by default 0, 1, 2, ...
        errors: Half lengths of error bars.
        notes: Text next to each value.
        colour: None for the colour of the series' place in its panel.
        line: Style of the line, or "none" for marks only.
    """

    name: str
    values: Sequence[float | Spread]
    x: Sequence[float] = ()
    errors: Sequence[float] = ()
    notes: Sequence[str] = ()
    colour: str | None = None
    line: str = "-"
    marker: str = "o"

    @property
    def places(self) -> Sequence[float]:
        return self.x or range(len(self.values))

    @property
    def middles(self) -> list[float]:
        return [value.median if isinstance(value, Spread) else value for value in self.values]

    @property
    def bars(self) -> Any:
        """Lengths of the error bars below and above each value, or None without error bars."""
        if self.errors:
            return [self.errors, self.errors]
        spreads = [value for value in self.values if isinstance(value, Spread)]
        if not spreads or len(spreads) < len(self.values):
            return None
        below = [spread.median - spread.lower_quartile for spread in spreads]
        return [below, [spread.upper_quartile - spread.median for spread in spreads]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        kind: Lines through the values; bars side by side in each group; or bars stacked on each other.
        label: What the values are, with their unit.
        names: Names of the places 0, 1, 2, ...
        place_label: What the places are.
        horizontal: Whether values run from left to right, and places from top to bottom.
        counts: Whether places are counts, on a log 2 scale with a tick for each.
        log: Whether values are on a log scale.
        top: Upper limit of the values. None for one above all of them; without `from_zero` the lower limit is free too.
        levels: Values at which a reference line is drawn.
        legend: Whether to name the series: next to the values, or below the axes.
    """

    title: str
    series: Sequence[Series]
    kind: Literal["lines", "bars", "stacked"] = "lines"
    label: str = ""
    names: Sequence[str] = ()
    place_label: str = ""
    horizontal: bool = False
    counts: bool = False
    log: bool = False
    from_zero: bool = True
    top: float | None = None
    levels: Sequence[float] = ()
    legend: Literal["inside", "below", ""] = ""
    legend_title: str | None = None

    def draw(self, axes: Axes) -> None:
        if self.kind == "lines":
            self._draw_lines(axes)
        else:
            self._draw_bars(axes)
        for level in self.levels:
            (axes.axvline if self.horizontal else axes.axhline)(level, color="black", linewidth=1, linestyle="--")
        axes.set_title(textwrap.fill(self.title, _TITLE_WIDTH), fontsize=10)
        self._set_up_places(axes)
        self._set_up_values(axes)
        if self.legend == "below":
            place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 4}
            axes.legend(title=self.legend_title, frameon=False, fontsize=8, **place)
        elif self.legend:
            axes.legend(title=self.legend_title, frameon=False, fontsize=8)

    def _colour(self, place: int) -> str:
        return self.series[place].colour or SERIES_COLOURS[place % len(SERIES_COLOURS)]

    def _draw_lines(self, axes: Axes) -> None:
        for place, series in enumerate(self.series):
            style: dict[str, Any] = {"color": self._colour(place), "markersize": 4, "capsize": 3}
            style |= {"marker": series.marker, "linestyle": series.line, "label": series.name}
            if self.horizontal:
                axes.errorbar(series.middles, series.places, xerr=series.bars, **style)
            else:
                axes.errorbar(series.places, series.middles, yerr=series.bars, **style)
            self._annotate(axes, series, series.places, series.middles)

    def _draw_bars(self, axes: Axes) -> None:
        stacked = self.kind == "stacked"
        width = 0.55 if stacked else _THICKNESS / len(self.series)
        heights: dict[float, float] = {}  # of the stack at each place
        for number, series in enumerate(self.series):
            shift = 0.0 if stacked else (number + 0.5) * width - _THICKNESS / 2
            places = [place + shift for place in series.places]
            start = [heights.get(place, 0.0) for place in places]
            style: dict[str, Any] = {"color": self._colour(number), "label": series.name, "capsize": 3}
            if self.horizontal:
                axes.barh(places, series.middles, width, left=start, xerr=series.bars, **style)
            else:
                axes.bar(places, series.middles, width, bottom=start, yerr=series.bars, **style)
            ends = [low + value for low, value in zip(start, series.middles, strict=True)]
            self._annotate(axes, series, places, ends)
            if stacked:
                heights |= dict(zip(places, ends, strict=True))

    def _annotate(self, axes: Axes, series: Series, places: Sequence[float], ends: Sequence[float]) -> None:
        side: dict[str, Any] = {"va": "center", "ha": "left"} if self.horizontal else {"va": "bottom", "ha": "center"}
        for note, place, end in zip(series.notes, places, ends, strict=False):
            at, offset = ((end, place), (4, 0)) if self.horizontal else ((place, end), (0, 3))
            axes.annotate(note, at, offset, textcoords="offset points", fontsize=7, **side)

    def _set_up_places(self, axes: Axes) -> None:
        if self.counts:
            counts = sorted({place for series in self.series for place in series.places})
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [f"{count:g}" for count in counts])
            axes.minorticks_off()
        elif self.names:
            (axes.set_yticks if self.horizontal else axes.set_xticks)(range(len(self.names)), self.names, fontsize=8)
        if self.horizontal:
            axes.set_ylabel(self.place_label)
            axes.set_ylim(len(self.names) - 0.4, -0.6)  # the first at the top, as in a table
        else:
            axes.set_xlabel(self.place_label)

    def _set_up_values(self, axes: Axes) -> None:
        axes.grid(axis="both" if self.kind == "lines" else "x" if self.horizontal else "y", alpha=0.3)
        (axes.set_xlabel if self.horizontal else axes.set_ylabel)(self.label)
        if self.log:
            (axes.set_xscale if self.horizontal else axes.set_yscale)("log")
        elif self.from_zero:
            low, high = axes.get_xlim() if self.horizontal else axes.get_ylim()
            margin = 1.15 if any(series.notes for series in self.series) else 1.0
            top = margin * high if self.top is None else self.top
            (axes.set_xlim if self.horizontal else axes.set_ylim)(min(0.0, low) if self.kind == "lines" else 0.0, top)


def check_plot(path: str | Path) -> None:
    """Check that a plot can be drawn to this path.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"plot: {path} must end in one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("plot: matplotlib is missing; pip install 'specinfer[plot]'") from error


def draw_plot(
    path: str | Path,
    title: str,
    panels: Sequence[Panel],
    *,
    width: float = 14.0,
    height: float = 4.4,
    num_columns: int | None = None,
    shares_places: bool = False,
) -> None:
    """Draw panels into a file, in rows of `num_columns`.

    Args:
        width, height: Size of the figure in inches.
        shares_places: Whether all panels have the same places, so that the first names them for all.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    figure = new_figure(width, height)
    figure.suptitle(title)
    num_columns = num_columns or len(panels)
    rows = math.ceil(len(panels) / num_columns)
    all_axes = list(figure.subplots(rows, num_columns, squeeze=False, sharey=shares_places).flat)
    for panel, axes in zip(panels, all_axes, strict=False):
        panel.draw(axes)
    for unused in all_axes[len(panels) :]:
        unused.set_axis_off()
    figure.savefig(path, dpi=150)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
