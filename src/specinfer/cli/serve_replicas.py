"""The application of `serve --replicas` for Ray Serve's own command."""

from typing import Any

import typer
from typer.main import get_command

from specinfer.cli.commands import add_command
from specinfer.cli.replicas import check_installed, read_deployment
from specinfer.cli.serve import serve

_PORT = frozenset({"host", "port", "uds", "root_path", "ssl_certfile", "ssl_keyfile"})


def build(flags: dict[str, Any]) -> Any:
    """Build the application for Ray Serve's own command and config files, where Ray Serve's proxies have the port.

    Args:
        flags: Names of flags and their values, such as {"model": "demo", "replicas": "2"}.

    Raises:
        ValueError: The flags cannot be used, or set the port.
    """
    if about_port := sorted(_PORT & {name.replace("-", "_") for name in flags}):
        raise ValueError(f"{about_port[0]}: Ray Serve's proxies hold the port; set it in http_options")
    program = typer.Typer()
    add_command(program, serve, environment=True)
    command = get_command(program)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if not isinstance(value, bool)]
    words += [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is True]
    # The proxies listen for other machines, so a key is required.
    deployment = read_deployment(command, "serve", ["--host=0.0.0.0", "--ray-address=auto", *words], None)
    check_installed()
    from specinfer.server.replicas.replica_set import with_ingress

    return with_ingress(deployment)
