"""Counts of what each tenant uses, and its limits: one place for the server's edge and for `AsyncLLM`."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from specinfer.core.errors import QuotaError
from specinfer.core.limits import TenantLimits
from specinfer.core.text import counted

_MINUTE = 60.0


@dataclass(slots=True)
class Usage:
    """Counts of one tenant: what it uses now, and totals since the start.

    Attributes:
        num_connections: Requests that are being served.
        num_incoming_bytes: Bytes of bodies that are being read.
        num_outgoing_bytes: Bytes of large responses that the clients have not read.
        num_refused: Refused requests, by the limit that they exceeded.
        tokens_left: Tokens that the tenant has left at `refilled_at`; below 0 after a request that took more.
    """

    num_connections: int = 0
    num_incoming_bytes: int = 0
    num_outgoing_bytes: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)
    tokens_left: float = 0.0
    refilled_at: float = 0.0


class Quotas:
    """Counts of what known tenants use, and their limits. All methods belong to one event loop.

    Args:
        limits: The limits of each known tenant. Others have none and are not counted one by one.
    """

    def __init__(self, limits: Mapping[str, TenantLimits] | None = None) -> None:
        self.limits = dict(limits or {})
        self.usage = {
            tenant: Usage(tokens_left=each.max_tokens_per_minute or 0, refilled_at=time.monotonic())
            for tenant, each in self.limits.items()
        }
        self.num_connections = self.num_incoming_bytes = self.num_outgoing_bytes = 0  # of all

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.limits.get(tenant, _NO_LIMITS)

    # ------------------------------------------------------------------ connections and their bytes

    def check_connection(self, tenant: str, most: int) -> bool:
        """Return whether one more request may be served if all together may be `most`; each tenant may have one.

        Raises:
            QuotaError: The tenant has as many as it may have.
        """
        if tenant not in self.usage:
            return self.num_connections < most
        num_served, limit = self.usage[tenant].num_connections, self.limits[tenant].max_connections
        if limit is not None and num_served >= limit:
            self._refuse(tenant, "max_connections", f"{counted(num_served, 'request')} being served, {limit} may be")
        return self.num_connections < most or not num_served

    @contextmanager
    def connection(self, tenant: str) -> Iterator[None]:
        """Count a request while it is served."""
        usage = self.usage.get(tenant, Usage())
        self.num_connections += 1
        usage.num_connections += 1
        try:
            yield
        finally:
            self.num_connections -= 1
            usage.num_connections -= 1

    def add_bytes(self, tenant: str, count: int, most: int) -> bool:
        """Count bytes of a body that has not been read as a whole; a negative count removes them when it has been.

        Returns:
            Whether all bodies together are within `most` bytes, or this tenant's are within its even part of them.

        Raises:
            QuotaError: The tenant's bodies exceed its limit.
        """
        self.num_incoming_bytes += count
        usage = self.usage.get(tenant)
        if usage is not None:
            usage.num_incoming_bytes += count
            limit = self.limits[tenant].max_incoming_bytes
            if count > 0 and limit is not None and usage.num_incoming_bytes > limit:
                self._refuse(tenant, "max_incoming_bytes", f"more than {limit} bytes of bodies are being sent")
        return self.num_incoming_bytes <= most or (usage is not None and self._is_even(usage.num_incoming_bytes, most))

    def check_outgoing(self, tenant: str, count: int, most: int) -> bool:
        """Return whether a response of `count` bytes may be made besides those that clients have not read.

        All together may have `most` bytes, and each tenant its even part of them. A tenant without an unread response
        may always have one.

        Raises:
            QuotaError: The tenant's responses exceed its limit.
        """
        usage = self.usage.get(tenant)
        of_tenant = self.num_outgoing_bytes if usage is None else usage.num_outgoing_bytes
        if not of_tenant:
            return True
        limit = self.limits_of(tenant).max_outgoing_bytes
        if limit is not None and of_tenant + count > limit:
            self._refuse(tenant, "max_outgoing_bytes", f"more than {limit} bytes of responses are not read")
        return self.num_outgoing_bytes + count <= most or (usage is not None and self._is_even(of_tenant + count, most))

    @contextmanager
    def response(self, tenant: str) -> Iterator["OutgoingResponse"]:
        """Count the bytes of a response until the client has read it."""
        response = OutgoingResponse(self, tenant)
        try:
            yield response
        finally:
            response.num_bytes = 0

    def _is_even(self, of_tenant: int, most: int) -> bool:
        """Return whether the bytes of a known tenant are within its even part of `most`."""
        return of_tenant * len(self.usage) <= most

    # --------------------------------------------------------------------------------------- tokens

    def tokens_left(self, tenant: str) -> float | None:
        """Return the tokens that a tenant may use now, or None if it has no limit. They come back evenly over time."""
        limit = self.limits_of(tenant).max_tokens_per_minute
        if limit is None:
            return None
        usage, now = self.usage[tenant], time.monotonic()
        usage.tokens_left = min(limit, usage.tokens_left + (now - usage.refilled_at) * limit / _MINUTE)
        usage.refilled_at = now
        return usage.tokens_left

    def check_tokens(self, tenant: str) -> None:
        """Check that a tenant has tokens left.

        Raises:
            QuotaError: It has none.
        """
        left, limit = self.tokens_left(tenant), self.limits_of(tenant).max_tokens_per_minute
        if left is not None and limit is not None and left < 1:
            seconds = (1 - left) * _MINUTE / limit
            self._refuse(tenant, "max_tokens_per_minute", f"{counted(limit, 'token')} a minute are used up", seconds)

    def charge(self, tenant: str, *, num_prompt_tokens: int = 0, num_generated_tokens: int = 0) -> None:
        """Count the tokens of a prompt that was queued, or of an output."""
        usage = self.usage.get(tenant)
        if usage is not None:
            usage.num_prompt_tokens += num_prompt_tokens
            usage.num_generated_tokens += num_generated_tokens
            if self.tokens_left(tenant) is not None:
                usage.tokens_left -= num_prompt_tokens + num_generated_tokens

    # -------------------------------------------------------------------------------------- outputs

    def check_outputs(self, tenant: str, num_live: int, count: int, capacity: int) -> None:
        """Check that a tenant may have `count` outputs more.

        Raises:
            QuotaError: It may not, since that is more than its `capacity`.
        """
        if self.limits_of(tenant).max_num_queued_reqs is not None and num_live + count > capacity:
            reason = f"{counted(num_live, 'output')} running or waiting and {count} more, {capacity} may be"
            self._refuse(tenant, "max_num_queued_reqs", reason)

    def _refuse(self, tenant: str, limit: str, reason: str, seconds: float = 1.0) -> NoReturn:
        if tenant in self.usage:
            self.usage[tenant].num_refused[limit] += 1
        raise QuotaError(f"the limit {limit} of this API key: {reason}; try again later", seconds)


class OutgoingResponse:
    """The bytes of one response that its client has not read, as a part of those of its tenant."""

    def __init__(self, quotas: Quotas, tenant: str) -> None:
        self._quotas, self._usage, self._num_bytes = quotas, quotas.usage.get(tenant, Usage()), 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @num_bytes.setter
    def num_bytes(self, count: int) -> None:
        self._quotas.num_outgoing_bytes += count - self._num_bytes
        self._usage.num_outgoing_bytes += count - self._num_bytes
        self._num_bytes = count


_NO_LIMITS = TenantLimits()
