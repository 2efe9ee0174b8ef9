"""The command generate: prompts from the command line, a file or standard input, completed together."""

import difflib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specinfer.cli.chat import DEFAULT_MAX_TOKENS, MODEL_OR_PROMPT, named_model
from specinfer.cli.errors import checking
from specinfer.cli.options import EngineOptions, OutputOptions, flag, load
from specinfer.cli.sampling_options import SamplingOptions
from specinfer.cli.terminal import read_input
from specinfer.cli.values import parse_json
from specinfer.core.errors import RequestError
from specinfer.core.files import read_text
from specinfer.core.lora import LoRARequest
from specinfer.core.sampling import SamplingParams

if TYPE_CHECKING:  # importing these imports torch, which takes seconds
    from specinfer.core.outputs import CompletionOutput, RequestOutput
    from specinfer.core.sampling import SamplingParams
    from specinfer.inputs.arguments import Prompt
    from specinfer.llm import LLM


_SETTINGS = {field.name for field in fields(SamplingParams)}
_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_OTHERS = ("cache_salt",)  # a part of the prompt


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt of a command.

    Attributes:
        prompt: Text, or an object with "prompt", "prompt_token_ids" or "messages".
        settings: Fields of `SamplingParams` that differ from those of the command line.
        place: Where it stands, for messages.
    """

    prompt: "Prompt"
    settings: Mapping[str, Any] = field(default_factory=dict)
    place: str = "prompt"

    def params(self, usual: SamplingParams) -> SamplingParams:
        """Return the parameters of this prompt.

        Raises:
            ValueError: A field cannot be used.
        """
        try:
            return replace(usual, **self.settings)
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}") from error

    def rendered(self, llm: "LLM") -> "Prompt":
        """Return the prompt with a conversation as token ids.

        Raises:
            RequestError: The model has no chat template, or the conversation does not fit it.
        """
        if isinstance(self.prompt, Mapping) and "messages" in self.prompt:
            ids = llm.chat_prompt(self.prompt["messages"])
            return {"prompt_token_ids": ids} | {key: self.prompt[key] for key in _OTHERS if key in self.prompt}
        return self.prompt


def read_prompts(words: Sequence[str], file: str | None) -> list[PromptLine]:
    """Return prompts from one of the three sources; standard input is not read if it is a terminal."""
    if words and file is not None:
        raise ValueError("file: prompts are given as arguments too; use one of the two")
    if words:
        return [PromptLine(word) for word in words]
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError(
            "prompt: none given; name one after the model (for one word: with --model), a --file, or pipe lines in"
        )
    name = "standard input" if file in (None, "-") else str(file)
    text = read_input() if file in (None, "-") else read_text("file", str(file))
    # Split at line feeds only: str.splitlines would also split at characters that JSON strings may have.
    lines = {f"{name}, line {i}": line for i, line in enumerate(text.split("\n"), 1) if line.strip()}
    if name.endswith(".json"):
        entries = parse_json(name, text)
        entries = entries if isinstance(entries, list) else [entries]
        prompts = [_as_prompt(f"{name}, entry {i}", entry) for i, entry in enumerate(entries)]
    elif name.endswith(".jsonl"):
        prompts = [_as_prompt(place, parse_json(place, line)) for place, line in lines.items()]
    else:
        prompts = [PromptLine(line.removesuffix("\r")) for line in lines.values()]
    if not prompts:
        raise ValueError(f"prompt: {name} holds none")
    return prompts


def _as_prompt(place: str, entry: Any) -> PromptLine:
    if isinstance(entry, str):
        return PromptLine(entry, place=place)
    kinds = [key for key in _PROMPTS if key in entry] if isinstance(entry, dict) else []
    if len(kinds) != 1:
        raise ValueError(
            f'{place}: a prompt is a string, or an object with "prompt", "prompt_token_ids" or "messages" (one of them)'
        )
    allowed = (*_SETTINGS, *_PROMPTS, *_OTHERS)
    if unknown := [key for key in entry if key not in allowed]:
        near = difflib.get_close_matches(unknown[0], allowed, n=1)
        remedy = f"did you mean {near[0]}?" if near else "use fields of SamplingParams, such as temperature"
        raise ValueError(f"{place}: {unknown[0]!r:.60} is not known; {remedy}")
    prompt = {key: entry[key] for key in (*kinds, *_OTHERS) if key in entry}
    line = PromptLine(prompt, {key: value for key, value in entry.items() if key in _SETTINGS}, place)
    line.params(SamplingParams(max_tokens=None))
    return line


_FAILED: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": "error", "stop_reason": None}


def generate(
    argument: MODEL_OR_PROMPT = None,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Text to complete.", show_default=False)
    ] = None,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    n: Annotated[int, flag("Sampling", "Number of outputs for each prompt.", "--n", "-n")] = 1,
    logprobs: Annotated[int | None, flag("Sampling", "Number of log-probabilities per token; requires --json.")] = None,
    lora: Annotated[
        str | None,
        flag("Model", "LoRA adapter for all prompts; includes --enable-lora.", "--lora", metavar="NAME=FOLDER"),
    ] = None,
    file: Annotated[
        str | None,
        flag(
            "Output",
            "File of prompts: one per line, or .jsonl or .json of strings or objects with prompt, prompt_token_ids or "
            "messages, and fields of SamplingParams, which take precedence over flags; - is standard input.",
        ),
    ] = None,
    as_json: Annotated[bool, flag("Output", "Print a JSON array with an object for each prompt.", "--json")] = False,
    output: OutputOptions,
) -> None:
    """Complete prompts from arguments, a file, or the lines of standard input. Without MODEL, demo-chat is used."""
    name, words = named_model(argument, prompts, engine)
    with checking():
        lines = read_prompts(words, file)
        if logprobs is not None and not as_json:
            raise ValueError("logprobs: they are part of the JSON output only; add --json")
        args, adapter = engine.args(name), None
        if lora is not None:
            args, adapter = replace(args, enable_lora=True), _adapter(lora)
        usual = sampling.params(DEFAULT_MAX_TOKENS, str(args.model), n=n, logprobs=logprobs)
        params = [line.params(usual) for line in lines]
        screen = output.screen()
        llm = load(args, screen)
        if adapter is not None:
            assert llm.adapters is not None
            llm.adapters.find(adapter)  # one that cannot be used is refused once, and not for each prompt
    asked, errors = _rendered(lines, llm)
    fitted = [sampling.fit(each, llm, prompt, limited="max_tokens" in line.settings)
              for each, prompt, line in zip(params, asked, lines, strict=True)]  # fmt: skip
    if screen.is_terminal and not as_json and len(asked) == fitted[0].n == 1:
        streamed = screen.stream(llm, asked[0], fitted[0], stoppable=False, lora_request=adapter).output
        failed = streamed is not None and streamed.error is not None
    else:
        if as_json or len(asked) > 1:
            outputs = _serve(llm, asked, fitted, errors, adapter)
        else:
            outputs = llm.generate(asked, fitted, lora_request=adapter)
        if as_json:
            records = [_record(i, prompt, out) for i, (prompt, out) in enumerate(zip(asked, outputs, strict=True))]
            print("[\n" + ",\n".join(map(json.dumps, records)) + "\n]")  # one line per prompt
            screen.numbers(outputs)
        else:
            screen.show(llm, outputs)
        failed = screen.name_failures(outputs)
    if failed:
        raise typer.Exit(1)


def _rendered(lines: "Sequence[PromptLine]", llm: "LLM") -> "tuple[list[Prompt], dict[int, str]]":
    """Return the prompts with conversations as token ids, and the errors of those that cannot be rendered."""
    prompts: list[Prompt] = []
    errors: dict[int, str] = {}
    for i, line in enumerate(lines):
        try:
            prompts.append(line.rendered(llm))
        except RequestError as error:
            if len(lines) == 1:
                raise
            prompts.append(line.prompt)
            errors[i] = str(error)
    return prompts, errors


def _adapter(text: str) -> LoRARequest:
    name, _, folder = text.partition("=")
    if not (name and folder):
        raise ValueError(f"lora: {text!r:.80} is not an adapter; write NAME=FOLDER")
    return LoRARequest(name, 1, folder)


def _serve(
    llm: "LLM",
    prompts: "Sequence[Prompt]",
    params: "Sequence[SamplingParams]",
    errors: Mapping[int, str],
    adapter: LoRARequest | None,
) -> "list[RequestOutput]":
    """Return an output for each prompt; those that are refused have an error, and the others are served."""
    from specinfer.core.outputs import RequestMetrics, RequestOutput

    refused: dict[int, RequestOutput] = {}
    for i, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
        try:
            if i in errors:
                raise RequestError(errors[i])
            llm.jobs.read(str(i), prompt, its_params, 0, adapter)
        except RequestError as error:
            refused[i] = RequestOutput(str(i), None, [], [], True, RequestMetrics(), str(error))
    left = [i for i in range(len(prompts)) if i not in refused]
    served = iter(llm.generate([prompts[i] for i in left], [params[i] for i in left], lora_request=adapter))
    return [refused.get(i) or next(served) for i in range(len(prompts))]


def _record(index: int, prompt: "Prompt", output: "RequestOutput") -> dict[str, Any]:
    metrics = output.metrics
    times = (metrics.first_token_time, metrics.finished_time)
    first, last = (None if time is None else time - metrics.arrival_time for time in times)
    record = {
        "index": index,
        "prompt": prompt.get("prompt") if isinstance(prompt, Mapping) else prompt,
        **(_output_record(output.outputs[0]) if output.outputs else _FAILED),
        "error": output.error,
        "metrics": {
            "speculative_decoding": metrics.speculative_decoding,
            "time_to_first_token": first,
            "time": last,
        },
    }
    if len(output.outputs) > 1:
        record["outputs"] = [{"index": done.index, **_output_record(done)} for done in output.outputs]
    return record


def _output_record(done: "CompletionOutput") -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "stop_reason": done.stop_reason,
    }
    if done.logprobs is not None:  # JSON has no infinity
        record["cumulative_logprob"] = done.cumulative_logprob
        record["logprobs"] = [
            {token: logprob.logprob if math.isfinite(logprob.logprob) else None for token, logprob in best.items()}
            for best in done.logprobs
        ]
    return record
