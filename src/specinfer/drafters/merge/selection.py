"""Selection of the drafters to ask for each request: those that Hedge favors, and all lookups, which cost nothing.

The drafters that are asked are scored on their own drafts. The other models are replayed now and then: they read the
emitted tokens and are scored on them. They are first scored on the end of the prompt, so that a request begins with the
drafter of its domain.

The selection depends only on what is known before a step: committed tokens, never a draft of this step. So drawn trees
stay exact.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.merge.hedge import Hedge
from specinfer.drafters.merge.scoring import Losses, lookup_losses

FIRST_WAIT = 32  # tokens until a model that is not asked is replayed
LONGEST_WAIT = 256  # the wait doubles while the model is clearly worse than those asked
CLEARLY = 0.1  # difference of mean loss; if the best one asked gets this much worse than at its best, all are replayed

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Course:
    """The drafters that are asked for one request, and when the others are replayed.

    Attributes:
        waits: For each model that has been replayed, the number of tokens between its replays.
        due_at: The length of the text at which a model is replayed next.
        least_loss: The lowest mean loss of the best model asked, since the last replay of all models.
    """

    asked: frozenset[str] = frozenset()
    waits: dict[str, int] = field(default_factory=dict)
    due_at: dict[str, int] = field(default_factory=dict)
    least_loss: float = 1.0
    looked_up: dict[str, tuple[int, TokenTree]] = field(default_factory=dict)  # lookup trees, with text lengths


class Selection:
    """The choice among models, request by request.

    Args:
        models, lookups: Names of drafters; lookups are always asked.
        num_asked: The largest number of models to ask.
        costs: The cost of each drafter per token, as a fraction of a target pass.
    """

    def __init__(
        self,
        models: Sequence[str],
        lookups: Sequence[str],
        num_asked: int,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        self.models, self.lookups, self.num_asked = tuple(models), tuple(lookups), num_asked
        self.hedge = Hedge([*models, *lookups], costs=costs)
        self._courses: dict[str, _Course] = {}

    @property
    def num_drafters(self) -> int:
        """The number of drafters that are asked for a request."""
        return len(self.lookups) + min(self.num_asked, len(self.models))

    @property
    def weights(self) -> dict[str, float]:
        """Weights of all drafters in recent traffic."""
        return self.hedge.weights()

    def due(self, requests: Sequence[Request], model: str) -> list[Request]:
        """Return the requests on whose text the model is to be replayed now."""
        due = []
        for request in requests:
            course = self._courses.setdefault(request.request_id, _Course())
            if model not in course.asked and len(request.token_ids) >= course.due_at.get(model, 0):
                due.append(request)
        return due

    def note_replay(self, requests: Sequence[Request], model: str) -> None:
        """Note that the model has been replayed on these requests, or has failed to."""
        for request in requests:
            course = self._courses[request.request_id]
            mean, best = self.hedge.mean_loss(request.request_id, model), self._best_asked(request, course)
            is_worse = mean is None or best is None or mean > best + CLEARLY
            before = course.waits.get(model)
            wait = FIRST_WAIT
            if before is not None and is_worse and model != self.hedge.generalist:
                wait = min(2 * before, LONGEST_WAIT)
            course.waits[model] = wait
            course.due_at[model] = len(request.token_ids) + wait

    def learn(self, request_id: str, model: str, losses: Losses) -> None:
        """Add a model's losses on known tokens."""
        if losses.prompt:
            self.hedge.observe(request_id, {model: losses.prompt}, of_prompt=True)
        if losses.output:
            self.hedge.observe(request_id, {model: losses.output})

    def restrict(self, request: Request, budget: TreeBudget, able: Collection[str]) -> TreeBudget:
        """Return the budget with the drafters that are asked for this request.

        Args:
            able: The models that have not failed too often and can read this text now; only these can be chosen.
        """
        name = request.request_id
        course = self._courses.setdefault(name, _Course())  # no request was due if no model could be scored
        among = [model for model in self.models if model in able and budget.asks(model)]
        chosen = self.hedge.choose(name, self.num_asked, among)
        if chosen != course.asked:
            for model in chosen - course.asked:
                course.waits.pop(model, None)
            for model in course.asked - chosen:
                course.due_at[model] = len(request.token_ids) + FIRST_WAIT
            course.asked = chosen
            if logger.isEnabledFor(logging.DEBUG):
                weights = ", ".join(f"{drafter} {w:.2f}" for drafter, w in self.hedge.weights(name).items())
                asked = ", ".join(sorted(chosen)) or "none"
                logger.debug("request %s: asked are %s; weights: %s", name, asked, weights)
        self._watch(request, course)
        return replace(budget, drafters=chosen | {lookup for lookup in self.lookups if budget.asks(lookup)})

    def _best_asked(self, request: Request, course: _Course) -> float | None:
        """Return the mean loss of the best model asked, or None if none is asked or scored."""
        means = (self.hedge.mean_loss(request.request_id, model) for model in course.asked)
        return min((mean for mean in means if mean is not None), default=None)

    def _watch(self, request: Request, course: _Course) -> None:
        """Have the others replayed in the next step if the models that are asked do worse than before."""
        best = self._best_asked(request, course)
        if best is None:
            return
        if best > course.least_loss + CLEARLY:
            course.waits.clear()
            course.due_at.clear()
            course.least_loss = best
        course.least_loss = min(course.least_loss, best)

    def note_lookups(
        self, spans: Sequence[Span], budgets: Sequence[TreeBudget], name: str, trees: Sequence[TokenTree]
    ) -> None:
        """Note what a drafter drafts in this step, if it is a lookup, where its budget lets it."""
        for span, budget, tree in zip(spans, budgets, trees, strict=True) if name in self.lookups else ():
            course = self._courses.get(span.request.request_id)
            if course is not None and budget.max_nodes:
                course.looked_up[name] = (len(span.request.token_ids), tree)

    def observe(self, request: Request) -> None:
        """Score the lookups on the tokens of this step, which are part of the request by now."""
        course = self._courses.get(request.request_id)
        if course is None:
            return
        losses = {
            name: lookup_losses(tree, request.token_ids[num_known:])
            for name, (num_known, tree) in course.looked_up.items()
        }
        course.looked_up.clear()
        self.hedge.observe(request.request_id, losses)

    def forget(self, request_id: str) -> None:
        self._courses.pop(request_id, None)
        self.hedge.forget(request_id)
