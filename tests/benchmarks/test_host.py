"""The host's part of a step: every stage is timed in every step, without a model."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.host import GREEDY, STAGES, HostConfig, median, p90, print_host, run_host
from specinfer.core.rules import RULES

SMALL = {"num_requests": 2, "nodes": 12, "depth": 4, "prompt_tokens": 8, "vocab_size": 64, "repeats": 3}


def test_every_stage_of_every_rule_is_timed_in_every_step(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    report = run_host(HostConfig(**SMALL, json=path))
    assert [times.rule for times in report.rows] == [GREEDY, *RULES]
    for times in report.rows:
        assert set(times.ms) == set(STAGES)
        assert all(len(ms) == 3 and min(ms) > 0 for ms in times.ms.values())
        assert times.total == [pytest.approx(sum(step)) for step in zip(*times.ms.values(), strict=True)]
    numbers = json.loads(path.read_text())
    assert numbers == json.loads(json.dumps(report.as_dict()))
    assert numbers["ms"]["coupled"]["total"]["median"] <= numbers["ms"]["coupled"]["total"]["p90"]
    assert {"cpu", "num_threads", "torch", "commit"} <= numbers["environment"].keys()
    shown = io.StringIO()
    print_host(report, Console(file=shown, width=80))
    assert "traversal" in shown.getvalue()
    assert f"{median(report.rows[0].total):.2f}" in shown.getvalue()


def test_medians_and_percentiles() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert p90([float(i) for i in range(11)]) == 9.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "nodes must be a whole number from 1 to 1024, not 0"),
        ({"nodes": -1}, "nodes must be"),
        ({"nodes": 1_000_000}, "nodes must be"),
        ({"num_requests": True}, "num_requests must be"),
        ({"repeats": 0}, "repeats must be"),
        ({"vocab_size": 2}, "vocab_size must be"),
        ({"seed": -1}, "seed must be"),
        ({"json": "/no/such/folder/x.json"}, "json: /no/such/folder/x.json cannot be written"),
    ],
)
def test_bad_input_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_host(HostConfig(**(SMALL | changes)))
