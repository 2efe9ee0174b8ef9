"""The choice of a verification rule for each request, under the rule "auto"."""

import logging

from torch import Tensor

from specinfer.core.decayed_ratio import DecayedRatio
from specinfer.core.request import Request
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
from specinfer.verify import Acceptance

logger = logging.getLogger(__name__)


class RuleChoice:
    """The rule, coupled or traversal, with which requests emit more tokens per second here, by measurement.

    A request keeps the rule that it starts with. It is chosen from the steps of earlier requests, none of which used
    this request's noise, so its output has the target's distribution (docs/verification.md, condition B). At first
    requests take the rules in turn, and later one in `PROBE` takes the slower one. As an observer it counts passes with
    draft tokens. Requests in one pass share its time, but verification counts as if all of them had the same rule.
    """

    reads_logits = False
    RULES = ("coupled", "traversal")
    TRIAL = 500.0  # remembered passes of each rule before one is preferred; 576 in all
    PROBE = 16
    MARGIN = 1.02  # the slower rule must be faster by this factor to be preferred
    DECAY = 0.9995  # per pass: about two thousand are remembered

    def __init__(self) -> None:
        self.best: str | None = None  # not known yet
        self._per_pass = {rule: DecayedRatio(self.DECAY) for rule in self.RULES}  # tokens over passes
        self._per_second = {rule: DecayedRatio(self.DECAY) for rule in self.RULES}
        self._num_started = 0
        # Rule, emitted tokens and seconds of verification of each request in the step:
        self._unreported: list[tuple[str, int, float]] = []

    def start(self, request: Request) -> None:
        """Set the rule of a request that starts, unless it is greedy, takes no draft tokens or has a rule already."""
        params = request.params
        if request.verification is not None or params.is_greedy or params.tree == "off":
            return
        number, self._num_started = self._num_started, self._num_started + 1
        if self.best is None:
            request.verification = self.RULES[number % 2]
        else:
            request.verification = self._other if number % self.PROBE == 0 else self.best
        # Requests of one seed would share their noise, and then the results of one would tell about the other's.
        request.reseed(number)

    @property
    def _other(self) -> str:
        return self.RULES[self.best == self.RULES[0]]

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        if request.verification is not None and tree.num_guessed:
            self._unreported.append((request.verification, num_generated, acceptance.seconds))

    def on_step(self, record: StepRecord) -> None:
        unreported, self._unreported = self._unreported, []
        if record.reads_prompts or record.is_first_of_size:
            return
        shared = record.time - sum(seconds for _, _, seconds in unreported)
        for rule in self.RULES:
            steps = [(tokens, seconds) for name, tokens, seconds in unreported if name == rule]
            verifying = (
                len(unreported) * sum(seconds for _, seconds in steps) / max(len(steps), 1)
            )  # if it verified all
            for tokens, _ in steps:
                self._per_pass[rule].observe(tokens, 1)
                self._per_second[rule].observe(tokens, shared + verifying)
        if any(ratio.denominator < self.TRIAL for ratio in self._per_pass.values()):
            return
        rates = {rule: ratio.value for rule, ratio in self._per_second.items()}
        if self.best is None or rates[self._other] > self.MARGIN * rates[self.best]:
            self.best = max(self.RULES, key=rates.__getitem__)
            logger.info("%s", self.summary())

    def summary(self) -> str:
        """Return one line on the chosen rule and what each rule yielded."""
        yields = [
            f"{rule} {self._per_pass[rule].value:.2f} tokens a pass, {ratio.value:.0f} a second"
            for rule, ratio in self._per_second.items()
            if ratio.denominator
        ]
        return f"verification auto: {self.best or 'both rules in turn'}" + "".join(f"; {text}" for text in yields)
