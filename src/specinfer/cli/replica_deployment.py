"""The settings of `serve --replicas`, for several engines behind one port."""

from typing import Any

import typer

from specinfer.cli.commands import Given, UsageError
from specinfer.cli.options import ServedOptions
from specinfer.cli.replica_options import ReplicaOptions
from specinfer.cli.serve_options import ServerOptions
from specinfer.engine_args import EngineArgs
from specinfer.hub.locate import without_revision
from specinfer.server.replicas.settings import ReplicaDeployment, ReplicaSettings


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


def replica_deployment(args: EngineArgs, server: ServerOptions, replicas: ReplicaOptions) -> ReplicaDeployment:
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
    settings = ReplicaSettings(args, names, server.config(), server.limits())
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
    args = engine.args(argument)
    return replica_deployment(args, flags.read(ServerOptions), flags.read(ReplicaOptions))
