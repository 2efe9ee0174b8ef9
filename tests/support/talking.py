"""Tiny models that can say any byte, with chat templates like those of models that were taught to call tools."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tiny import save_model

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
WRITTEN = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # tokens that are not special
EOS = "<|im_end|>"

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)

HERMES = """{% if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}

</tools> Say <tool_call>
{"name": <name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'user' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """{% for message in messages %}{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}
{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{% set call = message.tool_calls[0].function %}assistant: {{ '{"name": "' + call.name + '", ' }}
{{ '"parameters": ' }}{{ call.arguments | tojson }}}<|end|>
{% else %}{{ message.role }}: {{ message.content }}{% if loop.first and tools %} {{ tools | tojson }}{% endif %}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

MISTRAL = """{% for message in messages %}{% if message.role == 'system' %}
{{ raise_exception('no system') }}{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}
{% if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]<|end|>
{% else %}{{ message.role }}: {{ message.content }}{% endif %}{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}"""

BARE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}"""


def make_talker(chat_template: str | None = None, normalized: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, with control tokens; those in `normalized` are sought in lower case."""
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=text in SPECIAL, normalized=text in normalized) for text in (*SPECIAL, *WRITTEN)]
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False, chat_template=chat_template
    )
    made.add_tokens(added)
    return made


def save_talker(folder: Path, chat_template: str | None, seed: int = 0, max_len: int = 4096) -> Path:
    """A random model that speaks through such a tokenizer."""
    tokenizer = make_talker(chat_template)
    end = tokenizer.convert_tokens_to_ids(EOS)
    save_model(folder, "llama", seed, vocab_size=len(tokenizer), eos_token_id=end, max_position_embeddings=max_len)
    tokenizer.save_pretrained(folder)
    return folder
