"""The thought that precedes an answer: its markers, and where an output begins."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The thought in one output of a conversation.

    Attributes:
        start: Text before a thought.
        end: Text after a thought, with which the answer begins.
        end_ids: Tokens that end a thought whose budget is spent.
        is_open: Whether the prompt ends within a thought.
        has_channels: Whether each message of the output names its channel, as those of gpt-oss do.
        other_ends: Other texts that end the thought, as before a call.
    """

    start: str
    end: str
    end_ids: tuple[int, ...]
    is_open: bool
    has_channels: bool = False
    other_ends: tuple[str, ...] = ()
