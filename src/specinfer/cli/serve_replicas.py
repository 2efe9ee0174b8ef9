"""serve --replicas: the same settings for several engines behind one port."""

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer.main import get_command

from specinfer.cli.commands import UsageError
from specinfer.cli.options import EngineOptions
from specinfer.cli.replica_options import ReplicaOptions
from specinfer.cli.serve_options import ServerOptions
from specinfer.core.parallel_config import ParallelConfig

if TYPE_CHECKING:  # these imports need packages of replicas
    from specinfer.server.replicas.settings import ReplicaDeployment

_PORT = frozenset({"host", "port", "uds", "root_path", "ssl_certfile", "ssl_keyfile"})
Options = TypeVar("Options", EngineOptions, ServerOptions, ReplicaOptions)


def check_installed() -> None:
    """Raise `UsageError` if Ray is missing."""
    try:
        from specinfer.server.replicas import replica_set  # noqa: F401  # tests whether its dependencies are installed
    except ImportError as error:
        raise UsageError(f"replicas: {error.name} is not installed; pip install 'specinfer[ray]'") from error


def serve(context: typer.Context, deployment: "ReplicaDeployment", replicas: ReplicaOptions) -> int:
    """Serve until stopped, and return the process's exit code. Errors are those of `process.run`."""
    from specinfer.server.replicas.process import ReplicaService, run
    from specinfer.server.replicas.replica_set import Cluster

    return run(ReplicaService(deployment, Cluster(replicas.ray_address), lambda: read_again(context)))


def replica_deployment(
    model: str, engine: EngineOptions, server: ServerOptions, replicas: ReplicaOptions
) -> "ReplicaDeployment":
    """Return the settings of the replicas.

    Raises:
        ValueError: A setting cannot be used, or not with replicas.
    """
    from specinfer.server.replicas.settings import ReplicaDeployment, ReplicaSettings

    if (engine.nnodes, engine.node_rank, engine.master_addr, engine.master_port) != (1, 0, None, None):
        raise ValueError(
            "nnodes, node_rank, master_addr, master_port: the ranks of a replica are on one machine and find each "
            "other; leave them out, or --replicas"
        )
    ranks = ParallelConfig(engine.tensor_parallel_size, engine.pipeline_parallel_size)
    settings = ReplicaSettings(
        model=model,
        names=tuple(server.served_model_name or (model,)),
        engine=engine.settings() | server.adaptation(),
        server=server.config(),
        limits=server.limits(),
    )
    return ReplicaDeployment(settings, replicas.scaling(), replicas.resources(engine.device, ranks.world_size))


def build(flags: dict[str, Any]) -> Any:
    """Build the application for Ray Serve's own command and config files, where Ray Serve's proxies have the port.

    Args:
        flags: Names of flags and their values, such as {"model": "demo", "replicas": "2"}.

    Raises:
        ValueError: The flags cannot be used, or set the port.
    """
    from specinfer.cli.app import app

    if about_port := sorted(_PORT & {name.replace("-", "_") for name in flags}):
        raise ValueError(f"{about_port[0]}: Ray Serve's proxies hold the port; set it in http_options")
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if not isinstance(value, bool)]
    words += [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is True]
    # The proxies listen for other machines, so a key is required.
    deployment = _read(command, "serve", ["--host=0.0.0.0", "--ray-address=auto", *words], None)
    check_installed()
    from specinfer.server.replicas.ingress import with_ingress

    return with_ingress(deployment)


def read_again(context: typer.Context) -> "ReplicaDeployment":
    """Read the command line, the environment and the config file again; the file may have changed.

    Raises:
        ValueError: The settings cannot be used.
    """
    words = list(context.find_root().obj)
    name = str(context.info_name)
    return _read(context.command, name, words[words.index(name) + 1 :], context.parent)


def _read(command: Any, name: str, words: list[str], parent: Any) -> "ReplicaDeployment":
    try:
        values = command.make_context(name, words, parent=parent).params
    except typer.TyperException as error:
        raise ValueError(error.format_message()) from error
    except UsageError as error:
        raise ValueError(str(error)) from error
    engine, replicas = _options(EngineOptions, values), _options(ReplicaOptions, values)
    argument = values["argument"]
    if argument is not None:
        engine = dataclasses.replace(engine, model=None)
    return replica_deployment(engine.named(argument), engine, _options(ServerOptions, values), replicas)


def _options(kind: type[Options], values: dict[str, Any]) -> Options:
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})
