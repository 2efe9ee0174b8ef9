"""The router as a deployment of its own, for clusters where Ray Serve's proxies have the ports."""

from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from specinfer.server import logs
from specinfer.server.replicas.replica_set import RayReplicaSet, application
from specinfer.server.replicas.router import RouterState, create_router
from specinfer.server.replicas.settings import ReplicaDeployment, ReplicaSettings

_CPUS = 0.5


class Ingress:
    """A Ray Serve deployment that runs the router, as `router.py` does in the process of `specinfer serve`."""

    def __init__(self, settings: ReplicaSettings, replicas: Any) -> None:
        logs.configure(settings.server.log_level)
        self._state = RouterState(settings.server, settings.names[0])
        self._state.put_replica_set(RayReplicaSet(replicas))

    def __serve_build_asgi_app__(self) -> ASGIApp:  # called by Ray Serve
        return create_router(self._state)


def with_ingress(deployment: ReplicaDeployment) -> Any:
    """Return replicas behind an ingress, for `serve run` and Ray Serve's configuration files."""
    settings = deployment.settings
    ingress = serve.deployment(
        name="Ingress",
        max_ongoing_requests=settings.server.max_connections,
        graceful_shutdown_timeout_s=max(settings.server.shutdown_timeout, 0.1),
        ray_actor_options={"num_cpus": _CPUS},
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )
    replicas = application(settings, deployment.scaling, deployment.resources)
    return ingress(serve.ingress()(Ingress)).bind(settings, replicas)
