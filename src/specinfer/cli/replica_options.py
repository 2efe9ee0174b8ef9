"""Options of replicas: their number, and the resources of each."""

from dataclasses import dataclass
from typing import Annotated, Any

from specinfer.cli.options import flag
from specinfer.core.systems import usable_cpus
from specinfer.server.replicas.settings import Resources, Scaling, read_counts

_REPLICAS = "Replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """The number of engines behind one port, their machines, and the resources of each."""

    replicas: Annotated[
        str | None,
        flag(
            _REPLICAS,
            "Number of engine processes, kept alive by Ray; MIN:MAX scales with the load.",
            "--replicas",
            metavar="N|MIN:MAX",
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        flag(
            _REPLICAS,
            "Existing Ray cluster: auto, or HOST:PORT of its head. (default: start Ray on this machine)",
            metavar="ADDRESS",
        ),
    ] = None
    replica_cpus: Annotated[
        float | None,
        flag(_REPLICAS, "CPU cores of each replica. (default: an even share of this machine, or 1 on a cluster)"),
    ] = None
    replica_gpus: Annotated[
        float | None, flag(_REPLICAS, "GPUs of each replica. (default: one per rank if the device is a GPU)")
    ] = None
    scale_requests: Annotated[
        int, flag(_REPLICAS, "Target number of running and waiting requests per replica, for MIN:MAX.")
    ] = 16
    scale_ttft: Annotated[
        float | None,
        flag(_REPLICAS, "Time to first token (p90) in seconds above which a replica is added, for MIN:MAX."),
    ] = None
    scale_up_seconds: Annotated[
        float, flag(_REPLICAS, "Time of higher demand before replicas are added, in seconds, for MIN:MAX.")
    ] = 10.0
    scale_down_seconds: Annotated[
        float, flag(_REPLICAS, "Time of lower demand before replicas are removed, in seconds, for MIN:MAX.")
    ] = 300.0

    def scaling(self) -> Scaling:
        """Return the number of replicas and when it changes.

        Raises:
            ValueError: A setting cannot be used.
        """
        if self.replicas is None:
            raise ValueError("replicas: give a number or a range, such as 2 or 1:3")
        least, most = read_counts(self.replicas)
        return Scaling(
            min_replicas=least,
            max_replicas=most,
            target_requests=self.scale_requests,
            target_ttft=self.scale_ttft,
            up_seconds=self.scale_up_seconds,
            down_seconds=self.scale_down_seconds,
        )

    def resources(self, device: str, num_ranks: int = 1) -> Resources:
        """Return the resources of each replica.

        Args:
            device: The target's device, as in `--device`.
            num_ranks: Processes that the target of each replica is split over.

        Raises:
            ValueError: A setting cannot be used.
        """
        cpus, gpus, most = self.replica_cpus, self.replica_gpus, self.scaling().max_replicas
        cores = usable_cpus()
        if cpus is None:
            # Rounded down: Ray does not grant a sum above the number of cores, even by a rounding error.
            cpus = 1.0 if self.ray_address is not None else int(1000 * cores / most) / 1000
        if gpus is None:
            gpus = float(num_ranks * _is_gpu(device))
        resources = Resources(cpus=cpus, gpus=gpus, num_ranks=num_ranks)
        if self.ray_address is None and most * cpus > cores:
            raise ValueError(
                f"replica_cpus: {most} replicas of {cpus:g} cores need {most * cpus:g}, and this machine has {cores}; "
                "give less, or a cluster by --ray-address"
            )
        return resources

    def check_alone(self) -> None:
        """Refuse options that need replicas if there are none.

        Raises:
            ValueError: Such an option was given.
        """
        default: Any = ReplicaOptions()
        for name in self.__slots__:
            if name != "replicas" and getattr(self, name) != getattr(default, name):
                raise ValueError(f"{name}: works with --replicas; give both or neither")


def _is_gpu(device: str) -> bool:
    if device != "auto":
        return not device.startswith("cpu")
    from specinfer.model.device import find_device

    return find_device(device).type == "cuda"
