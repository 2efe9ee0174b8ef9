"""The demo pair's tokenizer: byte-level BPE with 2048 entries, split the way code is written.

A small vocabulary keeps the output layer cheap and the tokens easy to predict. A line break and the indentation after
it are one token.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
# Line breaks with the indentation that follows; other runs of spaces; words with the dot,
# underscore or space before them; numbers; runs of punctuation; any other blank.
_PIECE = r"\n+ *| {2,}|[ ._]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s"
# A message becomes comment lines, as in the corpus.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '# ' + message['role'] + ': ' + message['content'] | replace('\\n', '\\n# ') + '\\n' }}"
    "{% endfor %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write an ordinary Hugging Face fast tokenizer folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
