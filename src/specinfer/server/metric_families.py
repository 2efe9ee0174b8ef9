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
        family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def gauges(self, name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
        """Return a gauge for each value of a label."""
        family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family

    def total(self, name: str, help: str, value: float) -> Metric:
        """Return a counter."""
        family = CounterMetricFamily(PREFIX + name, help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def totals(self, name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
        """Return a counter for each value of a label."""
        family = CounterMetricFamily(PREFIX + name, help, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family
