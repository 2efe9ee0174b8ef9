"""The requests for a prompt, under the defaults of one engine."""

import itertools
from dataclasses import replace

from specinfer.core.errors import ModelError, RequestError
from specinfer.core.limits import SLO
from specinfer.core.lora import LoRARequest
from specinfer.core.noise import derive_seed
from specinfer.core.sampling import SamplingParams
from specinfer.inputs.arguments import Prompt
from specinfer.inputs.job import Job
from specinfer.inputs.prompts import PromptReader
from specinfer.model.adapters.registry import Adapters


class JobReader:
    """A reader that turns prompts into requests, ready to be added to the engine.

    Args:
        reader: Reader of the prompts.
        adapters: Adapters of the target, or None if requests may have none.
        slo: Latency targets of requests that state none, or None.
        seed: Seed from which those of requests without one are derived.

    Attributes:
        has_drafters: Whether requests may have trees of their own.
    """

    def __init__(self, reader: PromptReader, adapters: Adapters | None, slo: SLO | None, seed: int) -> None:
        self._reader, self._adapters, self._slo, self._seed = reader, adapters, slo, seed
        self._count = itertools.count()
        self.has_drafters = False

    def read(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        lora_request: LoRARequest | None = None,
    ) -> Job:
        """Return the requests for a prompt.

        Raises:
            RequestError: The prompt cannot be served, or the adapter cannot be loaded.
        """
        if not self.has_drafters and params.tree not in (None, "off", "auto"):
            raise RequestError(f"tree: {params.tree!r} needs drafters, and none were loaded; leave it out")
        if params.slo is None and self._slo is not None:
            params = replace(params, slo=self._slo)
        if lora_request is None:
            return self._reader.job(request_id, prompt, params, seed)
        if self._adapters is None:
            raise RequestError("lora_request: the model was loaded without adapters; load it with enable_lora=True")
        try:
            adapter = self._adapters.find(lora_request)
        except ModelError as error:
            raise RequestError(str(error)) from error
        return self._reader.job(request_id, prompt, params, seed, adapter)

    def read_next(self, prompt: Prompt, params: SamplingParams, lora_request: LoRARequest | None = None) -> Job:
        """Return the requests for a prompt, named by their number, from which its seed is derived if it has none."""
        number = next(self._count)
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        return self.read(str(number), prompt, params, seed, lora_request)

    def next_seed(self) -> int:
        """Return the seed of the next request that has none of its own."""
        return derive_seed(self._seed, next(self._count))
