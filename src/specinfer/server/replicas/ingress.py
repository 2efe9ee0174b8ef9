"""The application at the port as a deployment of its own, for clusters where Ray Serve's proxies hold the ports."""

from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from specinfer.server import logs
from specinfer.server.replicas.fleet import RayFleet, application
from specinfer.server.replicas.front import FrontState, create_front
from specinfer.server.replicas.settings import Fleetwide, ReplicaSettings

_CPUS = 0.5


class Ingress:
    """What `front.py` is in the process of `specinfer serve`."""

    def __init__(self, settings: ReplicaSettings, replicas: Any) -> None:
        logs.configure(settings.server.log_level)
        self._state = FrontState(settings.server, settings.names[0])
        self._state.put_fleet(RayFleet(replicas))

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Ray Serve asks for it
        return create_front(self._state)


def with_ingress(told: Fleetwide) -> Any:
    """Replicas behind an ingress, for `serve run` and Ray Serve's configuration files."""
    settings = told.settings
    deployment = serve.deployment(
        name="Ingress",
        max_ongoing_requests=settings.server.max_connections,
        graceful_shutdown_timeout_s=max(settings.server.shutdown_timeout, 0.1),
        ray_actor_options={"num_cpus": _CPUS},
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )
    replicas = application(settings, told.scaling, told.resources)
    return deployment(serve.ingress()(Ingress)).bind(settings, replicas)
