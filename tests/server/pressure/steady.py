"""What one ordinary key may cost another: each attack alone, and all together, by eight clients with two keys.

    python tools/attack.py demo-chat --minutes 10

starts a server, and prints the time to the first token and the gaps of an honest third key, quiet and attacked in turns
of one run. The keys have no limits: what is measured is the server's own fairness.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hostile import TEXT
from tests.server.pressure.attack import Arm, Attack, Honest, Hostile, Report, bearer, measure
from tests.server.served_command import ServedCommand, serving

HONEST, HOSTILE, _NUM_CLIENTS, _ROUNDS = "honest-key", ("hostile-key-0", "hostile-key-1"), 8, 2
_LONGEST = 4000  # characters of a prompt
_STOP, _BETWEEN, _LEAST = 5.0, 1.0, 6.0  # seconds to stop a server, between attacks, and of an attack at least
TOGETHER = "all together"
_LONG = {"max_tokens": 200, "ignore_eos": True}


def _text(source: random.Random, length: int) -> str:
    return "".join(source.choices("abcdefgh \n", k=length))


def _trees(source: random.Random, length: int) -> dict[str, Any]:
    return {"prompt": _text(source, 4), "n": 16, "speculative": {"tree": "best-first:64"}, **_LONG}


def _prompts(source: random.Random, length: int) -> dict[str, Any]:
    return {"prompt": _text(source, length), "max_tokens": 4}


def _prompt_logprobs(source: random.Random, length: int) -> dict[str, Any]:
    return {"prompt": _text(source, 80), "prompt_logprobs": 20, "n": 16, "max_tokens": 1}


def _logprobs(source: random.Random, length: int) -> dict[str, Any]:
    rows = {"logprobs": 20, "logprob_token_ids": list(range(128))}
    return {"prompt": _text(source, 4), "n": 4, "stream": True, **rows, **_LONG}


def _targets(source: random.Random, length: int) -> dict[str, Any]:
    return {"prompt": _text(source, 4), "n": 8, "slo": {"ttft": 1.0, "tpot": 1.0}, "stream": True, **_LONG}


# By name: the path, the body, which has prompts of up to a length, and whether the response is read.
ATTACKS: dict[str, tuple[str, Callable[[random.Random, int], dict[str, Any]], bool]] = {
    "explicit trees": (TEXT, _trees, True),
    "uncached prompts": (TEXT, _prompts, True),
    "prompt logprobs": (TEXT, _prompt_logprobs, False),
    "logprobs": (TEXT, _logprobs, True),
    "latency targets": (TEXT, _targets, True),
}


def attack_in_turn(
    model: str, end: float, names: Iterable[str], reports: dict[str, Report], *, port: int, seed: int = 0,
    options: Sequence[str] = (),
) -> None:  # fmt: skip
    """Measure an honest key beside each of these attacks on a server of this model.

    Args:
        end: When the server has to be stopped, by `time.monotonic`. Attacks have even parts of the time.
        reports: Receives the report of each attack when it begins, so that an end before the time keeps them.
    """
    end, names = end - _STOP, list(names)
    with key_file() as keys:
        log, drain = keys.with_name("log"), ("--shutdown-timeout", "2")
        with serving(model, *drain, *options, "--api-key-file", str(keys), port=port, log=log) as server:
            for i, name in enumerate(names):
                honest = Honest(port, server.process.pid, seed, [HONEST], _ROUNDS)
                reports[name] = honest.report
                part = (end - time.monotonic()) / (len(names) - i)
                if part < _LEAST:
                    honest.report.failed.append(f"not measured: {part:.1f} s are left, less than {_LEAST:g}")
                    continue
                report = measure(honest, Hostile(port, seed, HOSTILE, arms_of(server, name)), part - _BETWEEN)
                refused = [status for status in report.statuses if status.endswith(" 400")]
                report.failed += [f"{status}: this is no attack" for status in refused]


@contextmanager
def key_file(*more: str) -> Iterator[Path]:
    """A file with the keys and further lines, in a folder that ends with the block."""
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        lines = [*(f"{key} generate name={key}" for key in (HONEST, *HOSTILE)), *more]
        keys.write_text("\n".join(lines) + "\n")
        yield keys


def arms_of(server: ServedCommand, name: str) -> list[Arm]:
    """The arms of eight clients for an attack of this name."""
    context = server.client.get("/v1/models", headers=bearer(HONEST)).json()["data"][0]["max_model_len"]
    chosen = list(ATTACKS.items()) if name == TOGETHER else [(name, ATTACKS[name])]
    return [_arm(*chosen[i % len(chosen)], min(_LONGEST, context // 2)) for i in range(_NUM_CLIENTS)]


def _arm(name: str, attack: Any, length: int) -> tuple[str, Attack]:
    path, body, is_read = attack
    return name, (path, lambda source: body(source, length), is_read)


def over_bounds(report: Report) -> list[str]:
    """Return which times of an honest key are longer than an attack may make them, in words."""
    if not (report.quiet_gaps and report.attacked_gaps):
        return ["too few answers"]
    first, gap = _p95(report.quiet), _p95(report.quiet_gaps)
    allowed = {"first token": max(3 * first, first + 0.5), "gap": 3 * gap}
    seen = {"first token": _p95(report.attacked), "gap": _p95(report.attacked_gaps)}
    return [
        f"{name} {1e3 * seen[name]:.0f} ms at p95, {1e3 * most:.0f} allowed"
        for name, most in allowed.items()
        if seen[name] > most
    ]


def table(reports: dict[str, Report]) -> list[str]:
    """Return times in milliseconds, median and 95th percentile, quiet and attacked, as lines of at most 80 columns.

    The last columns are answers, answers that were wrong or lost, and answers that the end of a phase cut off.
    """
    lines = [
        f"{'':16} {'first token, ms':^23} {'gap, ms':^23} {'':5} wrong",
        f"{'attack':16} {'quiet':^11} {'attacked':^11} {'quiet':^11} {'attacked':^11} {'n':>5} lost  cut",
    ]
    for name, report in reports.items():
        times = (report.quiet, report.attacked, report.quiet_gaps, report.attacked_gaps)
        lost = f"{len(report.wrong)}+{len(report.failed)}"
        num = len(report.quiet) + len(report.attacked)
        lines.append(f"{name:16} {' '.join(map(_pair, times))} {num:5} {lost:5} {report.num_cut:3}")
    return lines


def _p95(times: list[float]) -> float:
    return sorted(times)[len(times) * 95 // 100]


def _pair(times: list[float]) -> str:
    if not times:
        return f"{'-':>5} {'-':>5}"
    return f"{1e3 * statistics.median(times):5.0f} {1e3 * _p95(times):5.0f}"
