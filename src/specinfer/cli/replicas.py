"""The settings of `serve --replicas`: several engines behind one port, and the resources of each."""

from dataclasses import dataclass, fields
from typing import Any

import typer

from specinfer.cli.errors import UsageError
from specinfer.cli.flags import Given
from specinfer.cli.options import ServedOptions
from specinfer.core.limits import QueueLimits
from specinfer.core.options import setting
from specinfer.core.systems import usable_cpus
from specinfer.engine_args import EngineArgs
from specinfer.hub.locate import without_revision
from specinfer.server.config import ServerConfig
from specinfer.server.replicas.settings import ReplicaDeployment, ReplicaSettings, Resources, Scaling, read_counts

_REPLICAS = "Replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """The number of engines behind one port, their machines, and the resources of each."""

    replicas: str | None = setting(
        None,
        _REPLICAS,
        "Number of engine processes, kept alive by Ray; MIN:MAX scales with the load.",
        metavar="N|MIN:MAX",
    )
    ray_address: str | None = setting(
        None,
        _REPLICAS,
        "Existing Ray cluster: auto, or HOST:PORT of its head. (default: start Ray on this machine)",
        metavar="ADDRESS",
    )
    replica_cpus: float | None = setting(
        None, _REPLICAS, "CPU cores of each replica. (default: an even share of this machine, or 1 on a cluster)"
    )
    replica_gpus: float | None = setting(
        None, _REPLICAS, "GPUs of each replica. (default: one per rank if the device is a GPU)"
    )
    scale_requests: int = setting(
        16, _REPLICAS, "Target number of running and waiting requests per replica, for MIN:MAX."
    )
    scale_ttft: float | None = setting(
        None, _REPLICAS, "Time to first token (p90) in seconds above which a replica is added, for MIN:MAX."
    )
    scale_up_seconds: float = setting(
        10.0, _REPLICAS, "Time of higher demand before replicas are added, in seconds, for MIN:MAX."
    )
    scale_down_seconds: float = setting(
        300.0, _REPLICAS, "Time of lower demand before replicas are removed, in seconds, for MIN:MAX."
    )

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
        for field in fields(self):
            if field.name != "replicas" and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name}: works with --replicas; give both or neither")


def _is_gpu(device: str) -> bool:
    if device != "auto":
        return not device.startswith("cpu")
    from specinfer.model.device import find_device

    return find_device(device).type == "cuda"


def check_installed() -> None:
    """Raise `UsageError` if Ray is missing."""
    try:
        from specinfer.server.replicas import replica_set  # noqa: F401  # tests whether its dependencies are installed
    except ImportError as error:
        raise UsageError(f"replicas: {error.name} is not installed; pip install 'specinfer[ray]'") from error


def serve(context: typer.Context, deployment: ReplicaDeployment, replicas: ReplicaOptions) -> int:
    """Serve until stopped, and return the process's exit code. Errors are those of `process.run`."""
    from specinfer.server.replicas.process import ReplicaService, run
    from specinfer.server.replicas.replica_set import Cluster

    return run(ReplicaService(deployment, Cluster(replicas.ray_address), lambda: read_again(context)))


def replica_deployment(
    args: EngineArgs, server: ServerConfig, limits: QueueLimits, replicas: ReplicaOptions
) -> ReplicaDeployment:
    """Return the settings of the replicas.

    Raises:
        ValueError: A setting cannot be used, or not with replicas.
    """
    if (args.nnodes, args.node_rank, args.master_addr, args.master_port) != (1, 0, None, None):
        raise ValueError(
            "nnodes, node_rank, master_addr, master_port: the ranks of a replica are on one machine and find each "
            "other; leave them out, or --replicas"
        )
    if server.single_process:
        raise ValueError("single_process: each replica is a process of its own; leave it out, or --replicas")
    names = tuple(server.served_model_name or (without_revision(args.model),))
    settings = ReplicaSettings(args, names, server, limits)
    num_ranks = args.parallel_config.world_size
    return ReplicaDeployment(settings, replicas.scaling(), replicas.resources(args.device, num_ranks))


def read_again(context: typer.Context) -> ReplicaDeployment:
    """Read the command line, the environment and the config file again; the file may have changed.

    Raises:
        ValueError: The settings cannot be used.
    """
    words = list(context.find_root().obj)
    name = str(context.info_name)
    return read_deployment(context.command, name, words[words.index(name) + 1 :], context.parent)


def read_deployment(command: Any, name: str, words: list[str], parent: Any) -> ReplicaDeployment:
    """Return the settings of a command line of serve.

    Raises:
        ValueError: The settings cannot be used.
    """
    try:
        context = command.make_context(name, words, parent=parent)
    except typer.TyperException as error:
        raise ValueError(error.format_message()) from error
    except UsageError as error:
        raise ValueError(str(error)) from error
    flags = Given(context, context.params)
    argument, engine = context.params["argument"], flags.read(ServedOptions)
    if argument is not None:
        engine = engine.without_model()
    server, limits, replicas = (flags.read(kind) for kind in (ServerConfig, QueueLimits, ReplicaOptions))
    return replica_deployment(engine.args(argument), server, limits, replicas)
