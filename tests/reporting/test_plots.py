"""Plots are made of panels with series of values."""

from pathlib import Path

import pytest

from specinfer.reporting.plots import Panel, Series, check_plot, draw_plot, new_figure
from specinfer.reporting.spread import Spread

SPREADS = [Spread.from_values([1.0, 2.0, 3.0]), Spread.from_values([4.0, 4.0, 7.0])]


def test_spreads_are_drawn_as_medians_with_bars_between_the_quartiles() -> None:
    series = Series("auto", SPREADS, x=[8, 16])
    assert series.middles == [2.0, 4.0]
    assert series.bars == [[0.5, 0.0], [0.5, 1.5]]
    assert Series("off", [1.0, 2.0]).bars is None
    assert list(Series("off", [1.0, 2.0]).places) == [0, 1]


def test_stacked_bars_begin_where_those_below_them_end() -> None:
    axes = new_figure(4, 3).subplots()
    parts = [Series("draft", [1.0, 2.0]), Series("target", [3.0, 5.0], notes=["4.0", "7.0"])]
    Panel("Parts", parts, kind="stacked").draw(axes)
    assert [bar.get_y() for bar in axes.patches] == [0.0, 0.0, 1.0, 2.0]
    assert [bar.get_height() for bar in axes.patches] == [1.0, 2.0, 3.0, 5.0]
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("4.0", (0.0, 4.0)), ("7.0", (1.0, 7.0))]


def test_bars_of_one_group_stand_side_by_side() -> None:
    axes = new_figure(4, 3).subplots()
    Panel("Speeds", [Series("off", [1.0]), Series("auto", [2.0])], kind="bars", names=["alone"]).draw(axes)
    left, right = sorted(axes.patches, key=lambda bar: bar.get_x())
    assert left.get_x() + left.get_width() == pytest.approx(right.get_x())
    assert [label.get_text() for label in axes.get_xticklabels()] == ["alone"]


def test_horizontal_panels_list_their_names_from_top_to_bottom() -> None:
    axes = new_figure(4, 3).subplots()
    Panel("Speeds", [Series("", [1.0, 2.0])], kind="bars", horizontal=True, names=["a", "b"]).draw(axes)
    low, high = axes.get_ylim()
    assert low > high
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_a_file_with_all_panels(tmp_path: Path, suffix: str) -> None:
    panels = [
        Panel("Lines", [Series("auto", SPREADS, x=[1, 2])], counts=True, legend="inside"),
        Panel("Bars", [Series("auto", SPREADS)], kind="bars", legend="below", levels=(1.0,)),
        Panel("Logs", [Series("auto", [1.0, 100.0])], log=True),
    ]
    draw_plot(tmp_path / f"plot{suffix}", "Title", panels, num_columns=2)
    assert (tmp_path / f"plot{suffix}").stat().st_size > 1000


def test_other_suffixes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"plot: x\.bmp must end in one of \.png, \.svg, \.pdf"):
        check_plot("x.bmp")
