"""What one ordinary key may cost another: each attack alone, and all together, by eight clients with two keys.

    python tools/attack.py demo-chat --minutes 10

starts a server, and prints the time to the first token and the gaps of an honest third key, quiet and attacked in turns
of one run. The keys have no limits: what is measured is the server's own fairness.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hostile import TEXT
from tests.server.pressure.attack import Attack, Honest, Hostile, Report, bearer, measure
from tests.server.served_command import serving

_HONEST, _HOSTILE, _NUM_CLIENTS, _ROUNDS = "honest-key", ("hostile-key-0", "hostile-key-1"), 8, 2
_LONGEST = 4000  # characters of a prompt
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
    model: str, seconds: float, names: Iterable[str] = (*ATTACKS, TOGETHER), *, port: int, seed: int = 0,
    options: Sequence[str] = (),
) -> dict[str, Report]:  # fmt: skip
    """Measure an honest key beside each of these attacks on a server of this model, for an even part of the time."""
    names, reports = list(names), dict[str, Report]()
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"{key} generate name={key}\n" for key in (_HONEST, *_HOSTILE)))
        with serving(model, *options, "--api-key-file", str(keys), port=port, log=Path(folder) / "log") as server:
            context = server.client.get("/v1/models", headers=bearer(_HONEST)).json()["data"][0]["max_model_len"]
            length = min(_LONGEST, context // 2)
            for name in names:
                chosen = list(ATTACKS.items()) if name == TOGETHER else [(name, ATTACKS[name])]
                arms = [_arm(*chosen[i % len(chosen)], length) for i in range(_NUM_CLIENTS)]
                honest = Honest(port, server.process.pid, seed, [_HONEST], _ROUNDS)
                report = measure(honest, Hostile(port, seed, _HOSTILE, arms), seconds / len(names))
                refused = [status for status in report.statuses if status.endswith(" 400")]
                report.failed += [f"{status}: this is no attack" for status in refused]
                reports[name] = report
    return reports


def _arm(name: str, attack: Any, length: int) -> tuple[str, Attack]:
    path, body, is_read = attack
    return name, (path, lambda source: body(source, length), is_read)


def table(reports: dict[str, Report]) -> list[str]:
    """Return times in milliseconds, median and 95th percentile, quiet and attacked, as lines of at most 80 columns."""
    lines = [
        f"{'':16} {'first token, ms':^27} {'gap, ms':^27} wrong",
        f"{'attack':16} {'quiet':^13} {'attacked':^13} {'quiet':^13} {'attacked':^13} lost",
    ]
    for name, report in reports.items():
        times = (report.quiet, report.attacked, report.quiet_gaps, report.attacked_gaps)
        lines.append(f"{name:16} {' '.join(map(_pair, times))} {len(report.wrong)}+{len(report.failed)}")
    return lines


def _pair(times: list[float]) -> str:
    if not times:
        return f"{'-':>6} {'-':>6}"
    ordered = sorted(times)
    return f"{1e3 * ordered[len(ordered) // 2]:6.0f} {1e3 * ordered[len(ordered) * 95 // 100]:6.0f}"
