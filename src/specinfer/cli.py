"""The command line: reads what is asked for, checks it, and hands it to the library.

Options that commands share are fields of a dataclass, declared once; `_command` gives a function a flag for
each field. However a command ends, `_App` makes one line and an exit code of it. Modules that need torch are
imported where they are used: they take seconds, and `--help` and `version` should not.
"""

import dataclasses
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

import specinfer
from specinfer.config import MAX_TREE_NODES, EngineConfig
from specinfer.errors import RequestError
from specinfer.sampling import SamplingParams
from specinfer.terminal import Chat, Screen, is_interactive, quiet_libraries, typed_lines

if TYPE_CHECKING:
    from specinfer.llm import LLM, Prompt
    from specinfer.outputs import CompletionOutput, RequestOutput

_DEFAULT_MAX_TOKENS = 128
_LIMITS = EngineConfig()
_NEXT = """
Try next:
  specinfer generate demo "def fibonacci(n):" --temperature 0 --stats
  specinfer complete demo --stats
  specinfer bench latency --tree auto --tree 1,1,1,1 --tree 3,1,1
  specinfer chat Qwen/Qwen3-1.7B --drafter Qwen/Qwen3-0.6B --stats
  specinfer --help
"""

# ------------------------------------------------------------------------------------ shared options


def _flag(panel: str, help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model runs, within which limits, and who guesses for it."""

    model: Annotated[str | None, _flag("Model", "The same as MODEL.")] = None
    dtype: Annotated[str, _flag("Model", "auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, _flag("Model", "auto, cpu, cuda, cuda:1, ...")] = "auto"
    max_model_len: Annotated[int | None, _flag("Model", "Longest prompt and output together, in tokens.")] = None
    max_num_seqs: Annotated[int, _flag("Model", "Requests running at once.")] = _LIMITS.max_num_seqs
    max_num_batched_tokens: Annotated[int, _flag("Model", "Prompt tokens read in one step.")] = (
        _LIMITS.max_num_batched_tokens
    )
    kv_cache_memory_bytes: Annotated[
        str | None, _flag("Model", "Bound of the target's cache: bytes, or as 512M, 1G.", metavar="SIZE")
    ] = None
    seed: Annotated[int, _flag("Model", "Sampled text is a function of it.")] = _LIMITS.seed
    drafter: Annotated[
        list[str] | None,
        _flag("Speculation", "A folder, hub name, ngram or demo; may be repeated. none: no drafter.", metavar="NAME"),
    ] = None
    tree: Annotated[
        str | None, _flag("Speculation", "auto (by measured cost), off, or children a level such as 1,1,3,1.")
    ] = None
    verification: Annotated[str | None, _flag("Speculation", "How guesses are verified: coupled.")] = None
    speculative_config: Annotated[
        str | None,
        _flag(
            "Speculation",
            'The same as vLLM\'s: {"method": "draft_model", "model": NAME, "num_speculative_tokens": 4}; '
            'or "method": "ngram", "tree", "verification".',
            metavar="JSON",
        ),
    ] = None

    def named(self, argument: str | None) -> str:
        """The model, named in one of the two ways."""
        if (argument is None) == (self.model is None):
            raise ValueError("model: name one, as MODEL or with --model; the embedded one is called demo")
        return argument or self.model or ""

    def load(self, model: str, screen: Screen) -> "LLM":
        """Loads it, with a line on the terminal that says so."""
        settings = {
            "dtype": self.dtype,
            "device": self.device,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory_bytes": _parse_bytes(self.kv_cache_memory_bytes),
            "seed": self.seed,
            **self._speculation(),
        }
        with screen.err.status(f"loading {model} ..."):
            from specinfer.llm import LLM

            return LLM(model, **settings)

    def _speculation(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"tree": self.tree, "verification": self.verification}
        if self.drafter:
            plain["drafters"] = _parse_drafters(self.drafter)
        plain = {name: value for name, value in plain.items() if value is not None}
        if self.speculative_config is None:
            return plain
        config = _parse_speculative_config(self.speculative_config)
        if both := sorted(plain.keys() & config.keys()):
            flag = f"--{both[0].removesuffix('s')}"
            raise ValueError(f"speculative_config: it and {flag} both choose {both[0]}; leave one out")
        return plain | config


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How text is chosen, and where it ends."""

    max_tokens: Annotated[
        int | None, _flag("Sampling", "Tokens to make at most; else 128, in chat to the end of the context.")
    ] = None
    min_tokens: Annotated[int, _flag("Sampling", "No end of text before this many.")] = 0
    temperature: Annotated[float, _flag("Sampling", "0 is greedy.")] = 1.0
    top_p: Annotated[float, _flag("Sampling", "Keep the smallest set of tokens this probable together.")] = 1.0
    top_k: Annotated[int, _flag("Sampling", "Keep this many most probable tokens; 0 keeps all.")] = 0
    min_p: Annotated[float, _flag("Sampling", "Drop tokens below this fraction of the most probable one.")] = 0.0
    presence_penalty: Annotated[float, _flag("Sampling", "Against tokens in the output.")] = 0.0
    frequency_penalty: Annotated[float, _flag("Sampling", "The same, for each occurrence.")] = 0.0
    repetition_penalty: Annotated[float, _flag("Sampling", "Against tokens in prompt or output; 1 is none.")] = 1.0
    logit_bias: Annotated[
        str | None, _flag("Sampling", 'Added to logits: {"TOKEN ID": BIAS, ...}.', metavar="JSON")
    ] = None
    stop: Annotated[list[str] | None, _flag("Sampling", "A string that ends the output; may be repeated.")] = None
    stop_token_ids: Annotated[
        str | None, _flag("Sampling", "Tokens that end the output, such as 2,5.", metavar="ID,ID")
    ] = None
    ignore_eos: Annotated[bool, _flag("Sampling", "Go on after the end-of-text token.", "--ignore-eos")] = False

    def params(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        """Checked parameters; `max_tokens` is for where none is given."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        settings["max_tokens"] = max_tokens if self.max_tokens is None else self.max_tokens
        settings["logit_bias"] = {} if self.logit_bias is None else _parse_object("logit_bias", self.logit_bias)
        settings["stop"] = self.stop or ()
        settings["stop_token_ids"] = _parse_token_ids("stop_token_ids", self.stop_token_ids)
        return SamplingParams(**settings, **more)


_DEBUG = Annotated[bool, _flag("Output", "Show log lines, library messages and tracebacks.", "--debug")]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is shown beside the text."""

    stats: Annotated[
        bool, _flag("Output", "Colour text by who guessed it, and print speed and acceptance.", "--stats")
    ] = False
    debug: _DEBUG = False

    def screen(self) -> Screen:
        quiet_libraries(debug=self.debug)
        return Screen(stats=self.stats)


# ---------------------------------------------------------------------------------------- the program


class _App(TyperGroup):
    """Ends every command alike: 0 fine, 1 failed or some prompts refused, 2 cannot be used, 130 interrupted."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        words = kwargs.get("args")
        debug = "--debug" in (sys.argv if words is None else words)
        code = 2
        try:
            code = super().main(*args, **(kwargs | {"standalone_mode": False})) or 0
            sys.stdout.flush()  # a reader that went away is met here, not while the interpreter ends
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        except typer.TyperException as error:  # a flag or argument that is unknown, missing or malformed
            context = getattr(error, "ctx", None)
            hint = f" (see {context.command_path} --help)" if context else ""
            if message := error.format_message():  # none: no command was named, and the help was shown
                _say_error(message.rstrip(".") + hint)
        except ValueError as error:  # ours, and those of configurations, name the field and the remedy
            _say_error(str(error), debug=debug)
        except Exception as error:
            hint = "" if debug else " (--debug shows where)"
            _say_error(f"{type(error).__name__}: {error}{hint}", debug=debug)
            code = 1
        sys.exit(code)


def _say_error(message: str, *, debug: bool = False) -> None:
    if debug:
        traceback.print_exc()
    print(f"specinfer: error: {' '.join(message.split())}", file=sys.stderr)


app = typer.Typer(
    name="specinfer",
    cls=_App,
    help="Tree-based speculative inference: drafters guess, the target verifies, the output stays the same.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # vLLM's users write either.
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": lambda n: n.replace("_", "-")},
)
bench = typer.Typer(no_args_is_help=True, help="Measurements.")
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of `specinfer`."""
    app(prog_name="specinfer")


def _command(group: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a function as a command, with a flag for each field of the dataclasses it takes."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            kind = parameter.annotation
            if not dataclasses.is_dataclass(kind):
                parameters.append(parameter)
                continue
            groups[parameter.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
                )
                for field in dataclasses.fields(kind)
            ]

        def run(**values: Any) -> None:
            for name, kind in groups.items():
                values[name] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
            function(**values)

        run.__doc__ = function.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        group.command(name)(run)
        return function

    return add


def _show_version(asked: bool) -> None:
    if asked:
        print(f"specinfer {specinfer.__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", "-v", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


# --------------------------------------------------------------------------------------------- text


_MODEL = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A folder, a hub name, or demo.", show_default=False)
]


@_command(app, "generate")
def generate(
    argument: _MODEL = None,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Text to complete.", show_default=False)
    ] = None,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    n: Annotated[int, _flag("Sampling", "Outputs for each prompt.", "--n", "-n")] = 1,
    logprobs: Annotated[int | None, _flag("Sampling", "Log-probabilities of this many tokens; with --json.")] = None,
    file: Annotated[
        str | None, _flag("Output", "Prompts: one a line, or .jsonl, .json of strings or objects. - is standard input.")
    ] = None,
    as_json: Annotated[bool, _flag("Output", "Print one array, with an object for each prompt.", "--json")] = False,
    output: OutputOptions,
) -> None:
    """Complete prompts: arguments, a file's, or the lines of standard input."""
    words = [word for word in (argument, *(prompts or ())) if word is not None]
    model = engine.named(words.pop(0) if words and engine.model is None else None)
    asked = _read_prompts(words, file)
    if logprobs is not None and not as_json:
        raise ValueError("logprobs: they are part of the JSON output only; add --json")
    params = sampling.params(_DEFAULT_MAX_TOKENS, n=n, logprobs=logprobs)
    screen = output.screen()
    llm = engine.load(model, screen)
    if screen.is_terminal and not as_json and len(asked) == n == 1:
        streamed = screen.stream(llm, asked[0], params, stoppable=False).output
        failed = streamed is not None and streamed.error is not None
    else:
        outputs = llm.generate(asked, params)
        if as_json:
            records = [_record(i, prompt, out) for i, (prompt, out) in enumerate(zip(asked, outputs, strict=True))]
            print("[\n" + ",\n".join(map(json.dumps, records)) + "\n]")  # a line for each prompt
            screen.numbers(outputs)
        else:
            screen.show(llm, outputs)
        failed = screen.name_failures(outputs)
    if failed:
        raise typer.Exit(1)


_QUICK = Annotated[str | None, _flag("Output", "Answer this one message and exit.", "--quick", "-q", metavar="MESSAGE")]


@_command(app, "complete")
def complete(
    argument: _MODEL = None,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    quick: _QUICK = None,
    output: OutputOptions,
) -> None:
    """Complete what is typed, line by line, until Ctrl-D."""
    name, params, screen = engine.named(argument), sampling.params(_DEFAULT_MAX_TOKENS), output.screen()
    llm = engine.load(name, screen)
    if quick is not None:
        screen.stream(llm, quick, params, stoppable=False)
        return
    _converse(typed_lines(), screen, lambda line: screen.stream(llm, line, params, stoppable=is_interactive()))


@_command(app, "chat")
def chat(
    argument: _MODEL = None,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    system_prompt: Annotated[str | None, _flag("Output", "Put before the conversation.", metavar="TEXT")] = None,
    quick: _QUICK = None,
    output: OutputOptions,
) -> None:
    """Talk with a model that has a chat template; /exit or Ctrl-D leaves, Ctrl-C stops an answer."""
    name, params, screen = engine.named(argument), sampling.params(None), output.screen()
    talk = Chat(engine.load(name, screen), screen, params, system_prompt)
    talk.check()
    if quick is not None:
        talk.say(quick, stoppable=False)
        return
    if is_interactive():
        screen.note(Chat.HELP)
    _converse(talk.messages(typed_lines()), screen, lambda line: talk.say(line, stoppable=is_interactive()))


def _converse(lines: Iterable[str], screen: Screen, answer: Callable[[str], object]) -> None:
    """Answers each line; one that is refused does not end the rest."""
    refused = False
    for line in lines:
        try:
            answer(line)
        except RequestError as error:
            screen.note(str(error))
            refused = True
    if refused and not is_interactive():
        raise typer.Exit(1)


# -------------------------------------------------------------------------------------- measurements


@_command(app, "demo")
def demo(*, debug: _DEBUG = False) -> None:
    """Watch the embedded pair speculate, and measure what it gains; no download."""
    quiet_libraries(debug=debug)
    from specinfer.bench.latency import LatencyConfig, run_latency
    from specinfer.demo.corpus import heldout_prompts

    screen = Screen(stats=True)
    llm = EngineOptions().load("demo", screen)
    prompt = heldout_prompts(1)[0]
    screen.heading("A small model of Python code goes on with a file it has never seen:\n\n" + prompt)
    screen.stream(llm, prompt, SamplingParams(temperature=0.0, max_tokens=160), stoppable=False)
    del llm  # its memory is for the measurement's own
    screen.heading("\nIn turns with plain decoding, on the same weights ...")
    report = run_latency(LatencyConfig(num_prompts=4, max_tokens=64, repeats=1), screen.err)
    speedup = report.speedup_of(report.trees[0])
    print(
        f"{report.tokens_per_pass:.2f} tokens a target pass, and {speedup.median:.2f} times the speed "
        f"({speedup.min:.2f} to {speedup.max:.2f} over {report.num_prompts} texts), for the same tokens"
    )
    print(_NEXT)


@_command(bench, "latency")
def bench_latency(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    drafter: Annotated[list[str] | None, _flag("Model", "As in generate; may be repeated.", metavar="NAME")] = None,
    grow: Annotated[
        str | None, _flag("Model", "Grow the target to this size, such as 1b; Llama models only.", metavar="SIZE")
    ] = None,
    dtype: Annotated[str, _flag("Model", "auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, _flag("Model", "auto, cpu, cuda, ...")] = "auto",
    tree: Annotated[list[str] | None, _flag("Speculation", "A tree to measure; may be repeated; else auto.")] = None,
    num_prompts: Annotated[int, _flag("Sampling", "Held-out texts to continue.")] = 8,
    max_tokens: Annotated[int, _flag("Sampling", "Tokens for each.")] = 128,
    temperature: Annotated[float, _flag("Sampling", "0 is greedy.")] = 0.0,
    repeats: Annotated[int, _flag("Sampling", "Measured runs of each tree on each prompt.")] = 3,
    seed: Annotated[int, _flag("Sampling", "Of sampled text.")] = 0,
    as_json: Annotated[str | None, _flag("Output", "Write the numbers here.", "--json", metavar="FILE")] = None,
    plot: Annotated[str | None, _flag("Output", "Draw them here: .png, .svg or .pdf.", metavar="FILE")] = None,
    debug: _DEBUG = False,
) -> None:
    """Time token trees against plain decoding, one request at a time."""
    quiet_libraries(debug=debug)
    from specinfer.bench.latency import LatencyConfig, run_latency
    from specinfer.bench.table import print_report

    drafters = _parse_drafters(drafter or ["auto"])
    config = LatencyConfig(
        model=model,
        drafters=drafters if isinstance(drafters, str) else tuple(drafters),
        trees=tuple(tree or ["auto"]),
        grow=grow,
        dtype=dtype,
        device=device,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        repeats=repeats,
        seed=seed,
        json=as_json,
        plot=plot,
    )
    screen = Screen()
    print_report(run_latency(config, screen.err), screen.out)


@_command(app, "collect-env")
def collect_env() -> None:
    """Print versions and hardware, for a report of a problem; no names of users, machines or folders."""
    import platform

    import torch

    packages = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy")
    rows = {"specinfer": specinfer.__version__} | {name: _version_of(name) for name in packages}
    rows |= {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model() or platform.processor() or "unknown",
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": _memory(),
        "torch threads": str(torch.get_num_threads()),
        "torch cpu capability": torch.backends.cpu.get_cpu_capability(),
        "torch cuda": torch.version.cuda or "not built in",
    }
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        rows[f"gpu {i}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        rows["gpus"] = "none"
    for name, value in rows.items():
        print(f"{name + ':':22}{value}")


@_command(app, "version")
def version() -> None:
    """Print the version."""
    _show_version(True)


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str | None:
    """As Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, ValueError):  # not a Unix that tells
        return "unknown"


# ----------------------------------------------------------------------------------- reading of values


def _read_prompts(words: Sequence[str], file: str | None) -> "list[Prompt]":
    """From one of the three sources; nothing is read from a terminal."""
    if words and file is not None:
        raise ValueError("file: prompts are given as arguments too; use one of the two")
    if words:
        return list(words)
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError("prompt: none given; name one after the model, a --file, or pipe lines in")
    name = "standard input" if file in (None, "-") else str(file)
    try:
        text = sys.stdin.read() if file in (None, "-") else Path(str(file)).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"file: {name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"file: {name} is not UTF-8 text") from error
    # By line breaks only: str.splitlines would also cut at characters that JSON strings may hold.
    lines = {f"{name}, line {i}": line for i, line in enumerate(text.split("\n"), 1) if line.strip()}
    if name.endswith(".json"):
        entries = _parse_json(name, text)
        entries = entries if isinstance(entries, list) else [entries]
        prompts = [_as_prompt(f"{name}, entry {i}", entry) for i, entry in enumerate(entries)]
    elif name.endswith(".jsonl"):
        prompts = [_as_prompt(place, _parse_json(place, line)) for place, line in lines.items()]
    else:
        prompts = [line.removesuffix("\r") for line in lines.values()]
    if not prompts:
        raise ValueError(f"prompt: {name} holds none")
    return prompts


def _as_prompt(place: str, entry: Any) -> "Prompt":
    if isinstance(entry, str) or (isinstance(entry, dict) and ("prompt" in entry or "prompt_token_ids" in entry)):
        return entry
    raise ValueError(f'{place}: a prompt is a string, or an object with "prompt" or "prompt_token_ids"')


def _parse_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: no JSON that can be read: {error}") from error


def _parse_object(name: str, text: str) -> dict[str, Any]:
    value = _parse_json(name, text)
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, such as {{...}}, not {text[:60]!r}")
    return value


def _parse_token_ids(name: str, text: str | None) -> list[int]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if wrong := [part for part in parts if not (part.isascii() and part.isdecimal() and len(part) < 20)]:
        raise ValueError(f"{name}: {wrong[0]!r} is no token id; give numbers with commas, such as 2,5")
    return [int(part) for part in parts]


def _parse_bytes(text: str | None) -> int | None:
    """vLLM's form: 1000 for k, m, g; 1024 for K, M, G."""
    if text is None:
        return None
    number, unit = (text[:-1], text[-1]) if text[-1:] in tuple("kmgtKMGT") else (text, "")
    if not (number.isascii() and number.isdecimal() and len(number) < 20):
        raise ValueError(f"kv_cache_memory_bytes: {text!r} is not understood; give bytes, or a size such as 512M or 1G")
    base, power = 1000 if unit.islower() else 1024, " KMGT".index(unit.upper() or " ")
    return int(number) * int(base**power)


def _parse_drafters(names: Sequence[str]) -> str | list[str]:
    """What `LLM` takes: "auto", or a list that "none" leaves empty."""
    for word, meaning in (("auto", "auto"), ("none", [])):
        if word in names:
            if len(names) > 1:
                raise ValueError(f"drafter: {word} stands alone; leave it or the others out")
            return meaning
    return list(names)


def _parse_speculative_config(text: str) -> dict[str, Any]:
    """The arguments of `LLM` that vLLM's keys stand for."""
    keys = ("method", "model", "num_speculative_tokens", "tree", "verification")
    config = _parse_object("speculative_config", text)
    if unknown := sorted(config.keys() - set(keys)):
        raise ValueError(f"speculative_config: key {unknown[0]!r} is not known; use {', '.join(keys)}")
    chosen: dict[str, Any] = {name: config[name] for name in ("tree", "verification") if name in config}
    method, model = config.get("method", "draft_model" if "model" in config else None), config.get("model")
    if method == "ngram":
        if model is not None:
            raise ValueError('speculative_config: method "ngram" has no model; leave one out')
        chosen["drafters"] = ["ngram"]
    elif method == "draft_model":
        models = [model] if isinstance(model, str) else model
        if not isinstance(models, list) or not models or not all(isinstance(name, str) for name in models):
            raise ValueError("speculative_config: model must be a name or a list of names")
        chosen["drafters"] = models
    elif method is not None:
        raise ValueError(f'speculative_config: method must be "draft_model" or "ngram", not {method!r}')
    if "num_speculative_tokens" in config:
        if "tree" in config:
            raise ValueError("speculative_config: tree and num_speculative_tokens both choose the shape; leave one out")
        count = config["num_speculative_tokens"]
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_TREE_NODES:
            raise ValueError(
                f"speculative_config: num_speculative_tokens must be from 1 to {MAX_TREE_NODES}, not {count!r}"
            )
        chosen["tree"] = ",".join(["1"] * count)
    return chosen


# -------------------------------------------------------------------------------------------- results


def _record(index: int, prompt: "Prompt", output: "RequestOutput") -> dict[str, Any]:
    metrics = output.metrics
    times = (metrics.first_token_time, metrics.finished_time)
    first, last = (None if time is None else time - metrics.arrival_time for time in times)
    record = {
        "index": index,
        "prompt": prompt.get("prompt") if isinstance(prompt, Mapping) else prompt,
        **_said(output.outputs[0]),
        "error": output.error,
        "metrics": {
            "speculative_decoding": metrics.speculative_decoding,
            "time_to_first_token": first,
            "time": last,
        },
    }
    if len(output.outputs) > 1:
        record["outputs"] = [{"index": done.index, **_said(done)} for done in output.outputs]
    return record


def _said(done: "CompletionOutput") -> dict[str, Any]:
    said: dict[str, Any] = {
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "stop_reason": done.stop_reason,
    }
    if done.logprobs is not None:  # JSON has no infinity
        said["cumulative_logprob"] = done.cumulative_logprob
        said["logprobs"] = [
            {token: value if math.isfinite(value) else None for token, value in best.items()} for best in done.logprobs
        ]
    return said
