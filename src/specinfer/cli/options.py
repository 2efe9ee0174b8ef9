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
from specinfer.core.config import EngineConfig
from specinfer.core.flags import current_names
from specinfer.core.lookups import LOOKUPS, quoted_lookups
from specinfer.core.parallel_config import find_place
from specinfer.core.sampling import SamplingParams
from specinfer.demo.chat_model import default_model, usual_temperature
from specinfer.engine_args import EngineArgs

if TYPE_CHECKING:
    from specinfer.inputs.prompts import Prompt
    from specinfer.llm import LLM

_LIMITS = EngineConfig()
_RANKS = (
    "tensor_parallel_size", "pipeline_parallel_size", "nnodes", "node_rank", "master_addr", "master_port",
    "drafter_placement",
)  # fmt: skip


def flag(panel: str, help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


MODEL = Annotated[str | None, flag("Model", "Name of the model; the same as MODEL.", "--model", metavar="NAME")]
ARGUMENT = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a GGUF file, a Hugging Face model ID, demo or demo-chat. (default: demo-chat)",
        show_default=False,
    ),
]
DEBUG = Annotated[bool, flag("Output", "Show log messages, messages of libraries and tracebacks.", "--debug")]
# Options of the commands that measure:
GROW = Annotated[
    str | None,
    flag(
        "Model",
        "Grow the target to this number of parameters, such as 1b. Llama models only.",
        "--grow",
        metavar="SIZE",
    ),
]
DRAFTERS = Annotated[
    list[str] | None, flag("Model", "Drafter, as in generate. May be repeated.", "--drafter", metavar="NAME")
]
DTYPE = Annotated[str, flag("Model", "Data type of the weights: auto, float32, bfloat16 or float16.", "--dtype")]
QUANTIZATION = Annotated[
    str | None,
    flag("Model", "Quantize the linear layers of the target to int8, int4 or fp8.", "--quantization"),
]
DRAFTER_QUANTIZATION = Annotated[
    str | None,
    flag("Speculation", "Quantize the linear layers of draft models to int8, int4 or fp8.", "--drafter-quantization"),
]
OFFLOAD = Annotated[
    str | None,
    flag(
        "Model",
        "Where to keep layers of the target that do not fit into memory: disk (read for every pass) or cpu (host "
        "memory, for a target on a GPU).",
        "--offload",
    ),
]
MEMORY_BUDGET = Annotated[
    str | None,
    flag(
        "Model",
        "Memory limit of the whole process with --offload, such as 4GiB. (default: 80 % of free memory)",
        "--memory-budget",
        metavar="SIZE",
    ),
]
OFFLOAD_FOLDER = Annotated[
    str | None,
    flag(
        "Model",
        "Folder for a packed copy of the offloaded layers. Required for quantized layers.",
        "--offload-folder",
        metavar="DIR",
    ),
]
SELECT = Annotated[
    str | None,
    flag(
        "Speculation",
        "Draft models to use for each request: all, or hedge:N for the N (default 2) that predict its text best.",
        "--select",
    ),
]
SCHEDULER = Annotated[
    str | None,
    flag(
        "Speculation",
        "Learned speculation policy for --tree auto, made by specinfer tune --policy.",
        "--scheduler",
        metavar="FILE",
    ),
]
DEVICE = Annotated[str, flag("Model", "Device of the models: auto, cpu, cuda, ...", "--device")]
TENSOR_PARALLEL_SIZE = Annotated[
    int, flag("Ranks", "Number of tensor parallel processes.", "--tensor-parallel-size", "-tp")
]
PIPELINE_PARALLEL_SIZE = Annotated[
    int, flag("Ranks", "Number of pipeline parallel stages.", "--pipeline-parallel-size", "-pp")
]
SEED = Annotated[int, flag("Sampling", "Random seed of sampled text.", "--seed")]
JSON = Annotated[str | None, flag("Output", "Write the results to this JSON file.", "--json", metavar="FILE")]
PLOT = Annotated[
    str | None, flag("Output", "Plot the results to this file: .png, .svg or .pdf.", "--plot", metavar="FILE")
]


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
    dtype: Annotated[
        str, flag("Model", "Data type of the weights: auto (as in the checkpoint), float32, bfloat16 or float16.")
    ] = "auto"
    quantization: QUANTIZATION = None
    offload: OFFLOAD = None
    memory_budget: MEMORY_BUDGET = None
    offload_folder: OFFLOAD_FOLDER = None
    device: Annotated[str, flag("Model", "Device of the models: auto, cpu, cuda, cuda:1, ...")] = "auto"
    tensor_parallel_size: TENSOR_PARALLEL_SIZE = 1
    pipeline_parallel_size: PIPELINE_PARALLEL_SIZE = 1
    nnodes: Annotated[int, flag("Ranks", "Number of nodes. Start the same command on each.")] = 1
    node_rank: Annotated[int, flag("Ranks", "Rank of this node, from 0. Node 0 runs the engine.")] = 0
    master_addr: Annotated[
        str | None, flag("Ranks", "Address of node 0, reachable from all nodes.", metavar="HOST")
    ] = None
    master_port: Annotated[
        int | None, flag("Ranks", "Port of node 0 for the rendezvous of ranks. (default: 29500)")
    ] = None
    drafter_placement: Annotated[
        str,
        flag(
            "Ranks",
            "Ranks that run draft models: first (all on the rank of the engine), spread (in parallel, one after the "
            "other on each rank), or auto (spread on a single node with two CPUs per rank).",
        ),
    ] = "auto"
    max_model_len: Annotated[int | None, flag("Model", "Maximum length of prompt and output together, in tokens.")] = (
        None
    )
    max_num_seqs: Annotated[int, flag("Model", "Maximum number of requests in a batch.")] = _LIMITS.max_num_seqs
    max_num_batched_tokens: Annotated[
        int | None, flag("Model", "Maximum number of prompt tokens in a step. (default: 512, or 1024 with --offload)")
    ] = None
    kv_cache_memory_bytes: Annotated[
        str | None, flag("Model", "Size of the KV caches of all models, such as 512M or 1G.", metavar="SIZE")
    ] = None
    enable_prefix_caching: Annotated[bool, flag("Model", "Reuse the KV cache of common prefixes of prompts.")] = True
    enforce_eager: Annotated[
        bool,
        flag("Model", "Do not capture CUDA graphs.", "--enforce-eager"),
    ] = False
    seed: Annotated[int, flag("Model", "Random seed of requests that have none of their own.")] = _LIMITS.seed
    drafter: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            f"A folder, a GGUF file, a Hugging Face model ID, {', '.join(LOOKUPS)}, demo, demo-2, demo-3, or none. May "
            "be repeated.",
            metavar="NAME",
        ),
    ] = None
    drafter_quantization: DRAFTER_QUANTIZATION = None
    tree: Annotated[
        str | None,
        flag(
            "Speculation",
            "Token tree: auto (by measured costs), off, children per level such as 1,1,3,1, or best-first:32.",
        ),
    ] = None
    verification: Annotated[
        str | None,
        flag(
            "Speculation",
            "Verification rule. coupled and target-only generate the tokens of plain decoding with the same seed; "
            "multi-step and traversal generate tokens of the same distribution.",
        ),
    ] = None
    drawing: Annotated[
        str | None,
        flag(
            "Speculation",
            "Sampling of draft tokens: auto (by the verification rule), shared-noise, top-k, without-replacement, "
            "iid or hybrid.",
        ),
    ] = None
    select: SELECT = None
    scheduler: SCHEDULER = None
    step_log: Annotated[
        str | None,
        flag(
            "Speculation",
            "Record the features and the outcome of each step here, to train a speculation policy.",
            metavar="FILE",
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        flag(
            "Speculation",
            'As in vLLM: {"method": "draft_model", "model": NAME, "num_speculative_tokens": 4}; '
            f'or "method": {quoted_lookups("or")}, "quantization", "tree", "verification", "drawing", "select", '
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
        with loading_bar(screen.err, f"loading {model} ...") as progress:
            from specinfer.llm import LLM

            llm = LLM(model, **settings, progress=progress)
        screen.watch(llm)
        return llm

    def follow(self, model: str, settings: dict[str, Any]) -> None:
        """Run this machine's ranks and then exit, if the engine is in another process; otherwise do nothing.

        Raises:
            ValueError: The sizes or addresses cannot be used.
        """
        args = EngineArgs(model, **(settings | {"node_rank": self.node_rank}))
        if args.parallel_config.world_size == 1 or find_place(args.parallel_config).rank == 0:
            return
        from specinfer.setup.follower import follow

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ranks wait in native code; Python's handler would not run
        raise typer.Exit(follow(args))

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
        plain: dict[str, Any] = {"tree": self.tree, "verification": self.verification, "draft_sampling": self.drawing}
        plain |= {"drafter_quantization": self.drafter_quantization, "select": self.select}
        plain["speculation_policy"] = self.scheduler
        if self.drafter:
            plain["drafters"] = parse_drafters(self.drafter)
        plain = {name: value for name, value in plain.items() if value is not None}
        if self.speculative_config is None:
            return plain
        config = parse_speculative_config(self.speculative_config)
        if both := sorted(plain.keys() & config.keys()):
            flag = f"--{both[0].removesuffix('s').replace('_', '-')}"
            raise ValueError(f"speculative_config: it and {flag} both choose {both[0]}; leave one out")
        return plain | current_names(EngineArgs, config)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters, stop conditions and constraints."""

    max_tokens: Annotated[
        int | None,
        flag(
            "Sampling",
            "Maximum number of tokens to generate. (default: 128 within the context length; in chat, the context "
            "length)",
        ),
    ] = None
    min_tokens: Annotated[int, flag("Sampling", "Minimum number of tokens to generate.")] = 0
    temperature: Annotated[
        float | None, flag("Sampling", "Temperature; 0 is greedy. (default: 1, or 0.7 for demo-chat)")
    ] = None
    top_p: Annotated[
        float, flag("Sampling", "Sample from the smallest set of tokens with this cumulative probability.")
    ] = 1.0
    top_k: Annotated[int, flag("Sampling", "Sample from this number of most probable tokens; 0 means all.")] = 0
    min_p: Annotated[float, flag("Sampling", "Minimum probability of a token, relative to the most probable one.")] = (
        0.0
    )
    presence_penalty: Annotated[float, flag("Sampling", "Penalty for tokens that occur in the output.")] = 0.0
    frequency_penalty: Annotated[
        float, flag("Sampling", "Penalty for tokens by the number of their occurrences in the output.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, flag("Sampling", "Penalty for tokens that occur in the prompt or the output; 1 means none.")
    ] = 1.0
    logit_bias: Annotated[
        str | None, flag("Sampling", 'Biases to add to logits: {"TOKEN ID": BIAS, ...}.', metavar="JSON")
    ] = None
    stop: Annotated[list[str] | None, flag("Sampling", "String that ends the output. May be repeated.")] = None
    stop_token_ids: Annotated[
        str | None, flag("Sampling", "Tokens that end the output, such as 2,5.", metavar="ID,ID")
    ] = None
    ignore_eos: Annotated[bool, flag("Sampling", "Continue after the end-of-sequence token.", "--ignore-eos")] = False
    bad_words: Annotated[list[str] | None, flag("Sampling", "String that must not be generated. May be repeated.")] = (
        None
    )
    allowed_token_ids: Annotated[
        str | None, flag("Sampling", "Generate only these tokens, such as 2,5.", metavar="ID,ID")
    ] = None
    json_schema: Annotated[
        str | None, flag("Sampling", "Generate JSON that follows this schema.", metavar="FILE|JSON")
    ] = None
    json_object: Annotated[bool, flag("Sampling", "Generate a JSON object.", "--json-object")] = False
    regex: Annotated[str | None, flag("Sampling", "Generate text that matches this regular expression.")] = None
    choice: Annotated[list[str] | None, flag("Sampling", "Generate one of these strings. May be repeated.")] = None
    grammar: Annotated[
        str | None,
        flag("Sampling", "Generate text of this grammar, in Lark notation.", metavar="FILE|TEXT"),
    ] = None
    prediction: Annotated[
        str | None,
        flag("Speculation", "Text that the output is likely to resemble. Affects the speed only.", metavar="FILE|TEXT"),
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
        bool, flag("Output", "Color each token by its drafter, and print speed and acceptance statistics.", "--stats")
    ] = False
    debug: DEBUG = False

    def screen(self) -> Screen:
        quiet_libraries(debug=self.debug)
        return Screen(stats=self.stats)
