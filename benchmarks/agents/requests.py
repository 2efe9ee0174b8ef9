"""Requests of agent work, one JSON object a line in a file for each kind, read as the server reads them.

They were written for measurements; nothing is trained on them. A request has the fields that programs send:
messages, response_format, tools, tool_choice, n, and a temperature where several answers are wanted.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from specinfer.bench.options import CompareConfig
from specinfer.bench.prompts import ChatRequest, PromptSet, token_prompts
from specinfer.core.errors import RequestError
from specinfer.core.sampling import MAX_SEED
from specinfer.inputs.chat.samples import taken_in_turn
from specinfer.inputs.prompts import PromptReader
from specinfer.model.definition import known_positions, load_config, load_tokenizer
from specinfer.server.conversations import read_chat
from specinfer.server.protocol import ChatFields

AGENT_KINDS = ("extraction", "calls", "edits", "quotes", "samples")
AGENTS = "agents"  # stands for all of them
_NO_LIMIT = 2**31
# Engines have other defaults for these.
_ALL_TOKENS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@cache
def agent_requests() -> dict[str, tuple[dict[str, Any], ...]]:
    """Return all requests by kind."""
    files = {kind: Path(__file__).with_name(f"{kind}.jsonl") for kind in AGENT_KINDS}
    return {kind: tuple(map(json.loads, file.read_text("utf-8").splitlines())) for kind, file in files.items()}


def agent_prompts(folder: Path, config: CompareConfig) -> PromptSet:
    """Return requests of the measured kinds in turn for the model in `folder`.

    Raises:
        ValueError: There are too few requests, they do not fit into the context, or the model has no chat template.
    """
    kinds = AGENT_KINDS if config.kinds is None or AGENTS in config.kinds else config.kinds
    chosen = taken_in_turn(agent_requests(), kinds, config.num_prompts)
    tokenizer, positions = load_tokenizer(folder), known_positions(folder) or _NO_LIMIT
    reader = PromptReader(tokenizer, load_config(folder).get_text_config().vocab_size, positions, ())
    token_ids, requests = [], []
    for number, (_, given) in enumerate(chosen):
        body = request_body(given, config, number)
        try:
            read = read_chat(reader, {}, ChatFields.model_validate(body))
        except RequestError as error:
            raise ValueError(f"kinds: {folder} cannot be given chat requests: {error}") from error
        token_ids.append(read.ids)
        requests.append(ChatRequest(body, read.params, read.plan.reasoning))
    token_prompts(folder, config.max_tokens, prompts=[tuple(ids) for ids in token_ids])  # checks that they fit
    return PromptSet(token_ids, tuple(kind for kind, _ in chosen), tuple(requests))


def request_body(given: Mapping[str, Any], config: CompareConfig, number: int) -> dict[str, Any]:
    """Return a request with the fields of the measurement; its own temperature takes precedence."""
    measured = {
        "temperature": config.temperature, "seed": (config.seed + number) & MAX_SEED, "max_tokens": config.max_tokens
    }  # fmt: skip
    return {**_ALL_TOKENS, **measured, **given}
