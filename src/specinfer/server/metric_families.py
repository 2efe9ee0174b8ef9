"""Families of Prometheus's metrics with our prefix and the model's name, for values that are read at a scrape."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "specinfer:"


class MetricFamilies:
    """A maker of the families of one model."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def gauge(self, name: str, help: str, value: float) -> Metric:
        """Return a gauge."""
        return self._filled(GaugeMetricFamily, name, help, {(): value})

    def gauges(self, name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
        """Return a gauge for each value of a label."""
        return self._filled(GaugeMetricFamily, name, help, {(key,): one for key, one in values.items()}, label)

    def total(self, name: str, help: str, value: float) -> Metric:
        """Return a counter."""
        return self._filled(CounterMetricFamily, name, help, {(): value})

    def totals(self, name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
        """Return a counter for each value of a label."""
        return self._filled(CounterMetricFamily, name, help, {(key,): one for key, one in values.items()}, label)

    def _filled(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        help: str,
        values: Mapping[tuple[str, ...], float],
        *labels: str,
    ) -> Metric:
        family = kind(PREFIX + name, help, labels=["model_name", *labels])
        for keys, value in values.items():
            family.add_metric([self._model_name, *keys], value)
        return family
