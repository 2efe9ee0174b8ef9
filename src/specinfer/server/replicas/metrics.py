"""The metrics of all replicas and of the router in one text; each sample is labelled with its replica."""

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from specinfer.server.errors import STATUS_OF
from specinfer.server.metrics import PREFIX, as_vllm

PORT = "port"  # the label of the router's process, in place of a replica's name
_SAMPLE = re.compile(r"([^{\s]+)(?:\{(.*)\})? (\S+(?: \S+)?)")


class RouterMetrics:
    """The metrics of the router's process.

    Args:
        prefix: The prefix of their names, "specinfer" or "vllm".
    """

    def __init__(self, model_name: str, prefix: str = "specinfer") -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._model_name = model_name
        self._refused = self._counter("request_refused", "Requests that were refused, by the code they got.", "reason")
        self._moved = self._counter(
            "replica_answers_lost",
            "Requests that a replica did not complete: refused, lost (both: another was asked) or failed.",
            "how",
        )
        self._replicas = self._gauge("replicas", "Replicas that answer.")
        self._live = self._gauge("replica_requests", "Requests that are with replicas.")

    def count_refusal(self, code: str) -> None:
        self._refused.labels(self._model_name, code if code in STATUS_OF else "other").inc()

    def count_moved(self, how: str) -> None:
        self._moved.labels(self._model_name, how).inc()

    def scrape(self, *, num_replicas: int, num_live: int) -> str:
        """Return all metrics as text."""
        self._replicas.labels(self._model_name).set(num_replicas)
        self._live.labels(self._model_name).set(num_live)
        text = generate_latest(self.registry)
        return (as_vllm(text) if self._prefix == "vllm" else text).decode()

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(PREFIX + name, help, ["model_name", label], registry=self.registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(PREFIX + name, help, ["model_name"], registry=self.registry)


def merged(texts: Mapping[str, str]) -> str:
    """Merge texts in Prometheus format: one group per family, with each text's name in the label `replica`."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in filter(None, text.splitlines()):
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                is_new = not head
            if line.startswith("#"):
                if is_new:
                    head.append(line)
                continue
            match = _SAMPLE.fullmatch(line)
            assert match is not None, line
            labels = f'replica="{replica}"' + (f",{match[2]}" if match[2] else "")
            samples.setdefault(family, []).append(f"{match[1]}{{{labels}}} {match[3]}")
    return "".join(f"{line}\n" for family, head in heads.items() for line in [*head, *samples.get(family, ())])
