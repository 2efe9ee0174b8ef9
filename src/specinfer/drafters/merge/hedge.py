"""Hedge over drafters with full information: it learns which drafter suits a text while the text is generated.

A committed token scores every drafter, including those that were not asked to draft it, so nothing needs to be tried
out, as a bandit must. HedgeSpec ("Not-a-Bandit", arXiv 2510.20064), on Hedge (Freund and Schapire, 1997).
"""

import math
from collections.abc import Collection, Mapping, Sequence

from specinfer.core.decayed_ratio import DecayedRatio

# Weight, in tokens, of the losses of all traffic when a request begins; its own prompt soon says more.
_PRIOR_TOKENS = 16.0


class Hedge:
    """Weights of the drafters in each request: exp(-rate * losses) over the sum of all.

    Losses of older tokens count less and less, so that a change of the text is followed. A drafter that is scored less
    often than others is assumed to do between its scores as it did before.

    Args:
        names: The names of the drafters.
        generalist: The drafter that is always asked if two may be asked, or None for the first.
        decay: The weight of a loss one token later.
        horizon: The number of tokens that matter, for the learning rate sqrt(8 ln N / horizon), or None for as many as
            the decay leaves.
        costs: The cost of drafting a token, as a fraction of a target pass, added to the losses; None for zero.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    def __init__(
        self,
        names: Sequence[str],
        generalist: str | None = None,
        *,
        decay: float = 0.99,
        horizon: float | None = None,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        if not names or len(set(names)) < len(names):
            raise ValueError(f"names: {', '.join(names) or 'none'} given; give at least one, and none twice")
        if generalist is not None and generalist not in names:
            raise ValueError(f"generalist: {generalist!r} is none of {', '.join(names)}")
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay must be above 0 and at most 1, not {decay!r}")
        if decay == 1.0 and horizon is None:
            raise ValueError("horizon: with a decay of 1 every token matters; say how many there will be")
        horizon = 1.0 / (1.0 - decay) if horizon is None else horizon
        if not horizon > 0.0:
            raise ValueError(f"horizon must be above 0, not {horizon!r}")
        self.names = tuple(names)
        self.generalist = self.names[0] if generalist is None else generalist
        self.rate = math.sqrt(8.0 * math.log(len(names)) / horizon)
        self._decay = decay
        self._costs = dict.fromkeys(names, 0.0) | dict(costs or {})
        # Losses of each drafter over their number of tokens: of all traffic, and of each request.
        self._traffic = {name: DecayedRatio(decay) for name in names}
        self._requests: dict[str, dict[str, DecayedRatio]] = {}

    def observe(self, request_id: str, losses: Mapping[str, Sequence[float]], *, of_prompt: bool = False) -> None:
        """Add losses, each from 0 to 1, of tokens in the order of the text.

        Args:
            losses: The losses by drafter; drafters left out were not scored.
            of_prompt: True for tokens of the prompt. They describe this request, not other requests' outputs.
        """
        known = self._of(request_id)
        for name, values in losses.items():
            for ratio in (known[name],) if of_prompt else (known[name], self._traffic[name]):
                for loss in values:
                    ratio.observe(loss, 1.0)

    def mean_loss(self, request_id: str, name: str) -> float | None:
        """Return the mean loss over the tokens that count, or None before the first."""
        losses = self._of(request_id)[name]
        return losses.value if losses.denominator else None

    def weights(self, request_id: str | None = None) -> dict[str, float]:
        """Return the weights of all drafters, summing to 1, in a request, or in all traffic if `request_id` is None."""
        losses = self._weighed(self._traffic if request_id is None else self._of(request_id))
        least = min(losses.values())
        weights = {name: math.exp(self.rate * (least - loss)) for name, loss in losses.items()}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def choose(self, request_id: str, count: int, among: Collection[str]) -> frozenset[str]:
        """Return the drafters to ask, at most `count` of those given, by largest weight; the first named on a tie.

        With two or more, the generalist is one of them. Unlike Hedge, nothing is drawn by the weights: its draws guard
        against losses chosen by an adversary that knows the choice, which a text is not. The best drafter yields more
        than a mixture, and one that stays need not catch up.
        """
        losses = self._weighed(self._of(request_id))
        best = sorted((name for name in self.names if name in among), key=lambda name: losses[name])
        if count >= 2 and self.generalist in best:
            best.remove(self.generalist)
            best.insert(0, self.generalist)
        return frozenset(best[:count])

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that ended; what all traffic showed stays."""
        self._requests.pop(request_id, None)

    def _of(self, request_id: str) -> dict[str, DecayedRatio]:
        """Return a request's losses; a new one begins with those of recent traffic."""
        if request_id not in self._requests:
            self._requests[request_id] = {
                name: DecayedRatio(self._decay, weight * losses.value, weight)
                for name, losses in self._traffic.items()
                for weight in [_PRIOR_TOKENS if losses.denominator else 0.0]
            }
        return self._requests[request_id]

    def _weighed(self, known: Mapping[str, DecayedRatio]) -> dict[str, float]:
        """Return each drafter's losses, the basis of the weights, as if all were scored on as many tokens."""
        num_tokens = max(losses.denominator for losses in known.values())
        means = [losses.value for losses in known.values() if losses.denominator]
        usual = sum(means) / len(means) if means else 0.0  # the mean of the others for one that was never scored
        return {
            name: num_tokens * ((losses.value if losses.denominator else usual) + self._costs[name])
            for name, losses in known.items()
        }
