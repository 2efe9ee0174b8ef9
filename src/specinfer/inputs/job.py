"""Job: one prompt, the requests that serve it, and their outputs with thoughts apart from answers."""

from dataclasses import dataclass, replace

from specinfer.core.outputs import CompletionOutput, RequestOutput
from specinfer.core.request import Request
from specinfer.inputs.formats.parser import OutputParser


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and the requests, one for each of `n`, that serve it."""

    request_id: str
    prompt: str | None
    requests: list[Request]

    def output(self) -> RequestOutput:
        made = RequestOutput.from_requests(self.request_id, self.prompt, self.requests)
        pairs = zip(made.outputs, self.requests, strict=False)  # a failed one has no outputs
        return replace(made, outputs=[_parsed(output, request) for output, request in pairs])


def _parsed(output: CompletionOutput, request: Request) -> CompletionOutput:
    """Return an output with its thought apart from its answer."""
    if request.thought is None:
        return output
    parser = OutputParser(reasoning=request.thought.reasoning)
    deltas = [*parser.push(output.text), *parser.finish()]
    reasoning, content = ("".join(getattr(one, name) for one in deltas) for name in ("reasoning", "content"))
    return replace(output, reasoning=reasoning or None, content=content)
