"""serve --replicas: the same settings, for several engines behind one port."""

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from specinfer.cli.commands import UsageError
from specinfer.cli.options import EngineOptions
from specinfer.cli.replica_options import ReplicaOptions
from specinfer.cli.serve_options import ServerOptions

if TYPE_CHECKING:  # these need packages that only replicas need
    from specinfer.server.replicas.settings import Fleetwide

Options = TypeVar("Options", EngineOptions, ServerOptions, ReplicaOptions)


def check_installed() -> None:
    """Raises `UsageError` where Ray is missing."""
    try:
        from specinfer.server.replicas import fleet  # noqa: F401  # only whether what it needs is there
    except ImportError as error:
        raise UsageError(f"replicas: {error.name} is not installed; pip install 'specinfer[ray]'") from error


def serve(context: typer.Context, told: "Fleetwide", replicas: ReplicaOptions) -> int:
    """Serves until told to stop; the process's exit code. Raises as `process.run` does."""
    from specinfer.server.replicas.fleet import Cluster
    from specinfer.server.replicas.process import ReplicaService, run

    return run(ReplicaService(told, Cluster(replicas.ray_address), lambda: read_again(context)))


def fleetwide(model: str, engine: EngineOptions, server: ServerOptions, replicas: ReplicaOptions) -> "Fleetwide":
    """What replicas are told.

    Raises:
        ValueError: A setting cannot be used, or not with replicas.
    """
    from specinfer.server.replicas.settings import Fleetwide, ReplicaSettings

    settings = ReplicaSettings(
        model=model,
        names=tuple(server.served_model_name or (model,)),
        engine=engine.settings() | server.adaptation(),
        server=server.config(),
        limits=server.limits(),
    )
    return Fleetwide(settings, replicas.scaling(), replicas.resources(engine.device))


def read_again(context: typer.Context) -> "Fleetwide":
    """The same of what the command line, the environment and the file say by now; the file may have changed.

    Raises:
        ValueError: They cannot be used.
    """
    words = list(context.find_root().obj)
    name = str(context.info_name)
    try:
        again = context.command.make_context(name, words[words.index(name) + 1 :], parent=context.parent)
    except (typer.TyperException, UsageError) as error:
        raise ValueError(error.format_message() if isinstance(error, typer.TyperException) else str(error)) from error
    engine = _options(EngineOptions, again.params)
    argument = again.params["argument"]
    if argument is not None:
        engine = dataclasses.replace(engine, model=None)
    return fleetwide(
        engine.named(argument), engine, _options(ServerOptions, again.params), _options(ReplicaOptions, again.params)
    )


def _options(kind: type[Options], values: dict[str, Any]) -> Options:
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})
