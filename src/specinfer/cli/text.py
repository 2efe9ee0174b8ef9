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
from specinfer.cli.remote import RemoteOptions, RemotePartner
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
    with checking():
        if server.url is not None:
            screen, params = Screen(stats=output.stats), sampling.params(DEFAULT_MAX_TOKENS)
            remote = server.connect(engine, argument, screen)
        else:
            args = engine.args(argument)
            params = sampling.params(DEFAULT_MAX_TOKENS, str(args.model))
            screen = output.screen()
            llm = load(args, screen)

    def answer(line: str, *, stoppable: bool) -> None:
        if server.url is not None:
            remote.complete(line, params, stoppable=stoppable)
        else:
            screen.stream(llm, line, sampling.fit(params, llm, line), stoppable=stoppable)

    if quick is not None:
        answer(quick, stoppable=False)
        return
    _converse(typed_lines(), screen, lambda line: answer(line, stoppable=is_interactive()))


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
    partner: Partner
    with checking():
        if server.url is not None:
            screen, params = Screen(stats=output.stats), sampling.params(None)
            partner = RemotePartner(server.connect(engine, argument, screen), params)
        else:
            args = engine.args(argument)
            params = sampling.params(None, str(args.model))
            screen = output.screen()
            partner = LocalPartner(load(args, screen), screen, params)
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
        args = engine.args(name)
        params = sampling.params(None, str(args.model))
        screen = output.screen()
        llm = load(args, screen)
    talk = Chat(LocalPartner(llm, screen, params), screen, system_prompt)
    limit = DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens

    def complete(line: str, *, stoppable: bool) -> None:
        screen.stream(llm, line, sampling.fit(replace(params, max_tokens=limit), llm, line), stoppable=stoppable)

    answers = llm.reader.chat_template is not None
    answer: Callable[..., object] = talk.send if answers else complete
    if message is not None:
        answer(message, stoppable=False)
        return
    screen.note(Chat.HELP if answers else f"{args.model} has no chat template: it completes what you type")
    lines = talk.messages(typed_lines()) if answers else typed_lines()
    _converse(lines, screen, lambda line: answer(line, stoppable=True))


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
