"""A target whose output is written beforehand: of a tiny random model, a script replaces the logits.

    with scripted(['<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>', "Done."], drafters="ngram") as llm:
        ...  # an LLM like any other: call it, or serve it with `serving.serve` or `serving.served_on_port`

    PYTHONPATH=tests/support python -m tests.server.scripted_target turns.json --port 8123 --template thinking

The file turns.json is a list of texts, such as ["...", "..."].

Drafters, trees, grammars, samplers and parsers are the real ones. Only the logits of each node of a token tree are made
here: the next token of the script is all but certain wherever the output so far agrees with it, and the end elsewhere.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import talking
from serving import Server
from specinfer import LLM
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree
from specinfer.demo.pair import PACKED
from specinfer.server import process
from specinfer.server.config import ServerConfig
from tests.server.dialects import DIALECTS
from tiny import save_model

# One text for each request, in their order, of which the last repeats; or a text for the text of a prompt.
Turns = Sequence[str] | Callable[[str], str]

THINKING = """{% for message in messages %}{% if loop.first and tools %}<|im_start|>system
{% if message.role == 'system' %}{{ message.content }}

{% endif %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}

</tools> Call them as <tool_call>
{"name": <name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif message.role == 'system' %}<|im_start|>system
{{ message.content }}<|im_end|>
{% endif %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content and loop.index0 + 1 >= loop.length - 1 %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
TEMPLATES = {
    "hermes": talking.HERMES, "thinking": THINKING, "plain": talking.PLAIN, "llama": talking.LLAMA,
    "mistral": talking.MISTRAL, "bare": talking.BARE,
}  # fmt: skip
# Logits of the script's token, and of others where there is none or a grammar forbids it: the output is to end soon.
_CERTAIN, _END, _ENDINGS = 200.0, 100.0, {'"': 60.0, "}": 50.0, "]": 50.0, ":": 40.0, "0": 40.0}


def make_scripted_tokenizer(
    template: str = talking.HERMES,
    special_tokens: Sequence[str] = talking.SPECIAL,
    added_tokens: Sequence[str] = talking.WRITTEN,
    eos: str = talking.EOS,
) -> PreTrainedTokenizerFast:
    """The demo's byte-level BPE with these tokens in addition; those that are not special are shown as text."""
    tokenizer = Tokenizer.from_file(str(PACKED / "target" / "tokenizer.json"))
    special = dict.fromkeys([*special_tokens, eos], True)
    more = special | dict.fromkeys(set(added_tokens) - set(special), False)
    tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False) for text, is_special in more.items()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, clean_up_tokenization_spaces=False, chat_template=template
    )


class Script:
    """The logits of all requests.

    Attributes:
        prompts: The texts of the prompts so far, with their special tokens, in the order in which they were computed.
        texts: The text for each of them.
        request_ids: Its name in the engine, which ends with that of the HTTP request.
    """

    def __init__(self, turns: Turns, tokenizer: PreTrainedTokenizerFast) -> None:
        self.prompts: list[str] = []
        self.texts: list[str] = []
        self.request_ids: list[str] = []
        self._turns, self._tokenizer, self._eos = turns, tokenizer, tokenizer.eos_token_id
        self._usual = {tokenizer.convert_tokens_to_ids(text): value for text, value in _ENDINGS.items()}
        self._usual[tokenizer.eos_token_id] = _END
        self._of: dict[str, int] = {}  # the number of each request, which stays after it was preempted
        self._encode = lru_cache(maxsize=1024)(partial(tokenizer.encode, add_special_tokens=False))

    def logits(self, request: Request, tree: TokenTree, width: int) -> Tensor:
        """Return [nodes, width] logits after each node of the tree."""
        text = self._text_of(request)
        rows = torch.zeros((len(tree), width))
        rows[:, list(self._usual)] = torch.tensor(list(self._usual.values()))
        for node in range(len(tree)):
            rows[node, self._next(text, [*request.output_ids, *tree.path_tokens(node)])] = _CERTAIN
        return rows

    def _next(self, text: str, output: Sequence[int]) -> int:
        ids = self._encode(text)
        if list(output) != ids[: len(output)]:  # a grammar may force other tokens for the same text
            written = self._tokenizer.decode(output)
            ids = [*output, *self._encode(text.removeprefix(written))] if text.startswith(written) else ()
        return ids[len(output)] if len(output) < len(ids) else self._eos

    def _text_of(self, request: Request) -> str:
        if request.request_id not in self._of:
            number = self._of[request.request_id] = len(self.prompts)
            self.request_ids.append(request.request_id)
            self.prompts.append(self._tokenizer.decode(request.prompt_ids))
            turns = self._turns
            self.texts.append(turns(self.prompts[-1]) if callable(turns) else turns[min(number, len(turns) - 1)])
        return self.texts[self._of[request.request_id]]


def follow(llm: LLM, turns: Turns) -> Script:
    """Let a script replace the logits of this target from now on."""
    script, host = Script(turns, llm.tokenizer), llm.engine.host
    outcomes = type(host)._outcomes

    def scripted_outcomes(spans: Sequence[Span], trees: Sequence[TokenTree | None], logits: Sequence[Tensor]) -> Any:
        pairs = zip(spans, trees, strict=True)
        asked = [(span.request, tree) for span, tree in pairs if tree is not None and not span.request.is_finished]
        made = [script.logits(*one, row.shape[1]) for one, row in zip(asked, logits, strict=True)]
        return outcomes(host, spans, trees, made)

    host._outcomes = scripted_outcomes
    return script


@contextmanager
def scripted(
    turns: Turns,
    *,
    template: str = talking.HERMES,
    special_tokens: Sequence[str] = talking.SPECIAL,
    added_tokens: Sequence[str] = talking.WRITTEN,
    eos: str = talking.EOS,
    max_len: int = 65_536,
    **options: Any,
) -> Iterator[LLM]:
    """An `LLM` that generates these texts; its `script` has what it was asked.

    Args:
        turns: Each text may have special tokens in it, and ends with the end of the text.
        template: A chat template, as Jinja text.
        special_tokens: Tokens that are left out of the output's text.
        added_tokens: Tokens that are one token each, and shown as text.
        max_len: Number of tokens of prompt and output together.
        options: Further arguments of `LLM`.
    """
    tokenizer = make_scripted_tokenizer(template, special_tokens, added_tokens, eos)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
        save_model(
            folder, "llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
            max_position_embeddings=max_len, **sizes,
        )  # fmt: skip
        tokenizer.save_pretrained(folder)
        with LLM(folder, **({"drafters": []} | options)) as llm:
            llm.script = follow(llm, turns)
            yield llm


class Talk:
    """A client of one API, and the prompts that its requests become.

    Args:
        body: Fields of all requests.
    """

    def __init__(self, server: Server, path: str, **body: Any) -> None:
        self.server, self.llm, self._path, self._body = server, server.llm, path, body

    def post(self, **fields: Any) -> httpx.Response:
        return self.server.post(self._path, {**self._body, **fields})

    def prompt(self, **fields: Any) -> str:
        """The prompt of a request, which is served."""
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        return str(self.llm.script.prompts[-1])


@contextmanager
def talking_to(
    path: str, turns: Turns, body: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> Iterator[Talk]:
    """A client of one API of a server whose answers are these texts."""
    with scripted(turns, **options) as llm, Server(llm) as server:
        yield Talk(server, path, **{"model": "tiny", **DIALECTS[path].body(), **body})


def main(words: Sequence[str] | None = None) -> None:
    """Serve the texts of a JSON file in a process of its own, with the real server's process."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("turns", type=Path, help="JSON list of texts")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--template", default="hermes", help=f"{', '.join(TEMPLATES)}, or a file")
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--name", default="scripted")
    parser.add_argument("--max-len", type=int, default=65_536)
    given = parser.parse_args(words)
    template = TEMPLATES.get(given.template) or Path(given.template).read_text(encoding="utf-8")
    turns = json.loads(given.turns.read_text(encoding="utf-8"))
    with scripted(turns, template=template, max_len=given.max_len, drafters=given.drafter) as llm:
        config = ServerConfig(port=given.port)
        service = process.Service(lambda: llm, given.name, (given.name,), config, process.QueueLimits())
        raise SystemExit(process.run(service))


if __name__ == "__main__":
    main()
