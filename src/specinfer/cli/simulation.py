"""The flags of `plan --simulate`: planning for simulated machines."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from specinfer.cli.options import flag

if TYPE_CHECKING:
    from specinfer.bench.simulation_plans import SimulationConfig

_PANEL = "Machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Options that describe the simulated machines."""

    simulate: Annotated[
        bool, flag(_PANEL, "Foresee what a target split over several machines gives.", "--simulate")
    ] = False
    machines: Annotated[
        list[int] | None, flag(_PANEL, "How many there are; may be repeated; else 1, 2, 4, ... 256.", metavar="N")
    ] = None
    batch: Annotated[
        list[int] | None, flag(_PANEL, "Requests that run together; may be repeated; else 1, 8 and 64.", metavar="N")
    ] = None
    devices_per_machine: Annotated[int, flag(_PANEL, "Each for one rank.")] = 1
    link_latency: Annotated[str | None, flag(_PANEL, "Between machines, one way; else 1ms.", metavar="TIME")] = None
    link_bandwidth: Annotated[str | None, flag(_PANEL, "Of each machine; else 1Gbit.", metavar="RATE")] = None
    inner_latency: Annotated[
        str | None, flag(_PANEL, "Between the devices of a machine; else 20us.", metavar="TIME")
    ] = None
    inner_bandwidth: Annotated[str | None, flag(_PANEL, "The same; else 10GB/s.", metavar="RATE")] = None
    scale: Annotated[float, flag(_PANEL, "How many times as fast as this machine each device is.")] = 1.0
    memory_bandwidth: Annotated[
        str | None, flag(_PANEL, "At which each reads weights; else as --scale has it.", metavar="RATE")
    ] = None
    device_memory: Annotated[
        str | None, flag(_PANEL, "For the weights of a rank, such as 16GiB; else without bound.", metavar="SIZE")
    ] = None
    layer_overhead: Annotated[
        str | None, flag(_PANEL, "Of a layer that is split, beyond its part of the whole; else none.", metavar="TIME")
    ] = None
    message_overhead: Annotated[
        str | None, flag(_PANEL, "Of the processor, for sending a message; else 50us.", metavar="TIME")
    ] = None

    def config(self) -> "SimulationConfig | None":
        """Return the simulation's settings, or None without --simulate.

        Raises:
            ValueError: An option cannot be used, or needs --simulate.
        """
        from specinfer.bench.simulation_plans import SimulationConfig

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
