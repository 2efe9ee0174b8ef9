"""The commands that answer what is typed: complete, chat and run."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from specinfer.cli.chat import Chat, LocalPartner, Partner
from specinfer.cli.errors import checking
from specinfer.cli.options import ARGUMENT, MODEL_HELP, EngineOptions, OutputOptions, flag, load
from specinfer.cli.remote import RemoteOptions
from specinfer.cli.sampling_options import SamplingOptions
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import hidden_typing, is_interactive, read_input, typed_lines
from specinfer.core.errors import RequestError

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
