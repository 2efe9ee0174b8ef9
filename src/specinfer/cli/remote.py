"""chat and complete with a server's model: the same output, without a model, and so without torch, in this process."""

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specinfer.cli.errors import UsageError
from specinfer.cli.options import EngineOptions
from specinfer.cli.screen import Answer, Screen, stats_line
from specinfer.cli.stretches import Piece, Stretch
from specinfer.client import KEY_VARIABLE, EventDecoder, error_text, open_client, server_url
from specinfer.core.errors import RequestError
from specinfer.core.options import setting
from specinfer.core.sampling import SamplingParams

if TYPE_CHECKING:
    import httpx

    from specinfer.inputs.arguments import Message

_ALWAYS_SENT = ("temperature", "top_p")  # sent even at their defaults, because the server's defaults may differ
_SENT_OTHERWISE = ("structured_outputs", "prediction", "tree", "stop_token_ids", "stop", "max_tokens")
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace", "whitespace_pattern")
_OF_A_REQUEST = ("model", "tree", "seed")  # engine options of a request; the server's start sets the others


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """The server to use instead of a model in this process."""

    url: str | None = setting(
        None, "Server", "Use the server at this URL, such as http://127.0.0.1:8000, instead of a local model."
    )
    api_key: str | None = setting(None, "Server", "API key of the server.", metavar="KEY", variable=KEY_VARIABLE)

    def connect(self, engine: EngineOptions, argument: str | None, screen: Screen, params: SamplingParams) -> "Server":
        """Return the server after finding its model.

        Raises:
            UsageError: No server answers, or it does not have the model.
            ValueError: An option cannot be used.
        """
        assert self.url is not None
        given = engine.given
        defaults = {each.name: each.default for each in EngineOptions.flags()}
        for name, value in given.items():
            if name not in _OF_A_REQUEST and value != defaults[name]:
                raise ValueError(f"{name}: it was chosen when the server was started; leave it out with --url")
        if argument is not None and "model" in given:
            raise ValueError("model: named twice, as MODEL and with --model; leave one out")
        extra: dict[str, Any] = {}
        if "tree" in given:
            extra["speculative"] = {"tree": given["tree"]}
        if given.get("seed"):
            extra["seed"] = given["seed"]
        server = Server(server_url(self.url), self.api_key, screen, fields_of(params) | extra)
        try:
            server.find_model(argument or given.get("model"))
        except RequestError as error:
            raise UsageError(f"url: {error}") from error
        return server


class Server:
    """A partner behind a server: one of its models. Each request uses its own connection.

    Args:
        fields: Fields of every request.
    """

    def __init__(self, url: str, api_key: str | None, screen: Screen, fields: Mapping[str, Any]) -> None:
        self._url, self._api_key, self._screen, self._fields = url, api_key, screen, fields
        self.model = ""

    def find_model(self, name: str | None) -> None:
        """Choose the model of this name, or the server's first model.

        Raises:
            RequestError: The server cannot be reached, or does not have the model.
        """
        with self._opened() as client:
            response = client.get("/v1/models")
            if response.status_code != 200:
                remedy = "; give a key with --api-key or SPECINFER_API_KEY" if response.status_code == 401 else ""
                raise RequestError(error_text(response.status_code, response.content) + remedy)
            try:
                names = [str(entry["id"]) for entry in response.json()["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise RequestError("what answers /v1/models there has not OpenAI's interface") from error
        if not names or (name is not None and name not in names):
            raise RequestError(f"model: the server has {', '.join(names) or 'none'}, not {name or 'one'}")
        self.model = name or names[0]

    def check(self, messages: "Sequence[Message]") -> None:
        pass  # the first answer has the error

    def answer(self, messages: "Sequence[Message]", *, stoppable: bool) -> Answer:
        body = {"messages": [dict(message) for message in messages]}
        return self._show("/v1/chat/completions", body, stoppable=stoppable)

    def complete(self, prompt: str, *, stoppable: bool) -> Answer:
        return self._show("/v1/completions", {"prompt": prompt}, stoppable=stoppable)

    def _show(self, path: str, body: dict[str, Any], *, stoppable: bool) -> Answer:
        body |= {"model": self.model, "stream": True, **self._fields}
        if self._screen.stats:
            body["stream_options"] = {"include_usage": True}
        if self._screen.paints:
            body["trace"] = True
        reader = _Reader()
        start = time.monotonic()
        text, is_whole = self._screen.play(self._pieces(path, body, reader), stoppable=stoppable)
        if not is_whole:
            return Answer(text, None)
        self._screen.note_if_empty(text, reader.finish_reason, reader.stop_reason)
        numbers = None
        if reader.num_tokens is not None:
            numbers = stats_line(reader.num_tokens, time.monotonic() - start, reader.stats)
            self._screen.lines_of_numbers([numbers])
        return Answer(text, numbers)

    def _pieces(self, path: str, body: Mapping[str, Any], reader: "_Reader") -> Iterator[Piece]:
        """Yield the pieces of an answer; closing the generator closes the connection, which ends the request."""
        decoder = EventDecoder()
        with self._opened() as client, client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise RequestError(error_text(response.status_code, response.read()))
            for data in response.iter_bytes():
                for event in decoder.push(data):
                    yield from reader.read(event)
        if not decoder.is_done:
            raise RequestError("the server ended the answer before it was whole")

    @contextmanager
    def _opened(self) -> "Iterator[httpx.Client]":
        """Yield a connection; its errors become a RequestError of this request."""
        import httpx

        with open_client(self._url, self._api_key) as client:
            try:
                yield client
            except httpx.ConnectError as error:
                raise RequestError(
                    f"no server answers at {self._url} ({error}); start one with specinfer serve"
                ) from error
            except httpx.TimeoutException as error:
                raise RequestError(f"{self._url} has sent nothing for too long; it may be busy or stopped") from error
            except httpx.HTTPError as error:
                raise RequestError(f"the connection broke: {str(error) or type(error).__name__}") from error
            except RequestError:
                raise
            except ValueError as error:
                raise RequestError(str(error)) from error


class _Reader:
    """A reader of the events of one answer."""

    def __init__(self) -> None:
        self.num_tokens: int | None = None
        self.stats: Any = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._texts: deque[str] = deque()  # texts of generated tokens that no event has shown yet

    def read(self, event: Mapping[str, Any]) -> Iterator[Piece]:
        """Yield the pieces of text in an event.

        Raises:
            RequestError: The event reports an error.
        """
        if event.get("error"):
            raise RequestError(_message(event["error"]))
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            self.num_tokens = int(usage.get("completion_tokens") or 0)
        metrics = event.get("metrics")
        if isinstance(metrics, Mapping):
            self.stats = metrics.get("speculative_decoding")
        traced = event.get("specinfer") or {}
        self._texts.extend(text for step in traced.get("steps") or () for text in texts_of(step))
        origins = list(traced.get("origins") or ())
        texts = [self._texts.popleft() for _ in origins[: len(self._texts)]]
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop_reason = choice.get("stop_reason") or self.stop_reason
            text = choice.get("text") if "text" in choice else (choice.get("delta") or {}).get("content")
            if text:
                yield text, stretches_of(text, texts, origins)


def stretches_of(text: str, texts: Sequence[str], origins: Sequence[str | None]) -> list[Stretch]:
    """Split an event's text by the origin of its tokens.

    Tokens that are parts of a character have no text of their own. The text between the other tokens is theirs. It gets
    the origin of the last of them.
    """
    head: list[Stretch] = []
    tail: list[Stretch] = []
    tokens = deque(zip(texts, origins, strict=False))
    while tokens and text.startswith(tokens[0][0]) and _is_whole(tokens[0][0]):
        head.append(tokens.popleft())
        text = text[len(head[-1][0]) :]
    while tokens and text.endswith(tokens[-1][0]) and _is_whole(tokens[-1][0]):
        tail.append(tokens.pop())
        text = text[: len(text) - len(tail[-1][0])]
    between = [(text, tokens[-1][1] if tokens else None)] if text else []
    return [*head, *between, *reversed(tail)]


def _is_whole(text: str) -> bool:
    return bool(text) and "\N{REPLACEMENT CHARACTER}" not in text


def texts_of(step: Mapping[str, Any]) -> list[str]:
    """Return the text of each token that a traced step added: the accepted path's, then the target's own."""
    nodes = step.get("nodes") or ()
    texts = [str(node.get("text", "")) for node in nodes if node.get("accepted")]
    last = step.get("next")
    return texts + ([str(last.get("text", ""))] if isinstance(last, Mapping) else [])


def fields_of(params: SamplingParams) -> dict[str, Any]:
    """Return the body fields of a request with these parameters; those at their defaults are left to the server."""
    defaults = SamplingParams()
    names = [field.name for field in dataclasses.fields(params) if field.name not in _SENT_OTHERWISE]
    fields = {
        name: getattr(params, name)
        for name in names
        if name in _ALWAYS_SENT or getattr(params, name) != getattr(defaults, name)
    }
    if params.max_tokens is not None:
        fields["max_tokens"] = params.max_tokens
    if params.stop_strings:
        fields["stop"] = list(params.stop_strings)
    if params.stop_tokens:
        fields["stop_token_ids"] = list(params.stop_tokens)
    if params.prediction is not None:
        fields["prediction"] = {"type": "content", "content": params.prediction}
    if params.structured_outputs is not None:
        asked = {name: getattr(params.structured_outputs, name) for name in _CONSTRAINTS}
        fields["structured_outputs"] = {name: value for name, value in asked.items() if value not in (None, False)}
    return fields


def _message(error: object) -> str:
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return f"the server ended the response: {message}"
