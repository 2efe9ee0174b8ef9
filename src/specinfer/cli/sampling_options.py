"""Options of sampling, of the end of outputs and of their form."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specinfer.cli.values import is_file_name, is_file_path, parse_object, parse_token_ids, text_or_file
from specinfer.core.config import SPECULATION
from specinfer.core.options import setting
from specinfer.core.sampling import SamplingParams
from specinfer.demo.chat_model import usual_temperature

if TYPE_CHECKING:
    from specinfer.inputs.arguments import Prompt
    from specinfer.llm import LLM


_SAMPLING = "Sampling"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters, stop conditions and constraints."""

    max_tokens: int | None = setting(
        None,
        _SAMPLING,
        "Maximum number of tokens to generate. (default: 128 within the context length; in chat, the context length)",
    )
    min_tokens: int = setting(0, _SAMPLING, "Minimum number of tokens to generate.")
    temperature: float | None = setting(None, _SAMPLING, "Temperature; 0 is greedy. (default: 1, or 0.7 for demo-chat)")
    top_p: float = setting(1.0, _SAMPLING, "Sample from the smallest set of tokens with this cumulative probability.")
    top_k: int = setting(0, _SAMPLING, "Sample from this number of most probable tokens; 0 means all.")
    min_p: float = setting(0.0, _SAMPLING, "Minimum probability of a token, relative to the most probable one.")
    presence_penalty: float = setting(0.0, _SAMPLING, "Penalty for tokens that occur in the output.")
    frequency_penalty: float = setting(
        0.0, _SAMPLING, "Penalty for tokens by the number of their occurrences in the output."
    )
    repetition_penalty: float = setting(
        1.0, _SAMPLING, "Penalty for tokens that occur in the prompt or the output; 1 means none."
    )
    logit_bias: str | None = setting(
        None, _SAMPLING, 'Biases to add to logits: {"TOKEN ID": BIAS, ...}.', metavar="JSON"
    )
    stop: tuple[str, ...] = setting((), _SAMPLING, "String that ends the output. May be repeated.")
    stop_token_ids: str | None = setting(None, _SAMPLING, "Tokens that end the output, such as 2,5.", metavar="ID,ID")
    ignore_eos: bool = setting(False, _SAMPLING, "Continue after the end-of-sequence token.")
    bad_words: tuple[str, ...] = setting((), _SAMPLING, "String that must not be generated. May be repeated.")
    allowed_token_ids: str | None = setting(
        None, _SAMPLING, "Generate only these tokens, such as 2,5.", metavar="ID,ID"
    )
    json_schema: str | None = setting(None, _SAMPLING, "Generate JSON that follows this schema.", metavar="FILE|JSON")
    json_object: bool = setting(False, _SAMPLING, "Generate a JSON object.")
    regex: str | None = setting(None, _SAMPLING, "Generate text that matches this regular expression.")
    choice: tuple[str, ...] = setting((), _SAMPLING, "Generate one of these strings. May be repeated.")
    grammar: str | None = setting(
        None, _SAMPLING, "Generate text of this grammar, in Lark's notation or GBNF.", metavar="FILE|TEXT"
    )
    prediction: str | None = setting(
        None,
        SPECULATION,
        "Text that the output is likely to resemble. Affects the speed only.",
        metavar="FILE|TEXT",
    )

    def params(self, max_tokens: int | None, model: str = "", **more: Any) -> SamplingParams:
        """Return checked parameters; `max_tokens` and the usual temperature of `model` replace missing flags."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.temperature is None:
            settings["temperature"] = usual_temperature(model, SamplingParams().temperature)
        settings["max_tokens"] = max_tokens if self.max_tokens is None else self.max_tokens
        bias = self.logit_bias
        settings["logit_bias"] = {} if bias is None else parse_object("logit_bias", bias, '{"5": -100}')
        settings["stop_token_ids"] = parse_token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            settings["allowed_token_ids"] = parse_token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.prediction is not None:
            settings["prediction"] = text_or_file("prediction", self.prediction, is_path=is_file_name)
        settings["structured_outputs"] = self._structured_outputs()
        for name in ("json_schema", "json_object", "regex", "choice", "grammar"):
            del settings[name]
        return SamplingParams(**settings, **more)

    def _structured_outputs(self) -> dict[str, Any] | None:
        asked: dict[str, Any] = {"regex": self.regex, "choice": self.choice or None}
        if self.json_schema is not None:
            asked["json"] = text_or_file("json_schema", self.json_schema, is_path=is_file_path)
        if self.grammar is not None:
            asked["grammar"] = text_or_file("grammar", self.grammar, is_path=is_file_name)
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
            or _count_tokens(llm, prompt) + (params.max_tokens or 0) <= llm.max_model_len
        ):
            return params
        return dataclasses.replace(params, max_tokens=None)


def _count_tokens(llm: "LLM", prompt: "Prompt") -> int:
    """Return the prompt's length in tokens, or 0 for a prompt that the model will refuse."""
    if isinstance(prompt, Mapping):
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt", ())
    try:
        return len(llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    except (AttributeError, TypeError, UnicodeError):  # no tokenizer, or neither a list nor valid text
        return 0
