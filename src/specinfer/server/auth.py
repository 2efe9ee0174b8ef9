"""Access control: API keys if they are set, otherwise checks that a request does not come from another site's page.

All paths but the few named here are closed. Without keys, any web page could make a browser send requests to this
server: under a host name that its owner points at this machine (DNS rebinding), or across sites.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from specinfer.server.config import ServerConfig, is_loopback
from specinfer.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/health/ready", "/ping"})
_ROLE_OF = {
    "/metrics": "metrics",
    "/load": "metrics",
    "/v1/load_lora_adapter": "admin",
    "/v1/unload_lora_adapter": "admin",
}  # all other paths need "generate"
_ANY_ROLE = frozenset({"/version", "/v1/models"})
_PAGE_PREFIX = "/static/"  # files that / loads; they hold no secrets


class Guard:
    """Middleware that requires an API key, or, without keys, refuses what another site's page may have sent."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config
        self._tenants = config.tenants
        self._digests = {_digest(key): name for key, name in zip(config.api_keys, self._tenants, strict=True)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path = route_path(scope)
        tenant = ""
        if path not in OPEN_PATHS:
            if self._config.allowed_hosts or not self._digests:
                self._check_host(headers.get(b"host", ""))
            if self._digests:
                tenant = self._tenant(headers)
                if not tenant and not self._is_open(scope["method"], path):
                    raise ApiError(
                        "invalid_api_key",
                        "a valid API key is needed; send it as Authorization: Bearer KEY",
                    )
                self._check_role(tenant, path)
            else:
                self._check_origin(headers, scope["scheme"])
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _check_role(self, tenant: str, path: str) -> None:
        role = _ROLE_OF.get(path, "generate")
        if tenant and path not in _ANY_ROLE and role not in self._tenants[tenant].roles:
            raise ApiError(
                "insufficient_permissions",
                f"this API key is not for {path}: it lacks the role {role}; use another key",
            )

    def _is_open(self, method: str, path: str) -> bool:
        if method == "OPTIONS" or (path == "/metrics" and self._config.metrics_public):
            return True
        return method in ("GET", "HEAD") and self._config.page and (path == "/" or path.startswith(_PAGE_PREFIX))

    def _tenant(self, headers: Mapping[bytes, str]) -> str:
        """Return the name of the key that was sent, or "" if no key is valid."""
        scheme, _, bearer = headers.get(b"authorization", "").partition(" ")
        given = [bearer.strip() if scheme.lower() == "bearer" else ""]
        given += [headers.get(b"api-key", ""), headers.get(b"x-api-key", "")]
        tenant = ""
        for key in filter(None, given):
            digest = _digest(key)
            for known, name in self._digests.items():  # compare with all, so that the time reveals nothing
                if hmac.compare_digest(digest, known):
                    tenant = name
        return tenant

    def _check_host(self, host: str) -> None:
        name = _host_name(host)
        allowed = self._config.allowed_hosts
        if "*" in allowed or name in allowed or is_loopback(name):
            return
        # A Host that is an IP address is not a name that someone else could point at this machine.
        if not allowed and _is_address(name):
            return
        raise ApiError("invalid_host", f"host: {name!r:.80} is not a name of this server; add it with --allowed-hosts")

    def _check_origin(self, headers: Mapping[bytes, str], scheme: str) -> None:
        origin = headers.get(b"origin")
        if origin is None or {"*", origin} & set(self._config.allowed_origins):
            return
        # A page cannot send the header of a proxy with TLS without asking first.
        scheme = headers.get(b"x-forwarded-proto", scheme)
        default = ":443" if scheme == "https" else ":80"
        if origin.removesuffix(default) == f"{scheme}://{headers.get(b'host', '').removesuffix(default)}":
            return
        raise ApiError(
            "invalid_origin",
            f"origin: pages of {origin!r:.80} may not call this server; add it with --allowed-origins",
        )


def route_path(scope: Scope) -> str:
    """Return the path as the routes see it, without the proxy's root path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def tenant_of(request: Request) -> str:
    """Return the name of the key that the request came with, or "" without keys."""
    return str(getattr(request.state, "tenant", ""))


def has_role(request: Request, config: ServerConfig, role: str) -> bool:
    """Return whether the key that the request came with has a role; without keys everybody has all."""
    tenant = tenant_of(request)
    return not tenant or role in config.tenants[tenant].roles


def body_size_of(request: Request) -> int:
    """Return the bytes of the request's body."""
    return int(getattr(request.state, "body_size", 0))


def cache_salt_of(request: Request, config: ServerConfig, asked: str | None) -> str | None:
    """Return the salt that separates cached prefixes: the request's own, and with several keys also the tenant."""
    if len(config.api_keys) < 2:
        return asked
    tenant, tenants = tenant_of(request), config.tenants
    if not tenants[tenant].name:  # after a restart its place may be that of another key, and prefixes may be on disk
        tenant = _digest(config.api_keys[list(tenants).index(tenant)]).hex()
    return f"{tenant}:{asked or ''}"


def _host_name(host: str) -> str:
    """Return a Host header's name without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
