"""Options of replicas: their number, and the resources of each."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from specinfer.cli.options import flag
from specinfer.cpus import usable_cpus

if TYPE_CHECKING:  # these imports need packages of the server
    from specinfer.server.replicas.settings import Resources, Scaling

_REPLICAS = "Replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """The number of engines behind one port, their machines, and the resources of each."""

    replicas: Annotated[
        str | None,
        flag(
            _REPLICAS,
            "Serve with so many engines, each a process, kept alive by Ray; MIN:MAX follows the load.",
            "--replicas",
            metavar="N|MIN:MAX",
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        flag(
            _REPLICAS,
            "A Ray cluster that runs already: auto, or the head's HOST:PORT. Else Ray is started on this machine.",
            metavar="ADDRESS",
        ),
    ] = None
    replica_cpus: Annotated[
        float | None,
        flag(_REPLICAS, "Cores of each replica, fractions too; else an even share of this machine, or 1 on a cluster."),
    ] = None
    replica_gpus: Annotated[
        float | None, flag(_REPLICAS, "GPUs of each replica, fractions too; else one a rank where the device is one.")
    ] = None
    scale_requests: Annotated[
        int, flag(_REPLICAS, "With MIN:MAX: requests, running and waiting, that each replica is to have.")
    ] = 16
    scale_ttft: Annotated[
        float | None,
        flag(_REPLICAS, "With MIN:MAX: seconds to the first token of nine requests in ten; beyond, one is added."),
    ] = None
    scale_up_seconds: Annotated[float, flag(_REPLICAS, "With MIN:MAX: for so long more must have been wanted.")] = 10.0
    scale_down_seconds: Annotated[float, flag(_REPLICAS, "With MIN:MAX: for so long fewer must have been wanted.")] = (
        300.0
    )

    def scaling(self) -> "Scaling":
        """Return the number of replicas and when it changes.

        Raises:
            ValueError: A setting cannot be used.
        """
        from specinfer.server.replicas.settings import Scaling, read_counts

        if self.replicas is None:
            raise ValueError("replicas: say how many, such as 2 or 1:3")
        least, most = read_counts(self.replicas)
        return Scaling(
            min_replicas=least,
            max_replicas=most,
            target_requests=self.scale_requests,
            target_ttft=self.scale_ttft,
            up_seconds=self.scale_up_seconds,
            down_seconds=self.scale_down_seconds,
        )

    def resources(self, device: str, num_ranks: int = 1) -> "Resources":
        """Return the resources of each replica.

        Args:
            device: The target's device, as in `--device`.
            num_ranks: Processes that the target of each replica is split over.

        Raises:
            ValueError: A setting cannot be used.
        """
        from specinfer.server.replicas.settings import Resources

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
    import torch

    return torch.cuda.is_available()
