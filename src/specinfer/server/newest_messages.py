"""Conversations that are longer than the context, of which the newest messages are read, as Ollama does."""

import bisect

from specinfer.core.errors import ContextLengthError, RequestError
from specinfer.llm import LLM
from specinfer.server.chat import ReadConversation, read_conversation
from specinfer.server.protocol import ChatFields

_ROOM = 8  # a conversation that was shortened leaves an eighth of the context for the answer


def read_newest(llm: LLM, fields: ChatFields) -> ReadConversation:
    """Read a conversation, without its oldest messages if it is too long; system messages and the last one stay."""
    try:
        read = read_conversation(llm, fields)
        if len(read.ids) < llm.max_model_len:
            return read
    except ContextLengthError:
        pass
    room = min(fields.token_limit or llm.max_model_len // _ROOM, llm.max_model_len // 2)
    # A result is not read without its call.
    starts = [i for i, message in enumerate(fields.messages) if i and message.get("role") not in ("system", "tool")]
    starts = starts or [len(fields.messages) - 1]

    def read_from(start: int) -> ReadConversation:
        system = [message for message in fields.messages[:start] if message.get("role") == "system"]
        return read_conversation(llm, fields.model_copy(update={"messages": system + fields.messages[start:]}))

    def fits(start: int) -> bool:
        try:
            return len(read_from(start).ids) <= llm.max_model_len - room
        except RequestError:  # it is still too long, or a conversation may not begin so in this template
            return False

    return read_from(starts[min(bisect.bisect_left(starts, True, key=fits), len(starts) - 1)])
