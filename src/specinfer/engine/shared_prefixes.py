"""Which waiting requests should wait for a running one, because they can share what it is computing."""

from collections.abc import Iterable

from specinfer.core.request import Request

WORTH_WAITING = 32  # tokens: a request waits for another one to compute this many that it can share


def is_being_computed(request: Request, running: Iterable[Request], *, keeps_prefixes: bool) -> bool:
    """Return whether a running request is computing a prefix, or log-probabilities, that this one could share.

    Args:
        keeps_prefixes: Whether the cache lets requests share prefixes.
    """
    if request.lacks_prompt_logprobs:
        sharers = [other for other in running if other.prompt_logprobs is request.prompt_logprobs]
    else:
        sharers = list(running) if keeps_prefixes else []
    return any(_computes_beginning(other, request) for other in sharers)


def _computes_beginning(other: Request, request: Request) -> bool:
    """Return whether the first request is computing a part of its prompt that begins the second request too."""
    end = other.num_computed + WORTH_WAITING
    return (
        other.cache_salt == request.cache_salt
        and other.num_computed < len(other.prompt_ids)
        and len(other.token_ids) >= end < len(request.token_ids)
        and other.token_ids[:end] == request.token_ids[:end]
    )
