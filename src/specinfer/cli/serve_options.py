"""Options of the server; flags, environment variables, config files and docs/configuration.md are made from them."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specinfer.cli.options import flag

if TYPE_CHECKING:  # these imports need packages of the server
    from specinfer.async_llm import QueueLimits
    from specinfer.server.config import ServerConfig

_ADDRESS, _ACCESS, _LIMITS, _WATCH = "Address", "Access", "Limits", "Watching"
SECRETS = frozenset({"api_key"})  # never logged


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The address of the server, access to it, and its limits."""

    served_model_name: Annotated[
        list[str] | None, flag("Model", "What clients call the model; may be repeated. Else as it is named here.")
    ] = None
    chat_template: Annotated[
        str | None, flag("Model", "A chat template in place of the model's own.", metavar="FILE")
    ] = None

    adapt_drafters: Annotated[
        bool,
        flag(
            "Speculation",
            "Drafters that are models learn from the traffic in idle moments. Answers stay as they are, but how fast "
            "one comes then depends on what others asked.",
            "--adapt-drafters",
        ),
    ] = False
    adapt_dir: Annotated[
        str | None,
        flag("Speculation", "Keep what they learn here, for the next start.", metavar="FOLDER"),
    ] = None

    host: Annotated[str, flag(_ADDRESS, "The address to listen on; others than loopback's need an API key.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, flag(_ADDRESS, "The port; 0 takes a free one.")] = 8000
    uds: Annotated[str | None, flag(_ADDRESS, "A Unix socket instead of host and port.", metavar="FILE")] = None
    root_path: Annotated[str, flag(_ADDRESS, "What a proxy in front strips from paths, such as /llm.")] = ""
    ssl_certfile: Annotated[str | None, flag(_ADDRESS, "A certificate, for https.", metavar="FILE")] = None
    ssl_keyfile: Annotated[str | None, flag(_ADDRESS, "Its key.", metavar="FILE")] = None
    allowed_hosts: Annotated[
        list[str] | None,
        flag(_ADDRESS, "A name of this server that requests may carry in Host; may be repeated.", metavar="NAME"),
    ] = None

    api_key: Annotated[
        list[str] | None,
        flag(
            _ACCESS,
            "A key that opens the server; may be repeated. Other users of the machine see flags: prefer the variable "
            "or the file.",
            metavar="KEY",
        ),
    ] = None
    api_key_file: Annotated[str | None, flag(_ACCESS, "A file of keys, one a line.", metavar="FILE")] = None
    insecure: Annotated[bool, flag(_ACCESS, "Serve other machines without an API key.", "--insecure")] = False
    allowed_origins: Annotated[
        list[str] | None,
        flag(
            _ACCESS,
            "A site whose pages may call the server, such as https://chat.example.org; may be repeated.",
            metavar="ORIGIN",
        ),
    ] = None
    metrics_public: Annotated[bool, flag(_ACCESS, "Serve /metrics without a key.", "--metrics-public")] = False

    max_body_bytes: Annotated[int, flag(_LIMITS, "Bytes of a request's body.")] = 4 * 2**20
    max_header_bytes: Annotated[int, flag(_LIMITS, "Bytes of its head.")] = 16 * 2**10
    max_headers: Annotated[int, flag(_LIMITS, "Headers in it.")] = 100
    max_connections: Annotated[int, flag(_LIMITS, "Requests served at once; the next are answered 503.")] = 1024
    body_timeout: Annotated[float, flag(_LIMITS, "Seconds for a head, and as many for a body, to arrive.")] = 30.0
    keep_alive_timeout: Annotated[float, flag(_LIMITS, "Seconds until an idle connection is closed.")] = 10.0
    max_tree_nodes: Annotated[
        int | None,
        flag(_LIMITS, "Guesses a step that a request may ask for; else 64, or 256 where the target is streamed."),
    ] = None
    max_num_queued_reqs: Annotated[
        int, flag(_LIMITS, "Outputs that may wait beside those that run; the next are answered 429.")
    ] = 256
    max_num_queued_tokens: Annotated[int | None, flag(_LIMITS, "Prompt tokens that may wait.")] = None
    queue_timeout: Annotated[float | None, flag(_LIMITS, "Seconds that a request may wait to be begun.")] = None
    request_timeout: Annotated[float | None, flag(_LIMITS, "Seconds that it may take altogether.")] = None
    shutdown_timeout: Annotated[float, flag(_LIMITS, "Seconds that running requests get to end on SIGTERM.")] = 20.0
    ping_seconds: Annotated[float, flag(_LIMITS, "Silence in a stream before a comment is sent; 0: none.")] = 15.0
    stream_interval: Annotated[int, flag(_LIMITS, "Tokens that a stream gathers before it sends them.")] = 1

    no_page: Annotated[bool, flag(_WATCH, "Do not serve the page at /.", "--no-page")] = False
    no_docs: Annotated[bool, flag(_WATCH, "Do not serve /openapi.json.", "--no-docs")] = False
    no_metrics: Annotated[bool, flag(_WATCH, "Do not serve /metrics.", "--no-metrics")] = False
    log_level: Annotated[str, flag(_WATCH, "debug, info, warning, error or critical.")] = "info"
    log_stats_interval: Annotated[float, flag(_WATCH, "Seconds between lines about speed.")] = 10.0
    no_log_stats: Annotated[bool, flag(_WATCH, "Log no such lines.", "--no-log-stats")] = False
    no_access_log: Annotated[bool, flag(_WATCH, "Do not log requests.", "--no-access-log")] = False
    trace: Annotated[
        str | None, flag(_WATCH, "Write the token trees of all requests here, for specinfer trace.", metavar="FILE")
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        flag(_WATCH, "Send OpenTelemetry spans here, such as http://localhost:4318/v1/traces.", metavar="URL"),
    ] = None

    def config(self) -> "ServerConfig":
        """Return the checked settings.

        Raises:
            ValueError: A setting cannot be used, or a file cannot be read.
        """
        from specinfer.server.config import ServerConfig

        keys = [*(self.api_key or ()), *_keys_in(self.api_key_file)]
        names = {field.name for field in fields(self)} & {field.name for field in fields(ServerConfig)}
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        settings |= {
            "api_keys": tuple(dict.fromkeys(keys)),
            "allowed_origins": tuple(self.allowed_origins or ()),
            "allowed_hosts": tuple(name.lower() for name in self.allowed_hosts or ()),
            "chat_template": None if self.chat_template is None else _text_of("chat_template", self.chat_template),
            "page": not self.no_page,
            "docs": not self.no_docs,
            "metrics": not self.no_metrics,
            "log_stats_interval": 0.0 if self.no_log_stats else self.log_stats_interval,
            "access_log": not self.no_access_log,
        }
        return ServerConfig(**settings)

    def adaptation(self) -> dict[str, Any]:
        """Return the keyword arguments of `LLM` for online adaptation."""
        return {"adapt_drafters": self.adapt_drafters, "adapt_dir": self.adapt_dir}

    def limits(self) -> "QueueLimits":
        """Return the limits of the queue.

        Raises:
            ValueError: A limit is out of range.
        """
        from specinfer.async_llm import QueueLimits

        return QueueLimits(
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
            queue_timeout=self.queue_timeout,
            request_timeout=self.request_timeout,
        )


def _keys_in(path: str | None) -> list[str]:
    if path is None:
        return []
    lines = [line.strip() for line in _text_of("api_key_file", path).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"api_key_file: {path} holds no key; write one a line")
    return keys


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
