"""Conversations as callers give them: one or several, read to prompts with the model's template or another one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from specinfer.core.errors import ContextLengthError, RequestError, reworded
from specinfer.inputs.arguments import Message, Prompt
from specinfer.inputs.prompts import PromptReader


def read_conversations(
    reader: PromptReader,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    chat_template: str | None = None,
    **options: Any,
) -> list[Prompt]:
    """Return a prompt for the conversation, or for each of several.

    Args:
        chat_template: Template in place of the reader's own.
        options: Those of `PromptReader.read_chat`.

    Raises:
        RequestError: The model has no chat template, or a message does not fit it; the message names the index of the
            conversation in a list.
    """
    if not isinstance(messages, Sequence):
        raise RequestError(f"messages: give a list of objects with role and content, not {type(messages).__name__}")
    if not messages:
        raise RequestError("messages: empty; give at least one message with role and content")
    conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
    prompts: list[Prompt] = []
    with _template(reader, chat_template):
        for i, conversation in enumerate(conversations):
            try:
                ids = reader.read_chat(conversation, **options)
                prompts.append({"prompt_token_ids": ids, "reasoning": reader.reasoning_of(ids)})
            except RequestError as error:
                if len(conversations) == 1:
                    raise
                if isinstance(error, ContextLengthError):
                    raise reworded(error, f"messages[{i}]: {error}") from error
                if not str(error).startswith("messages"):
                    raise
                raise reworded(error, f"messages[{i}]{str(error).removeprefix('messages')}") from error
    return prompts


@contextmanager
def _template(reader: PromptReader, text: str | None) -> Iterator[None]:
    """Replace the template of a reader for a while, unless there is none to replace it."""
    if text is None:
        yield
        return
    reader.chat_template = text
    try:
        yield
    finally:
        reader.chat_template = None
