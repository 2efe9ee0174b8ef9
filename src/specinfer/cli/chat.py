"""The commands that answer what is typed: complete, chat and run; and the conversation with a model."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from specinfer.cli.errors import checking
from specinfer.cli.options import ARGUMENT, MODEL_HELP, EngineOptions, OutputOptions, flag, load
from specinfer.cli.remote import RemoteOptions
from specinfer.cli.sampling_options import SamplingOptions
from specinfer.cli.screen import Answer, Screen
from specinfer.cli.terminal import hidden_typing, is_interactive, read_input, typed_lines
from specinfer.core.errors import RequestError

if TYPE_CHECKING:  # importing these imports torch, which takes seconds
    from specinfer.core.sampling import SamplingParams
    from specinfer.inputs.arguments import Message
    from specinfer.llm import LLM


class Partner(Protocol):
    """The model that answers: in this process, or behind a server.

    All methods raise a `RequestError` for what the model cannot do.
    """

    def check(self, messages: "Sequence[Message]") -> None:
        """Check before anything is typed that the model has a chat template which accepts these messages."""
        ...

    def answer(self, messages: "Sequence[Message]", *, stoppable: bool) -> Answer:
        """Generate and show the next message of a conversation."""
        ...

    def complete(self, prompt: str, *, stoppable: bool) -> Answer:
        """Generate and show a completion."""
        ...


@dataclass(frozen=True, slots=True)
class LocalPartner:
    """A model in this process."""

    llm: "LLM"
    model: str
    screen: Screen
    sampling: SamplingOptions
    params: "SamplingParams"

    def check(self, messages: "Sequence[Message]") -> None:
        self.llm.chat_prompt(messages)

    def answer(self, messages: "Sequence[Message]", *, stoppable: bool) -> Answer:
        return self.screen.stream(self.llm, self.llm.chat_prompt(messages), self.params, stoppable=stoppable)

    def complete(self, prompt: str, *, stoppable: bool) -> Answer:
        return self.screen.stream(
            self.llm, prompt, self.sampling.fit(self.params, self.llm, prompt), stoppable=stoppable
        )


class Chat:
    """One conversation: its messages so far, and the commands that begin with a slash."""

    HELP = "/clear forgets the conversation, /stats shows the last answer's numbers, /exit or Ctrl-D leaves"

    def __init__(self, partner: Partner, screen: Screen, system_prompt: str | None) -> None:
        self._partner, self._screen = partner, screen
        self._first: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = list(self._first)
        self._numbers: str | None = None  # the last answer's statistics

    def check(self) -> None:
        """Check before anything is typed that the model has a chat template.

        Raises:
            RequestError: There is no chat template, or it does not accept the system prompt.
        """
        self._partner.check([*self._first, {"role": "user", "content": "Hello"}])

    def send(self, text: str, *, stoppable: bool) -> None:
        """Answer one message; the shown part of a stopped answer stays in the conversation.

        Raises:
            RequestError: The conversation cannot be answered; it stays as it was.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            answer = self._partner.answer(messages, stoppable=stoppable)
        except RequestError as error:
            raise RequestError(f"{error} (/clear forgets the conversation)") from error
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._numbers = answer.numbers or self._numbers  # a stopped answer has no statistics

    def messages(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines to answer, and run the commands among them, until /exit."""
        for line in lines:
            match line.split()[0]:
                case "/exit" | "/quit" | "/bye":
                    return
                case "/clear":
                    self._messages, self._numbers = list(self._first), None
                case "/stats":
                    self._screen.note(self._numbers or "no answer yet")
                case word if word.startswith("/"):
                    self._screen.note(self.HELP)
                case _:
                    yield line


DEFAULT_MAX_TOKENS = 128
MODEL_OR_PROMPT = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"{MODEL_HELP} If it contains a space, it is the first PROMPT. (default: demo-chat)",
        show_default=False,
    ),
]
_SYSTEM_PROMPT = Annotated[str | None, flag("Output", "System prompt of the conversation.", metavar="TEXT")]
_QUICK = Annotated[str | None, flag("Output", "Answer this message and exit.", "--quick", "-q", metavar="MESSAGE")]


def complete(
    argument: ARGUMENT = None,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    server: RemoteOptions,
    quick: _QUICK = None,
    output: OutputOptions,
) -> None:
    """Complete each line that is typed, until Ctrl-D."""
    partner, screen = _connect(argument, engine, sampling, server, output, DEFAULT_MAX_TOKENS)
    if quick is not None:
        partner.complete(quick, stoppable=False)
        return
    _converse(typed_lines(), screen, lambda line: partner.complete(line, stoppable=is_interactive()))


def chat(
    argument: ARGUMENT = None,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    server: RemoteOptions,
    system_prompt: _SYSTEM_PROMPT = None,
    quick: _QUICK = None,
    output: OutputOptions,
) -> None:
    """Chat with a model that has a chat template. /exit or Ctrl-D quits, Ctrl-C stops an answer."""
    partner, screen = _connect(argument, engine, sampling, server, output, None)
    talk = Chat(partner, screen, system_prompt)
    talk.check()
    if quick is not None:
        talk.send(quick, stoppable=False)
        return
    if is_interactive():
        screen.note(Chat.HELP)
    _converse(talk.messages(typed_lines()), screen, lambda line: talk.send(line, stoppable=is_interactive()))


def run(
    argument: MODEL_OR_PROMPT = None,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Message to answer once.", show_default=False)
    ] = None,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    system_prompt: _SYSTEM_PROMPT = None,
    output: OutputOptions,
) -> None:
    """Chat with a model, or answer one message from the arguments or standard input.

    A model of the Hugging Face Hub is downloaded first, if it is not in the cache. A model without a chat template
    completes text.
    """
    name, words = named_model(argument, prompts, engine)
    with checking():
        message = _message(words)
    partner, screen = _load(name, engine, sampling, output, None)
    talk = Chat(partner, screen, system_prompt)
    answers = partner.llm.reader.chat_template is not None
    if not answers:
        limit = DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
        partner = replace(partner, params=replace(partner.params, max_tokens=limit))
    answer: Callable[..., object] = talk.send if answers else partner.complete
    if message is not None:
        answer(message, stoppable=False)
        return
    screen.note(Chat.HELP if answers else f"{partner.model} has no chat template: it completes what you type")
    lines = talk.messages(typed_lines()) if answers else typed_lines()
    _converse(lines, screen, lambda line: answer(line, stoppable=True))


def _connect(
    argument: str | None,
    engine: EngineOptions,
    sampling: SamplingOptions,
    server: RemoteOptions,
    output: OutputOptions,
    max_tokens: int | None,
) -> tuple[Partner, Screen]:
    """Return the model behind a server, or in this process, and the screen that it is shown on."""
    if server.url is None:
        return _load(argument, engine, sampling, output, max_tokens)
    with checking():
        screen = Screen(stats=output.stats)
        return server.connect(engine, argument, screen, sampling.params(max_tokens)), screen


def _load(
    argument: str | None,
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    max_tokens: int | None,
) -> tuple[LocalPartner, Screen]:
    with checking():
        args = engine.args(argument)
        params = sampling.params(max_tokens, str(args.model))
        screen = output.screen()
        return LocalPartner(load(args, screen), str(args.model), screen, sampling, params), screen


def _message(words: Sequence[str]) -> str | None:
    """Return the message of the arguments after that of standard input, or None if both are typed later.

    Raises:
        ValueError: Standard input is no terminal, and there is no message.
    """
    piped = "" if sys.stdin is None or is_interactive() or sys.stdin.isatty() else read_input()
    parts = [part for part in (piped.strip(), " ".join(words)) if part]
    if not parts and not is_interactive():
        raise ValueError("prompt: none given; name one after the model, or pipe it in")
    return "\n\n".join(parts) or None


def named_model(
    argument: str | None, prompts: Sequence[str] | None, engine: EngineOptions
) -> tuple[str | None, list[str]]:
    """Return the model that the first argument names, or None, and the prompts among the arguments."""
    words = [word for word in (argument, *(prompts or ())) if word is not None]
    names_model = bool(words) and "model" not in engine.given and not _is_prompt(words[0])
    return (words.pop(0) if names_model else None), words


def _is_prompt(word: str) -> bool:
    """Return whether a first argument cannot be a model's name."""
    return any(map(str.isspace, word)) and not os.path.exists(word)


def _converse(lines: Iterable[str], screen: Screen, answer: Callable[[str], object]) -> None:
    """Answer each line; the rest goes on after a refused one."""
    refused = False
    for line in lines:
        try:
            with hidden_typing():
                answer(line)
        except RequestError as error:
            screen.note(str(error))
            refused = True
    if refused and not is_interactive():
        raise typer.Exit(1)
