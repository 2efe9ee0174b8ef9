"""Limits of the queue of an `AsyncLLM`, and of single tenants."""

from dataclasses import dataclass, fields

from specinfer.core.errors import check_float, check_int


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue, so that a burst is refused early instead of served late.

    Attributes:
        max_num_queued_reqs: Outputs (each of `n` counts) that may wait in addition to the running ones.
        max_num_queued_tokens: Prompt tokens that may wait, or None for no limit.
        request_timeout: Seconds from arrival to the end, or None for no limit.
        queue_timeout: Seconds from arrival to the first computation, or None for no limit.
        max_step_seconds: Seconds after which a step counts as hung.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    max_num_queued_reqs: int = 256
    max_num_queued_tokens: int | None = None
    request_timeout: float | None = None
    queue_timeout: float | None = None
    max_step_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_int("max_num_queued_reqs", self.max_num_queued_reqs, 0)
        if self.max_num_queued_tokens is not None:
            check_int("max_num_queued_tokens", self.max_num_queued_tokens, 1)
        for name in ("request_timeout", "queue_timeout", "max_step_seconds"):
            if getattr(self, name) is not None:
                check_float(name, getattr(self, name), 0.0, 1e9, low_open=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant; None for none but the fair shares that all tenants have.

    Attributes:
        max_num_seqs: Outputs that run at once.
        max_num_queued_reqs: Outputs that may wait in addition to the running ones.
        max_tokens_per_minute: Tokens of prompts and outputs. A request begins if there are tokens left, and what it
            takes beyond them must come back before the next one begins.
        max_connections: Requests that are served at once.
        max_incoming_bytes: Bytes of bodies that are being read at once.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    max_num_seqs: int | None = None
    max_num_queued_reqs: int | None = None
    max_tokens_per_minute: int | None = None
    max_connections: int | None = None
    max_incoming_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_int(field.name, value, 0 if field.name == "max_num_queued_reqs" else 1)
