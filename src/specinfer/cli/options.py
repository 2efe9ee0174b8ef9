"""Options that several commands share, and the objects made from them."""

import dataclasses
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specinfer.cli.loading import loading_bar
from specinfer.cli.prompts import count_tokens
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.cli.values import (
    is_file_name,
    is_file_path,
    parse_bytes,
    parse_drafters,
    parse_object,
    parse_speculative_config,
    parse_token_ids,
    read_text,
)
from specinfer.config import EngineConfig
from specinfer.demo.chat_model import default_model, usual_temperature
from specinfer.parallel.config import ParallelConfig
from specinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from specinfer.llm import LLM
    from specinfer.prompts import Prompt

_LIMITS = EngineConfig()
_RANKS = (
    "tensor_parallel_size", "pipeline_parallel_size", "nnodes", "node_rank", "master_addr", "master_port",
    "drafter_placement",
)  # fmt: skip


def flag(panel: str, help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


MODEL = Annotated[str | None, flag("Model", "The same as MODEL.", "--model", metavar="NAME")]
ARGUMENT = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a GGUF file, a hub name, demo or demo-chat; else demo-chat.",
        show_default=False,
    ),
]
DEBUG = Annotated[bool, flag("Output", "Show log lines, library messages and tracebacks.", "--debug")]
# Of the commands that measure:
GROW = Annotated[
    str | None, flag("Model", "Grow the target to this size, such as 1b; Llama models only.", "--grow", metavar="SIZE")
]
DRAFTERS = Annotated[list[str] | None, flag("Model", "As in generate; may be repeated.", "--drafter", metavar="NAME")]
DTYPE = Annotated[str, flag("Model", "auto, float32, bfloat16 or float16.", "--dtype")]
QUANTIZATION = Annotated[
    str | None,
    flag("Model", "int8, int4 or fp8: round the target's linear layers; else as is.", "--quantization"),
]
DRAFTER_QUANTIZATION = Annotated[
    str | None, flag("Speculation", "The same for drafters that are models.", "--drafter-quantization")
]
OFFLOAD = Annotated[
    str | None,
    flag(
        "Model",
        "disk: read layers of the target that do not fit into memory for every pass; cpu: keep those of a GPU's target "
        "in host memory.",
        "--offload",
    ),
]
MEMORY_BUDGET = Annotated[
    str | None,
    flag(
        "Model",
        "With --offload: what the whole process may hold, such as 4GiB; else 80 % of what is to be had.",
        "--memory-budget",
        metavar="SIZE",
    ),
]
OFFLOAD_FOLDER = Annotated[
    str | None,
    flag(
        "Model",
        "With --offload: keep a packed copy of the layers here and read that; quantized ones need it.",
        "--offload-folder",
        metavar="DIR",
    ),
]
SELECT = Annotated[
    str | None,
    flag(
        "Speculation",
        "Which drafters that are models guess: all, or hedge or hedge:1 for at most so many (else 2), those that prove "
        "themselves on the text.",
        "--select",
    ),
]
SCHEDULER = Annotated[
    str | None,
    flag(
        "Speculation",
        "What auto chooses by, for each request and step: a file made by specinfer tune --policy.",
        "--scheduler",
        metavar="FILE",
    ),
]
DEVICE = Annotated[str, flag("Model", "auto, cpu, cuda, ...", "--device")]
TENSOR_PARALLEL_SIZE = Annotated[
    int, flag("Ranks", "Processes that share every layer of the target.", "--tensor-parallel-size", "-tp")
]
PIPELINE_PARALLEL_SIZE = Annotated[
    int, flag("Ranks", "Stages of layers, each held by that many processes.", "--pipeline-parallel-size", "-pp")
]
SEED = Annotated[int, flag("Sampling", "Of sampled text.", "--seed")]
JSON = Annotated[str | None, flag("Output", "Write the numbers here.", "--json", metavar="FILE")]
PLOT = Annotated[str | None, flag("Output", "Draw them here: .png, .svg or .pdf.", "--plot", metavar="FILE")]


def one_name(argument: str | None, option: str | None) -> str | None:
    """Return the model named as MODEL or with --model, or None if neither was given.

    Raises:
        ValueError: Both were given.
    """
    if argument is not None and option is not None:
        raise ValueError("model: name one, as MODEL or with --model; leave the other out")
    return option if argument is None else argument


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The model to run, its limits, and its drafters."""

    model: MODEL = None
    dtype: Annotated[str, flag("Model", "auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto"
    quantization: QUANTIZATION = None
    offload: OFFLOAD = None
    memory_budget: MEMORY_BUDGET = None
    offload_folder: OFFLOAD_FOLDER = None
    device: Annotated[str, flag("Model", "auto, cpu, cuda, cuda:1, ...")] = "auto"
    tensor_parallel_size: TENSOR_PARALLEL_SIZE = 1
    pipeline_parallel_size: PIPELINE_PARALLEL_SIZE = 1
    nnodes: Annotated[int, flag("Ranks", "Machines; start the same command on each.")] = 1
    node_rank: Annotated[int, flag("Ranks", "Of this machine, from 0; the one that is 0 has the engine.")] = 0
    master_addr: Annotated[str | None, flag("Ranks", "Of machine 0, as all reach it.", metavar="HOST")] = None
    master_port: Annotated[int | None, flag("Ranks", "There, for ranks to meet; else 29500.")] = None
    drafter_placement: Annotated[
        str,
        flag(
            "Ranks",
            "first: drafters that are models guess one after the other on the engine's rank; spread: at the same time, "
            "each rank with another; auto: spread on one machine with two CPUs for each rank.",
        ),
    ] = "auto"
    max_model_len: Annotated[int | None, flag("Model", "Longest prompt and output together, in tokens.")] = None
    max_num_seqs: Annotated[int, flag("Model", "Requests running at once.")] = _LIMITS.max_num_seqs
    max_num_batched_tokens: Annotated[
        int | None, flag("Model", "Known tokens computed in one step; else 512, or 1024 with --offload.")
    ] = None
    kv_cache_memory_bytes: Annotated[
        str | None, flag("Model", "Bound of the caches of all models: bytes, or as 512M, 1G.", metavar="SIZE")
    ] = None
    enable_prefix_caching: Annotated[
        bool, flag("Model", "Keep what was computed for a prompt for others that begin alike.")
    ] = True
    enforce_eager: Annotated[
        bool,
        flag("Model", "On a GPU: launch passes kernel by kernel; nothing is captured.", "--enforce-eager"),
    ] = False
    seed: Annotated[int, flag("Model", "Sampled text is a function of it.")] = _LIMITS.seed
    drafter: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "A folder, .gguf file, hub name, ngram, suffix, or demo, demo-2, demo-3; may be repeated. none: nobody.",
            metavar="NAME",
        ),
    ] = None
    drafter_quantization: DRAFTER_QUANTIZATION = None
    tree: Annotated[
        str | None,
        flag("Speculation", "auto (by measured cost), off, children a level such as 1,1,3,1, or best-first:32."),
    ] = None
    verification: Annotated[
        str | None,
        flag(
            "Speculation",
            "coupled and target-only say what plain decoding with the same seed says; multi-step and traversal "
            "something of the same distribution.",
        ),
    ] = None
    drawing: Annotated[
        str | None,
        flag("Speculation", "auto (the verification's own), shared-noise, top-k, without-replacement, iid or hybrid."),
    ] = None
    select: SELECT = None
    scheduler: SCHEDULER = None
    step_log: Annotated[
        str | None,
        flag(
            "Speculation",
            "Write what was known before each step and what came of it here, to train a scheduler from.",
            metavar="FILE",
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        flag(
            "Speculation",
            'The same as vLLM\'s: {"method": "draft_model", "model": NAME, "num_speculative_tokens": 4}; '
            'or "method": "ngram" or "suffix", "quantization", "tree", "verification", "drawing", "select", '
            '"scheduler".',
            metavar="JSON",
        ),
    ] = None

    def named(self, argument: str | None) -> str:
        """Return the model named as MODEL or with --model, or the default model."""
        name = one_name(argument, self.model)
        if name is None:
            name, missing = default_model()
            if missing is not None:
                print(f"specinfer: {missing}", file=sys.stderr)
        return name

    def load(self, model: str, screen: Screen) -> "LLM":
        """Load the model and show its progress on the terminal."""
        settings = self.settings()
        self.follow(model, settings)
        with loading_bar(screen.err, f"loading {model} ...") as tell:
            from specinfer.llm import LLM

            llm = LLM(model, **settings, progress=tell)
        screen.watch(llm)
        return llm

    def follow(self, model: str, settings: dict[str, Any]) -> None:
        """Run this machine's ranks and then exit, if the engine is in another process; otherwise do nothing.

        Raises:
            ValueError: The sizes or addresses cannot be used.
        """
        ranks = {name: getattr(self, name) for name in _RANKS}
        if ParallelConfig(**ranks).world_size == 1:
            return
        from specinfer.follower import follow, has_engine

        if not has_engine(**ranks):
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ranks wait in native code; Python's handler would not run
            code = follow(model, **(settings | ranks))
            raise typer.Exit(code)

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `LLM`, without the model.

        Raises:
            ValueError: A value cannot be parsed, or two options set the same thing.
        """
        return {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "offload": self.offload,
            "memory_budget": self.memory_budget,
            "offload_folder": self.offload_folder,
            "device": self.device,
            **{name: getattr(self, name) for name in _RANKS if name != "node_rank"},
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory_bytes": parse_bytes(self.kv_cache_memory_bytes),
            "enable_prefix_caching": self.enable_prefix_caching,
            "enforce_eager": self.enforce_eager,
            "seed": self.seed,
            "step_log": self.step_log,
            **self._speculation(),
        }

    def _speculation(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"tree": self.tree, "verification": self.verification, "drawing": self.drawing}
        plain |= {"drafter_quantization": self.drafter_quantization, "select": self.select}
        plain["scheduler"] = self.scheduler
        if self.drafter:
            plain["drafters"] = parse_drafters(self.drafter)
        plain = {name: value for name, value in plain.items() if value is not None}
        if self.speculative_config is None:
            return plain
        config = parse_speculative_config(self.speculative_config)
        if both := sorted(plain.keys() & config.keys()):
            flag = f"--{both[0].removesuffix('s').replace('_', '-')}"
            raise ValueError(f"speculative_config: it and {flag} both choose {both[0]}; leave one out")
        return plain | config


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters, stop conditions and constraints."""

    max_tokens: Annotated[
        int | None,
        flag("Sampling", "Tokens to make at most; else 128 or what the context holds; in chat, all it holds."),
    ] = None
    min_tokens: Annotated[int, flag("Sampling", "No end of text before this many.")] = 0
    temperature: Annotated[float | None, flag("Sampling", "0 is greedy; else 1, or 0.7 for demo-chat.")] = None
    top_p: Annotated[float, flag("Sampling", "Keep the smallest set of tokens this probable together.")] = 1.0
    top_k: Annotated[int, flag("Sampling", "Keep this many most probable tokens; 0 keeps all.")] = 0
    min_p: Annotated[float, flag("Sampling", "Drop tokens below this fraction of the most probable one.")] = 0.0
    presence_penalty: Annotated[float, flag("Sampling", "Against tokens in the output.")] = 0.0
    frequency_penalty: Annotated[float, flag("Sampling", "The same, for each occurrence.")] = 0.0
    repetition_penalty: Annotated[float, flag("Sampling", "Against tokens in prompt or output; 1 is none.")] = 1.0
    logit_bias: Annotated[str | None, flag("Sampling", 'Added to logits: {"TOKEN ID": BIAS, ...}.', metavar="JSON")] = (
        None
    )
    stop: Annotated[list[str] | None, flag("Sampling", "A string that ends the output; may be repeated.")] = None
    stop_token_ids: Annotated[
        str | None, flag("Sampling", "Tokens that end the output, such as 2,5.", metavar="ID,ID")
    ] = None
    ignore_eos: Annotated[bool, flag("Sampling", "Go on after the end-of-text token.", "--ignore-eos")] = False
    bad_words: Annotated[list[str] | None, flag("Sampling", "A string that is not said; may be repeated.")] = None
    allowed_token_ids: Annotated[
        str | None, flag("Sampling", "Only these tokens are said, such as 2,5.", metavar="ID,ID")
    ] = None
    json_schema: Annotated[
        str | None, flag("Sampling", "The output is JSON that fits this schema.", metavar="FILE|JSON")
    ] = None
    json_object: Annotated[bool, flag("Sampling", "The output is any JSON object.", "--json-object")] = False
    regex: Annotated[str | None, flag("Sampling", "The output matches this regular expression.")] = None
    choice: Annotated[list[str] | None, flag("Sampling", "The output is one of these; may be repeated.")] = None
    grammar: Annotated[
        str | None,
        flag("Sampling", "The output is a sentence of this grammar, in Lark's notation.", metavar="FILE|TEXT"),
    ] = None
    prediction: Annotated[
        str | None, flag("Speculation", "What the output is likely to resemble; saves time only.", metavar="FILE|TEXT")
    ] = None

    def params(self, max_tokens: int | None, model: str = "", **more: Any) -> SamplingParams:
        """Return checked parameters; `max_tokens` and the usual temperature of `model` replace missing flags."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.temperature is None:
            settings["temperature"] = usual_temperature(model, SamplingParams().temperature)
        settings["max_tokens"] = max_tokens if self.max_tokens is None else self.max_tokens
        settings["logit_bias"] = {} if self.logit_bias is None else parse_object("logit_bias", self.logit_bias)
        settings["stop"] = self.stop or ()
        settings["stop_token_ids"] = parse_token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            settings["allowed_token_ids"] = parse_token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.prediction is not None:
            settings["prediction"] = read_text("prediction", self.prediction, is_path=is_file_name)
        settings["structured_outputs"] = self._structured_outputs()
        for name in ("json_schema", "json_object", "regex", "choice", "grammar"):
            del settings[name]
        return SamplingParams(**settings, **more)

    def _structured_outputs(self) -> dict[str, Any] | None:
        asked: dict[str, Any] = {"regex": self.regex, "choice": self.choice or None}
        if self.json_schema is not None:
            asked["json"] = read_text("json_schema", self.json_schema, is_path=is_file_path)
        if self.grammar is not None:
            asked["grammar"] = read_text("grammar", self.grammar, is_path=is_file_name)
        if self.json_object:
            asked["json_object"] = True
        asked = {name: value for name, value in asked.items() if value is not None}
        return asked or None

    def fit(self, params: SamplingParams, llm: "LLM", prompt: "Prompt") -> SamplingParams:
        """Return the parameters for one prompt; if --max-tokens was not given, the context limits the output."""
        if self.max_tokens is not None or count_tokens(llm, prompt) + (params.max_tokens or 0) <= llm.max_model_len:
            return params
        return dataclasses.replace(params, max_tokens=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Output in addition to the text."""

    stats: Annotated[
        bool, flag("Output", "Colour text by who guessed it, and print speed and acceptance.", "--stats")
    ] = False
    debug: DEBUG = False

    def screen(self) -> Screen:
        quiet_libraries(debug=self.debug)
        return Screen(stats=self.stats)
