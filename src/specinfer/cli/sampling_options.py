"""Options of sampling, of the end of outputs and of their form."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from specinfer.cli.options import flag
from specinfer.cli.prompts import count_tokens
from specinfer.cli.values import is_file_name, is_file_path, parse_object, parse_token_ids, read_text
from specinfer.core.sampling import SamplingParams
from specinfer.demo.chat_model import usual_temperature

if TYPE_CHECKING:
    from specinfer.inputs.arguments import Prompt
    from specinfer.llm import LLM


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
        flag("Sampling", "Generate text of this grammar, in Lark's notation or GBNF.", metavar="FILE|TEXT"),
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
        bias = self.logit_bias
        settings["logit_bias"] = {} if bias is None else parse_object("logit_bias", bias, '{"5": -100}')
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

    def fit(self, params: SamplingParams, llm: "LLM", prompt: "Prompt", *, limited: bool = False) -> SamplingParams:
        """Return the parameters for one prompt; if no maximum was given, the context limits the output.

        Args:
            limited: Whether the prompt has its own maximum.
        """
        if (
            limited
            or self.max_tokens is not None
            or count_tokens(llm, prompt) + (params.max_tokens or 0) <= llm.max_model_len
        ):
            return params
        return dataclasses.replace(params, max_tokens=None)
