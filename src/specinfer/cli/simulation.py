"""The flags of `plan --simulate`: planning for simulated machines."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from specinfer.cli.options import flag

if TYPE_CHECKING:
    from specinfer.planning.simulation_plans import SimulationConfig

_PANEL = "Machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Options that describe the simulated machines."""

    simulate: Annotated[
        bool, flag(_PANEL, "Predict the speed of a target split over several machines.", "--simulate")
    ] = False
    machines: Annotated[
        list[int] | None, flag(_PANEL, "Number of machines. May be repeated. (default: 1, 2, 4, ... 256)", metavar="N")
    ] = None
    batch: Annotated[
        list[int] | None, flag(_PANEL, "Batch size. May be repeated. (default: 1, 8 and 64)", metavar="N")
    ] = None
    devices_per_machine: Annotated[int, flag(_PANEL, "Number of devices of each machine; one rank per device.")] = 1
    link_latency: Annotated[
        str | None, flag(_PANEL, "One-way latency between machines. (default: 1ms)", metavar="TIME")
    ] = None
    link_bandwidth: Annotated[
        str | None, flag(_PANEL, "Network bandwidth of each machine. (default: 1Gbit)", metavar="RATE")
    ] = None
    inner_latency: Annotated[
        str | None, flag(_PANEL, "Latency between devices of a machine. (default: 20us)", metavar="TIME")
    ] = None
    inner_bandwidth: Annotated[
        str | None, flag(_PANEL, "Bandwidth between devices of a machine. (default: 10GB/s)", metavar="RATE")
    ] = None
    scale: Annotated[float, flag(_PANEL, "Speed of each device relative to this machine.")] = 1.0
    memory_bandwidth: Annotated[
        str | None, flag(_PANEL, "Memory bandwidth of each device. (default: by --scale)", metavar="RATE")
    ] = None
    device_memory: Annotated[
        str | None,
        flag(_PANEL, "Memory for the weights of a rank, such as 16GiB. (default: unlimited)", metavar="SIZE"),
    ] = None
    layer_overhead: Annotated[
        str | None, flag(_PANEL, "Additional time of a layer that is split. (default: none)", metavar="TIME")
    ] = None
    message_overhead: Annotated[
        str | None, flag(_PANEL, "Processor time for sending a message. (default: 50us)", metavar="TIME")
    ] = None

    def config(self) -> "SimulationConfig | None":
        """Return the simulation's settings, or None without --simulate.

        Raises:
            ValueError: An option cannot be used, or needs --simulate.
        """
        from specinfer.planning.simulation_plans import SimulationConfig

        texts = ("link_latency", "link_bandwidth", "inner_latency", "inner_bandwidth", "memory_bandwidth",
                 "device_memory", "layer_overhead", "message_overhead")  # fmt: skip
        given: dict[str, object] = {name: getattr(self, name) for name in texts if getattr(self, name) is not None}
        for name, values in (("machines", self.machines), ("batch_sizes", self.batch)):
            if values is not None:
                given[name] = tuple(values)
        if self.scale != 1:
            given["scale"] = self.scale
        if self.devices_per_machine != 1:
            given["per_machine"] = self.devices_per_machine
        if not self.simulate:
            if given:
                raise ValueError(f"{next(iter(given))}: it is about machines to be simulated; add --simulate")
            return None
        return SimulationConfig(**given)  # type: ignore[arg-type]
