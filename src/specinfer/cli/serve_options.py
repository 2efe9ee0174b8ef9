"""Options of the server; flags, environment variables, config files and docs/configuration.md are made from them."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from specinfer.cli.options import flag
from specinfer.core.limits import QueueLimits
from specinfer.core.lora import parse_modules
from specinfer.server.config import ServerConfig
from specinfer.server.keys import read_key_file

_ADDRESS, _ACCESS, _LIMITS, _WATCH = "Address", "Access", "Limits", "Watching"
SECRETS = frozenset({"api_key"})  # never logged


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The address of the server, access to it, and its limits."""

    served_model_name: Annotated[
        list[str] | None,
        flag("Model", "Name of the model in requests. May be repeated. (default: the name given here)"),
    ] = None
    chat_template: Annotated[
        str | None, flag("Model", "Chat template to use instead of that of the model.", metavar="FILE")
    ] = None

    lora_modules: Annotated[
        list[str] | None,
        flag("Model", "LoRA adapter to serve as a model: NAME=PATH, or JSON with name and path. May be repeated."),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        flag(_ACCESS, "Let API keys with the role admin load and unload adapters.", "--allow-runtime-lora-updating"),
    ] = False

    host: Annotated[str, flag(_ADDRESS, "Address to listen on; any but loopback requires an API key.")] = "127.0.0.1"
    port: Annotated[int, flag(_ADDRESS, "Port; 0 chooses a free one.")] = 8000
    uds: Annotated[str | None, flag(_ADDRESS, "Unix socket to listen on instead of host and port.", metavar="FILE")] = (
        None
    )
    root_path: Annotated[str, flag(_ADDRESS, "Path prefix that a proxy strips, such as /llm.")] = ""
    ssl_certfile: Annotated[str | None, flag(_ADDRESS, "TLS certificate.", metavar="FILE")] = None
    ssl_keyfile: Annotated[str | None, flag(_ADDRESS, "Key of the TLS certificate.", metavar="FILE")] = None
    allowed_hosts: Annotated[
        list[str] | None,
        flag(_ADDRESS, "Host name to accept in requests. May be repeated.", metavar="NAME"),
    ] = None

    api_key: Annotated[
        list[str] | None,
        flag(
            _ACCESS,
            "API key to accept. May be repeated. Other users of the machine can see flags; prefer the environment "
            "variable or --api-key-file.",
            metavar="KEY",
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        flag(
            _ACCESS,
            "File of API keys, one per line, each with its roles (generate, metrics, admin), name and limits if it has "
            "some.",
            metavar="FILE",
        ),
    ] = None
    insecure: Annotated[bool, flag(_ACCESS, "Allow other machines without an API key.", "--insecure")] = False
    allowed_origins: Annotated[
        list[str] | None,
        flag(
            _ACCESS,
            "Allowed CORS origin, such as https://chat.example.org. May be repeated.",
            metavar="ORIGIN",
        ),
    ] = None
    metrics_public: Annotated[bool, flag(_ACCESS, "Serve /metrics without an API key.", "--metrics-public")] = False

    max_body_bytes: Annotated[int, flag(_LIMITS, "Maximum size of a request body, in bytes.")] = 4 * 2**20
    max_header_bytes: Annotated[int, flag(_LIMITS, "Maximum size of request headers, in bytes.")] = 16 * 2**10
    max_headers: Annotated[int, flag(_LIMITS, "Maximum number of request headers.")] = 100
    max_connections: Annotated[
        int, flag(_LIMITS, "Maximum number of concurrent HTTP requests; more are answered with 503.")
    ] = 1024
    max_connections_per_address: Annotated[
        int | None,
        flag(_LIMITS, "Maximum number of open connections from one address. (default: half of all that may be open)"),
    ] = None
    body_timeout: Annotated[
        float, flag(_LIMITS, "Time limit for receiving headers, and again for a body, in seconds.")
    ] = 30.0
    keep_alive_timeout: Annotated[float, flag(_LIMITS, "Time until an idle connection is closed, in seconds.")] = 10.0
    max_tree_nodes: Annotated[
        int | None,
        flag(_LIMITS, "Maximum number of tree nodes that a request may ask for. (default: 64, or 256 with --offload)"),
    ] = None
    max_num_queued_reqs: Annotated[
        int, flag(_LIMITS, "Maximum number of waiting outputs; more are answered with 429.")
    ] = 256
    max_num_queued_tokens: Annotated[int | None, flag(_LIMITS, "Maximum number of waiting prompt tokens.")] = None
    queue_timeout: Annotated[float | None, flag(_LIMITS, "Maximum time a request waits in the queue, in seconds.")] = (
        None
    )
    request_timeout: Annotated[float | None, flag(_LIMITS, "Maximum time of a request in total, in seconds.")] = None
    shutdown_timeout: Annotated[
        float, flag(_LIMITS, "Time for running requests to finish after SIGTERM, in seconds.")
    ] = 20.0
    single_process: Annotated[
        bool,
        flag(
            _LIMITS,
            "Serve in one process, which ends with its engine. By default another keeps the port open and starts the "
            "engine again.",
            "--single-process",
        ),
    ] = False
    ping_seconds: Annotated[
        float, flag(_LIMITS, "Interval of keep-alive comments in a silent stream, in seconds; 0 disables them.")
    ] = 15.0
    stream_interval: Annotated[int, flag(_LIMITS, "Number of tokens to buffer before each chunk of a stream.")] = 1

    no_page: Annotated[bool, flag(_WATCH, "Do not serve the page at /.", "--no-page")] = False
    no_docs: Annotated[bool, flag(_WATCH, "Do not serve /openapi.json.", "--no-docs")] = False
    metrics_prefix: Annotated[str, flag(_WATCH, "Prefix of the metrics: specinfer, or vllm for its dashboards.")] = (
        "specinfer"
    )
    no_metrics: Annotated[bool, flag(_WATCH, "Do not serve /metrics.", "--no-metrics")] = False
    log_level: Annotated[str, flag(_WATCH, "Log level: debug, info, warning, error or critical.")] = "info"
    log_stats_interval: Annotated[float, flag(_WATCH, "Interval of log lines about throughput, in seconds.")] = 10.0
    no_log_stats: Annotated[bool, flag(_WATCH, "Do not log throughput.", "--no-log-stats")] = False
    no_access_log: Annotated[bool, flag(_WATCH, "Do not log requests.", "--no-access-log")] = False
    trace: Annotated[
        str | None, flag(_WATCH, "Record the token trees of all requests here, for specinfer trace.", metavar="FILE")
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        flag(_WATCH, "Endpoint for OpenTelemetry spans, such as http://localhost:4318/v1/traces.", metavar="URL"),
    ] = None

    def config(self) -> ServerConfig:
        """Return the checked settings.

        Raises:
            ValueError: A setting cannot be used, or a file cannot be read.
        """
        path = self.api_key_file
        in_file = {} if path is None else read_key_file(path, _text_of("api_key_file", path))
        names = {field.name for field in fields(self)} & {field.name for field in fields(ServerConfig)}
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        settings |= {
            "api_keys": tuple(dict.fromkeys([*(self.api_key or ()), *in_file])),
            "key_settings": in_file,
            "allowed_origins": tuple(self.allowed_origins or ()),
            "allowed_hosts": tuple(name.lower() for name in self.allowed_hosts or ()),
            "chat_template": None if self.chat_template is None else _text_of("chat_template", self.chat_template),
            "lora_modules": parse_modules(self.lora_modules or ()),
            "page": not self.no_page,
            "docs": not self.no_docs,
            "metrics": not self.no_metrics,
            "log_stats_interval": 0.0 if self.no_log_stats else self.log_stats_interval,
            "access_log": not self.no_access_log,
        }
        return ServerConfig(**settings)

    def limits(self) -> QueueLimits:
        """Return the limits of the queue.

        Raises:
            ValueError: A limit is out of range.
        """
        return QueueLimits(
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
            queue_timeout=self.queue_timeout,
            request_timeout=self.request_timeout,
        )


def _text_of(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {path} is not UTF-8 text") from error


def shown(name: str, value: Any) -> str:
    """Return a setting as logs may show it."""
    return f"{name}=***" if name in SECRETS else f"{name}={value!r}"
