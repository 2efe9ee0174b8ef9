"""Replicas as a deployment of Ray Serve: starts, reaches and replaces them. Ray Serve keeps them alive.

`with_ingress` adds the router as a deployment, for clusters where Ray Serve's proxies have the ports.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Ray reads these variables when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # otherwise late calls of Serve start another Ray
os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # in replicas' log lines
os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # Ray would drop lines about speed as repeated

import ray
from ray import serve
from ray._private import ray_constants
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation, RequestRouterConfig
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Scope

from specinfer.core.errors import ModelError
from specinfer.server import logs
from specinfer.server.replicas.engine import EngineReplica
from specinfer.server.replicas.messages import may_ask
from specinfer.server.replicas.router import NoReplicaError, ReplicaLostError, RouterState, create_router
from specinfer.server.replicas.settings import ReplicaDeployment, ReplicaSettings, Resources, Scaling

logger = logging.getLogger(__name__)
APPLICATION, DEPLOYMENT = "specinfer", "Engine"
_STORE_BYTES = 128 * 2**20  # the object store of our own Ray: messages are small
_SPARE_REQUESTS = 64  # requests that need no engine, in addition to those its queue holds
_WAIT_SECONDS = 30.0  # how long to wait for a replica if there is none
_PACKAGE = "specinfer.server.replicas"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Ray cluster that replicas run on.

    Attributes:
        address: The address of a running Ray, such as "auto" or "10.0.0.1:6379", or None for one of our own on this
            machine, which ends with this process.
    """

    address: str | None = None
    _folders: list[str] = field(default_factory=list)  # of our own Ray

    def join(self) -> None:
        """Start Ray or connect to it, and start Serve without ports of its own.

        Raises:
            OSError: Ray cannot be reached or started.
        """
        settings: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True, "namespace": APPLICATION}
        if self.address is None:
            settings |= {"address": "local", "include_dashboard": False, "object_store_memory": _STORE_BYTES}
            settings["_temp_dir"] = self._private_folder()
            ray_constants.ENABLE_RAY_CLUSTER = False  # Ray then listens on loopback only, for its metrics, too
            # Other users of this machine can reach these ports: the token keeps them out.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        else:
            settings["address"] = self.address
        try:
            ray.init(**settings)
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            serve.start(
                proxy_location=ProxyLocation.Disabled,
                logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            place = "on this machine" if self.address is None else f"at {self.address}"
            raise OSError(f"ray_address: Ray {place} cannot be used: {_first_line(error)}") from error

    @property
    def is_own(self) -> bool:
        return self.address is None

    def leave(self) -> None:
        """End the replicas, and Ray if it is our own."""
        with contextlib.suppress(Exception):  # Ray may have ended before
            serve.delete(APPLICATION)
        ray.shutdown()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder of our own Ray."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _private_folder(self) -> str:
        """Return a folder for Ray's sockets and logs. Ray lets everyone write to it, but its parent is private."""
        self._folders.append(tempfile.mkdtemp(prefix="specinfer-ray-"))
        return str(Path(self._folders[-1]) / "ray")


def application(settings: ReplicaSettings, scaling: Scaling, resources: Resources) -> Any:
    """Return the deployment of the replicas, to run it or to bind it to another."""
    num_seqs = settings.engine.max_num_seqs
    many: dict[str, Any] = {"num_replicas": scaling.min_replicas}
    if not scaling.is_fixed:
        many = {"autoscaling_config": _autoscaling(scaling)}
    deployment = serve.deployment(
        name=DEPLOYMENT,
        max_ongoing_requests=num_seqs + settings.limits.max_num_queued_reqs + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=max(settings.server.shutdown_timeout, 0.1),
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        max_constructor_retry_count=2,
        ray_actor_options={
            "num_cpus": resources.cpus,
            "num_gpus": resources.gpus,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(resources.num_threads)}},
        },
        request_router_config=RequestRouterConfig(
            request_router_class=f"{_PACKAGE}.routing:PrefixRouter", request_router_kwargs={"slack": num_seqs // 2}
        ),
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        **many,
    )
    return deployment(EngineReplica).bind(settings)


def _autoscaling(scaling: Scaling) -> AutoscalingConfig:
    shortest = max(min(scaling.up_seconds, scaling.down_seconds), 0.5)
    policy = AutoscalingPolicy(
        policy_function=f"{_PACKAGE}.settings:LoadPolicy",
        policy_kwargs={"target_requests": scaling.target_requests, "target_ttft": scaling.target_ttft},
    )
    with warnings.catch_warnings():
        # The variables that Ray suggests in place of the interval would apply to everything the cluster serves.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            initial_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            target_ongoing_requests=scaling.target_requests,
            upscale_delay_s=scaling.up_seconds,
            downscale_delay_s=scaling.down_seconds,
            metrics_interval_s=min(shortest, 5.0),
            look_back_period_s=min(2 * shortest, 20.0),
            policy=policy,
        )


class RayReplicaSet:
    """The replicas of a running Ray Serve application."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._asking = handle.options(method_name="answer", stream=True)

    async def ask(
        self, scope: Scope, body: bytes, digests: Sequence[str], avoid: Sequence[str]
    ) -> AsyncGenerator[bytes]:
        """See `ReplicaSet.ask`."""
        await _wait_for_replica()
        stream = self._asking.remote(scope, body, list(digests), list(avoid))
        try:
            async for part in stream:
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            raise ReplicaLostError(_first_line(error)) from error
        finally:
            stream.cancel()  # has no effect on a response that has ended

    async def everyone(self, method: str, seconds: float) -> list[Any]:
        """See `ReplicaSet.everyone`."""
        try:
            results = await self._handle.broadcast(method).results_async(timeout_s=seconds, return_exceptions=True)
        except Exception as error:  # whatever the error is, there are no results
            logger.debug("%s: no response of the replicas: %s", method, _first_line(error))
            return []
        return [result for result in results if not isinstance(result, BaseException)]


def deploy(settings: ReplicaSettings, scaling: Scaling, resources: Resources) -> RayReplicaSet:
    """Start replicas, or replace the running ones one after another; return when they serve.

    Raises:
        ModelError: The replicas cannot be started; their log has the reason.
    """
    try:
        handle = serve.run(application(settings, scaling, resources), name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise ModelError(f"replicas: none could be started: {_cause() or _last_line(str(error))}") from error
    return RayReplicaSet(handle)


async def _wait_for_replica() -> None:
    """Wait for a replica; raise `NoReplicaError` if there has been none for `_WAIT_SECONDS`."""
    end = time.monotonic() + _WAIT_SECONDS
    while not may_ask():
        if time.monotonic() > end:
            raise NoReplicaError
        await asyncio.sleep(0.1)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


def _cause() -> str:
    """Return the error of a failed replica as Ray reports it, or "" if it reports none."""
    with contextlib.suppress(Exception):
        return _last_line(serve.status().applications[APPLICATION].deployments[DEPLOYMENT].message)
    return ""


def _last_line(report: str) -> str:
    """Return the last line of a report with a traceback, which names the error."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


_CPUS = 0.5


class Ingress:
    """A Ray Serve deployment that runs the router, as `router.py` does in the process of `specinfer serve`."""

    def __init__(self, settings: ReplicaSettings, replicas: Any) -> None:
        logs.configure(settings.server.log_level, settings.server.log_format)
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
