"""The least time of each stage of a step: its necessary reads and operations at the device's best measured rates.

A pass of a model reads the weights once, and the keys and values of all tokens before it. A draft is one pass for each
level. Verification reads the logits of every node. All other stages have no floor.
"""

from specinfer.bench.ceilings import Ceilings
from specinfer.core.step_record import StepRecord
from specinfer.llm import LLM
from specinfer.model.pass_work import PassWork


class Roofline:
    """Floors of the steps of one engine."""

    def __init__(self, llm: LLM, ceilings: Ceilings) -> None:
        loaded = llm.target.loaded
        drafters = [PassWork.of(small.loaded) for small in llm.small_models.values()]
        self.ceilings = ceilings
        self._target = PassWork.of(loaded)
        self._drafters = [work for work in drafters if work is not None]
        self._knows_drafters = len(drafters) == len(self._drafters)
        self._logit_bytes = loaded.vocab_size * loaded.dtype.itemsize

    def floors(self, step: StepRecord) -> dict[str, float]:
        """Return the least seconds of each stage with a floor. Drafting has one if the work of all models is known."""
        found = {"verify": step.num_rows * self._logit_bytes / self.ceilings.bytes_per_second}
        if self._target is not None:
            found["target"] = self._pass_seconds(self._target, step.num_rows, step)
        levels = step.num_model_levels or 0
        if levels and self._knows_drafters:
            rows = step.num_guessed / levels  # rows of a level; reading newly accepted tokens is left out
            found["draft"] = levels * sum(self._pass_seconds(work, rows, step) for work in self._drafters)
        return found

    def _pass_seconds(self, work: PassWork, num_rows: float, step: StepRecord) -> float:
        return self.ceilings.seconds(*work.of_step(num_rows, step.num_context, step.num_requests))
