"""StepRoom: the rows that a step has room for, which every tenant's part of it is counted in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specinfer.core.request import Request
from specinfer.engine.step_seconds import StepSeconds


@dataclass(frozen=True, slots=True)
class StepRoom:
    """The rows that a step has room for, and what counts as a row.

    Attributes:
        num_rows: Rows of a pass that takes as long as the step may.
        row_seconds: Seconds of one of them.
        seconds: Costs of steps.
        most: Rows of tenants at most, for those whose targets make the step shorter.
    """

    num_rows: float
    row_seconds: float
    seconds: StepSeconds
    most: Mapping[str, float] = field(default_factory=dict)

    def rows_of_tenant(self, tenant: str, demand: float) -> float:
        """Return the rows of those that a tenant could use that it may have."""
        return min(demand, self.most.get(tenant, demand))

    def rows_of(self, request: Request) -> float:
        """Return the rows that a known token of a request counts as."""
        return 1.0 + self.seconds.on_host(request) / self.row_seconds

    @property
    def rows_of_node(self) -> float:
        """Rows that a draft token counts as."""
        return 1.0 + self.seconds.of_node / self.row_seconds
