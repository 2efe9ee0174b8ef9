"""The settings of the server: how it is reached and what it accepts, from flags, environment and config file."""

import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from specinfer.core.files import read_text
from specinfer.core.lora import LoRARequest, parse_modules
from specinfer.core.options import check_settings, setting
from specinfer.server.keys import KeySettings, check_key, named, read_key_file

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_MODEL, _ADDRESS, _ACCESS, _LIMITS, _WATCH = "Model", "Address", "Access", "Limits", "Watching"
_DAY: dict[str, Any] = {"low": 0, "high": 86400.0}  # seconds


def _template(path: str) -> str:
    return read_text("chat_template", path)


def _key_settings(path: str) -> dict[str, KeySettings]:
    return read_key_file(path, read_text("api_key_file", path))


def _lowered(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.lower() for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the server, in addition to those of the engine.

    Attributes:
        api_keys: Any of these keys gives access; without keys, everyone who reaches the server may use it.
        key_settings: Names, roles and limits of single keys; each of them is one of `api_keys`, too. A key that is not
            named here has the default ones.
        allowed_origins: Web pages that may call from a browser; "*" allows all.
        allowed_hosts: Names of this server that requests may have in their Host header. If there are none, loopback
            names and IP addresses are allowed, or any name with keys.
        max_connections_per_address: The IPv6 addresses of one network of 64 bits count as one.
        max_tree_nodes: The whole batch pays for the nodes that a request asks for.
        body_timeout: A client that reads nothing of its response for this long is disconnected, too.
        stream_interval: Tokens that a stream gathers before it sends them, unless the request sets its own.
        chat_template: Text of the template, or None for that of the model.
        lora_modules: Adapters that are served from the start, by name.
        log_stats_interval: 0 without `log_stats`.

    Raises:
        ValueError: A field is out of range, or two fields conflict; the message says what to change.
    """

    served_model_name: tuple[str, ...] = setting(
        (), _MODEL, "Name of the model in requests. May be repeated. (default: the name given here)"
    )
    chat_template: str | None = setting(
        None, _MODEL, "Chat template to use instead of that of the model.", metavar="FILE", read=_template
    )
    lora_modules: Mapping[str, LoRARequest] = setting(
        dict,
        _MODEL,
        "LoRA adapter to serve as a model: NAME=PATH, or JSON with name and path. May be repeated.",
        repeats=True,
        read=parse_modules,
    )
    allow_runtime_lora_updating: bool = setting(
        False, _ACCESS, "Let API keys with the role admin load and unload adapters."
    )

    host: str = setting("127.0.0.1", _ADDRESS, "Address to listen on; any but loopback requires an API key.")
    port: int = setting(8000, _ADDRESS, "Port; 0 chooses a free one.", low=0, high=65535)
    uds: str | None = setting(None, _ADDRESS, "Unix socket to listen on instead of host and port.", metavar="FILE")
    root_path: str = setting("", _ADDRESS, "Path prefix that a proxy strips, such as /llm.")
    ssl_certfile: str | None = setting(None, _ADDRESS, "TLS certificate.", metavar="FILE")
    ssl_keyfile: str | None = setting(None, _ADDRESS, "Key of the TLS certificate.", metavar="FILE")
    allowed_hosts: tuple[str, ...] = setting(
        (), _ADDRESS, "Host name to accept in requests. May be repeated.", metavar="NAME", repeats=True, read=_lowered
    )

    api_keys: tuple[str, ...] = setting(
        (),
        _ACCESS,
        "API key to accept. May be repeated. Other users of the machine can see flags; prefer the environment "
        "variable or --api-key-file.",
        name="api_key",
        metavar="KEY",
    )
    key_settings: Mapping[str, KeySettings] = setting(
        dict,
        _ACCESS,
        "File of API keys, one per line, each with its roles (generate, metrics, admin), name and limits if it has "
        "some.",
        name="api_key_file",
        metavar="FILE",
        read=_key_settings,
    )
    insecure: bool = setting(False, _ACCESS, "Allow other machines without an API key.")
    allowed_origins: tuple[str, ...] = setting(
        (), _ACCESS, "Allowed CORS origin, such as https://chat.example.org. May be repeated.", metavar="ORIGIN"
    )
    metrics_public: bool = setting(False, _ACCESS, "Serve /metrics without an API key.")

    max_body_bytes: int = setting(4 * 2**20, _LIMITS, "Maximum size of a request body, in bytes.", low=1)
    max_outgoing_bytes: int = setting(
        256 * 2**20,
        _LIMITS,
        "Maximum size of all responses that clients have not read, in bytes. Each key may always have an even part.",
        low=1,
    )
    max_header_bytes: int = setting(16 * 2**10, _LIMITS, "Maximum size of request headers, in bytes.", low=1)
    max_headers: int = setting(100, _LIMITS, "Maximum number of request headers.", low=1)
    max_connections: int = setting(
        1024, _LIMITS, "Maximum number of concurrent HTTP requests; more are answered with 503.", low=1
    )
    max_connections_per_address: int | None = setting(
        None,
        _LIMITS,
        "Maximum number of open connections from one address. (default: half of all that may be open)",
        low=1,
    )
    body_timeout: float = setting(
        30.0, _LIMITS, "Time limit for receiving headers, and again for a body, in seconds.", low_open=True, **_DAY
    )
    keep_alive_timeout: float = setting(
        10.0, _LIMITS, "Time until an idle connection is closed, in seconds.", low_open=True, **_DAY
    )
    max_tree_nodes: int | None = setting(
        None,
        _LIMITS,
        "Maximum number of tree nodes that a request may ask for. (default: 64, or 256 with --offload)",
        low=1,
    )
    shutdown_timeout: float = setting(
        20.0, _LIMITS, "Time for running requests to finish after SIGTERM, in seconds.", **_DAY
    )
    single_process: bool = setting(
        False,
        _LIMITS,
        "Serve in one process, which ends with its engine. By default another keeps the port open and starts the "
        "engine again.",
    )
    ping_seconds: float = setting(
        15.0, _LIMITS, "Interval of keep-alive comments in a silent stream, in seconds; 0 disables them.", **_DAY
    )
    stream_interval: int = setting(1, _LIMITS, "Number of tokens to buffer before each chunk of a stream.", low=1)

    page: bool = setting(True, _WATCH, "Do not serve the page at /.", name="no_page", is_negated=True)
    docs: bool = setting(True, _WATCH, "Do not serve /openapi.json.", name="no_docs", is_negated=True)
    metrics_prefix: str = setting(
        "specinfer",
        _WATCH,
        "Prefix of the metrics: specinfer, or vllm for its dashboards.",
        choices=("specinfer", "vllm"),
    )
    metrics: bool = setting(True, _WATCH, "Do not serve /metrics.", name="no_metrics", is_negated=True)
    log_level: str = setting("info", _WATCH, "Log level: debug, info, warning, error or critical.", choices=LOG_LEVELS)
    log_format: str = setting(
        "text", _WATCH, "Format of log lines: {choices}, an object a line.", choices=("text", "json")
    )
    log_stats_interval: float = setting(10.0, _WATCH, "Interval of log lines about throughput, in seconds.", **_DAY)
    log_stats: bool = setting(True, _WATCH, "Do not log throughput.", name="no_log_stats", is_negated=True)
    access_log: bool = setting(True, _WATCH, "Do not log requests.", name="no_access_log", is_negated=True)
    trace: str | None = setting(
        None, _WATCH, "Record the token trees of all requests here, for specinfer trace.", metavar="FILE"
    )
    otlp_endpoint: str | None = setting(
        None,
        _WATCH,
        "Endpoint for OpenTelemetry spans, such as http://localhost:4318/v1/traces.",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "api_keys", tuple(dict.fromkeys([*self.api_keys, *self.key_settings])))
        if not self.log_stats:
            object.__setattr__(self, "log_stats_interval", 0.0)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path must begin with / and not end with one, not {self.root_path!r:.60}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile belong together; give both or neither")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"otlp_endpoint: {self.otlp_endpoint!r:.60} is not a URL; write it as http://localhost:4318/v1/traces"
            )
        self._check_keys()
        for origin in self.allowed_origins:
            if origin != "*" and ("://" not in origin or origin.count("/") != 2):
                raise ValueError(
                    f"allowed_origins: {origin!r:.60} is not an origin; write it as https://chat.example.org"
                )

    def _check_keys(self) -> None:
        for key in self.api_keys:
            check_key("api_key", key)
        named(self.api_keys, self.key_settings)
        if not (self.api_keys or self.insecure or self.uds or is_loopback(self.host)):
            raise ValueError(
                f"host: {self.host} lets other machines in, and there is no API key; set SPECINFER_API_KEY or give "
                "--api-key-file, listen on 127.0.0.1, or give --insecure if the network is trusted"
            )

    @property
    def tenants(self) -> dict[str, KeySettings]:
        """The settings of each key by its name, in the order of `api_keys`."""
        return named(self.api_keys, self.key_settings)


def is_loopback(host: str) -> bool:
    """Return whether a server at this name or address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def check_writable(path: str) -> None:
    """Check that a trace file can be written, before a model is loaded for minutes; its content stays.

    Raises:
        ValueError: The file cannot be written.
    """
    open_private(path, "a").close()


def open_private(path: str, mode: Literal["a", "w"]) -> TextIO:
    try:
        # The file holds users' prompts: only the owner may read it.
        return open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError as error:
        raise ValueError(f"trace: {path} cannot be written: {error.strerror}") from error
