"""The command serve: an HTTP server with OpenAI's API."""

import itertools
import logging
import os
import socket
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import specinfer
from specinfer.cli import replicas as replica_command
from specinfer.cli.errors import UsageError, checking
from specinfer.cli.flags import flags_of, read_config, source_of
from specinfer.cli.loading import LoadingLog
from specinfer.cli.options import ARGUMENT, DEBUG, ServedOptions, check_local, flag, follow, locate_all
from specinfer.cli.replicas import ReplicaOptions
from specinfer.core.limits import QueueLimits
from specinfer.core.parallel_config import find_place
from specinfer.engine_args import EngineArgs
from specinfer.hub.locate import without_revision
from specinfer.server.config import ServerConfig, check_writable, is_loopback
from specinfer.server.listening import listening
from specinfer.server.supervisor import ParentProcess, is_supported, supervise

if TYPE_CHECKING:
    from specinfer.llm import LLM

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
_SECRETS = frozenset({"api_key"})  # never logged
_PLACES = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


def serve(
    context: typer.Context,
    argument: ARGUMENT = None,
    *,
    config: CONFIG = None,
    engine: ServedOptions,
    server: ServerConfig,
    limits: QueueLimits,
    replicas: ReplicaOptions,
    debug: DEBUG = False,
) -> None:
    """Serve a model with an OpenAI-compatible HTTP API.

    Flags can also be set as SPECINFER_FLAG in the environment or in a YAML file; the command line takes precedence.
    """
    _check_installed()
    with checking():
        # A model on the command line takes precedence over one in the environment or a file.
        if argument is not None and source_of(context, "model") != "COMMANDLINE":
            engine = engine.without_model()
        args = engine.args(argument)
        if server.lora_modules and not args.enable_lora:
            raise ValueError("lora_modules: the model is loaded without adapters; add --enable-lora")
        if server.allow_runtime_lora_updating and replicas.replicas is not None:
            raise ValueError("allow_runtime_lora_updating: each replica has its own adapters; leave it out")
        deployment = None
        if replicas.replicas is None:
            replicas.check_alone()
        else:
            replica_command.check_installed()
            deployment = replica_command.replica_deployment(args, server, limits, replicas)
        check_local(args)
        if server.trace is not None and deployment is None:
            check_writable(server.trace)
        others = (flags_of(kind) or () for kind in (ServerConfig, QueueLimits, ReplicaOptions))
        settings = {**engine.given, **{flag.name: context.params[flag.name] for flags in others for flag in flags}}

        def work(parent: ParentProcess | None = None, listener: socket.socket | None = None) -> int:
            from specinfer.server import logs, observation, process

            if server.otlp_endpoint is not None:
                observation.check_installed()
            _start_logs(context, str(args.model), server, settings, debug)
            follow(args)
            try:
                if deployment is not None:
                    return replica_command.serve(context, deployment, replicas)
                if parent is not None and parent.last_end:
                    _keep_files(server.trace, args.step_log)
                load = partial(_load, args, parent)
                names = tuple(server.served_model_name or (without_revision(args.model),))
                service = process.Service(load, str(args.model), names, server, limits, parent=parent)
                return process.run(service, listener)
            finally:
                logs.flush()

        try:
            if deployment is not None or server.single_process or not (is_supported() and _starts_all_ranks(args)):
                code = work()
            else:
                with listening(server) as listener:
                    code = supervise(
                        partial(work, listener=listener), listener, has_tls=server.ssl_certfile is not None,
                        log_format=server.log_format, max_silence=limits.max_step_seconds,
                    )  # fmt: skip
        except OSError as error:
            raise UsageError(f"{error.args[0]}" if len(error.args) == 1 else str(error)) from error
    raise typer.Exit(code)


def _starts_all_ranks(args: EngineArgs) -> bool:
    """Return whether the server starts all processes of its engine, and so can start them again."""
    place = find_place(args.parallel_config)
    return place.num_started + 1 == place.world_size


def _keep_files(*paths: str | Path | None) -> None:
    """Rename files that an engine that died has left: trace.jsonl becomes trace.1.jsonl."""
    for place in (Path(path) for path in paths if path is not None):
        if place.is_file() and place.stat().st_size:
            names = (place.with_name(f"{place.stem}.{number}{place.suffix}") for number in itertools.count(1))
            place.rename(next(name for name in names if not name.exists()))


def _load(args: EngineArgs, parent: ParentProcess | None) -> "LLM":
    """Return the loaded model; after several failures in a row only after a delay."""
    from specinfer.llm import LLM

    if parent is not None:
        time.sleep(parent.delay)
    with LoadingLog(logger.info) as log:
        locate_all(args, log)
        llm = LLM.from_engine_args(args, log)
        llm.prepare()
    return llm


def _start_logs(
    context: typer.Context, model: str, config: ServerConfig, settings: dict[str, Any], debug: bool
) -> None:
    """Log the start, and each setting that differs from the default with the place that it came from."""
    from specinfer.server import logs

    logs.configure("debug" if debug else config.log_level, config.log_format)
    logger.info("SpecInfer %s, model %s", specinfer.__version__, model)
    for source, place in _PLACES.items():
        given = [_shown(name, value) for name, value in settings.items() if source_of(context, name) == source]
        if given:
            logger.info("%s: %s", place, ", ".join(given))
    if not (config.api_keys or config.uds or is_loopback(config.host)):
        logger.warning("insecure: whoever reaches %s can use this server; no key is asked for", config.host)
    if unknown := _unknown_variables(context):
        logger.warning("not settings, and left aside: %s (see specinfer serve --help)", ", ".join(unknown))


def _shown(name: str, value: Any) -> str:
    return f"{name}=***" if name in _SECRETS else f"{name}={value!r}"


def _unknown_variables(context: typer.Context) -> list[str]:
    """Return environment variables that look like settings and are none: somebody may rely on them."""
    known = {getattr(option, "envvar", None) for option in context.command.params}
    unknown = (name for name in os.environ if name.startswith("SPECINFER_") and name not in known)
    return sorted(name for name in unknown if not name.startswith(_OTHER_VARIABLES))


def _check_installed() -> None:
    for name in ("fastapi", "uvicorn"):
        if find_spec(name) is None:
            raise UsageError(f"serve: {name} is not installed; pip install 'specinfer[serve]'")
