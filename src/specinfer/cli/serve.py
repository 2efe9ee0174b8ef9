"""The command serve: an HTTP server with OpenAI's API."""

import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer

import specinfer
from specinfer.cli import serve_replicas
from specinfer.cli.commands import UsageError, checking
from specinfer.cli.config_file import read_config
from specinfer.cli.loading import LoadingLog
from specinfer.cli.options import ARGUMENT, DEBUG, EngineOptions, flag
from specinfer.cli.replica_options import ReplicaOptions
from specinfer.cli.serve_options import ServerOptions, shown

logger = logging.getLogger(__name__)

CONFIG = Annotated[
    str | None,
    flag(
        "Model",
        "YAML file of settings, by the names of flags. The command line and environment variables take precedence.",
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
        envvar="SPECINFER_CONFIG",
    ),
]
# Variables that are read elsewhere, and those that Kubernetes sets for a Service called specinfer.
_OTHER_VARIABLES = ("SPECINFER_NATIVE", "SPECINFER_SERVICE_", "SPECINFER_PORT_")
_LAYERS = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


def serve(
    context: typer.Context,
    argument: ARGUMENT = None,
    *,
    config: CONFIG = None,
    engine: EngineOptions,
    server: ServerOptions,
    replicas: ReplicaOptions,
    debug: DEBUG = False,
) -> None:
    """Serve a model with an OpenAI-compatible HTTP API.

    Flags can also be set as SPECINFER_FLAG in the environment or in a YAML file; the command line takes precedence.
    """
    _check_installed()
    from specinfer.server import logs, process, telemetry, trace
    from specinfer.server.config import is_loopback

    with checking():
        # A model on the command line takes precedence over one in the environment or a file.
        if argument is not None and _layer(context, "model") != "command line":
            engine = dataclasses.replace(engine, model=None)
        model, settings = engine.named(argument), engine.settings()
        configured, limits = server.config(), server.limits()
        if configured.otlp_endpoint is not None:
            telemetry.check_installed()
        if configured.trace is not None and replicas.replicas is None:
            trace.check_writable(configured.trace)
        if replicas.replicas is None:
            replicas.check_alone()
        else:
            serve_replicas.check_installed()
            deployment = serve_replicas.replica_deployment(model, engine, server, replicas)
        logs.configure("debug" if debug else configured.log_level)
        logger.info("SpecInfer %s, model %s", specinfer.__version__, model)
        for line in _given(context, engine, server, replicas):
            logger.info("%s", line)
        if not (configured.api_keys or configured.uds or is_loopback(configured.host)):
            logger.warning("insecure: whoever reaches %s can use this server; no key is asked for", configured.host)
        if unknown := _unknown_variables(context):
            logger.warning("not settings, and left aside: %s (see specinfer serve --help)", ", ".join(unknown))

        engine.follow(model, settings | server.adaptation())

        def load() -> Any:
            from specinfer.llm import LLM

            llm = LLM(model, **settings, **server.adaptation(), progress=LoadingLog(logger))
            llm.prepare()
            return llm

        names = tuple(server.served_model_name or (model,))
        service = process.Service(load, model, names, configured, limits)
        try:
            if replicas.replicas is None:
                code = process.run(service)
            else:
                code = serve_replicas.serve(context, deployment, replicas)
        except OSError as error:
            raise UsageError(f"{error.args[0]}" if len(error.args) == 1 else str(error)) from error
    raise typer.Exit(code)


def _given(context: typer.Context, *options: Any) -> Iterator[str]:
    """Yield the settings that differ from the defaults, one line per source."""
    for layer in _LAYERS.values():
        given = [
            shown(field.name, getattr(kind, field.name))
            for kind in options
            for field in dataclasses.fields(kind)
            if _layer(context, field.name) == layer
        ]
        if given:
            yield f"{layer}: {', '.join(given)}"


def _unknown_variables(context: typer.Context) -> list[str]:
    """Return environment variables that look like settings and are none: somebody may rely on them."""
    known = {getattr(option, "envvar", None) for option in context.command.params}
    found = (name for name in os.environ if name.startswith("SPECINFER_") and name not in known)
    return sorted(name for name in found if not name.startswith(_OTHER_VARIABLES))


def _layer(context: typer.Context, name: str) -> str | None:
    source = context.get_parameter_source(name)
    return None if source is None else _LAYERS.get(source.name)


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401  # tests whether they are installed
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(f"serve: {error.name} is not installed; pip install 'specinfer[serve]'") from error
