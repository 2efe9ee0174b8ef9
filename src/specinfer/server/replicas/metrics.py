"""The metrics of all replicas and of the router in one text; each sample is labelled with its replica."""

import re
from collections.abc import Mapping

from specinfer.server.metrics import ModelRegistry, as_vllm

PORT = "port"  # the label of the router's process, in place of a replica's name
_SAMPLE = re.compile(r"([^{\s]+)(?:\{(.*)\})? (\S+(?: \S+)?)")


class RouterMetrics:
    """The metrics of the router's process.

    Args:
        prefix: The prefix of their names, "specinfer" or "vllm".
    """

    def __init__(self, model_name: str, prefix: str = "specinfer") -> None:
        model, self._prefix = ModelRegistry(model_name), prefix
        self.registry, self._scrape, self.count_refusal = model.registry, model.scrape, model.count_refusal
        self._moved = model.counter(
            "replica_answers_lost",
            "Requests that a replica did not complete: refused, lost (both: another was asked) or failed.",
            "how",
        )
        self._replicas = model.gauge("replicas", "Replicas that answer.")
        self._live = model.gauge("replica_requests", "Requests that are with replicas.")

    def count_moved(self, how: str) -> None:
        self._moved(how).inc()

    def scrape(self, *, num_replicas: int, num_live: int) -> str:
        """Return all metrics as text."""
        self._replicas.set(num_replicas)
        self._live.set(num_live)
        text = self._scrape()
        return (as_vllm(text) if self._prefix == "vllm" else text).decode()


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
