"""Write chat prompts for tuning a drafter to a chat model: user turns that the model makes up itself.

A chat model that is given the beginning of a user's turn writes such a turn (Magpie, Xu et al., arXiv 2406.08464). Some
turns begin with a few words of ours, so that every kind of task occurs; others carry a passage of Python's own
documentation (PSF licence) to be rewritten, shortened or explained.

    python tools/chat_prompts.py MODEL --num 6144 --out prompts.jsonl
"""

import argparse
import inspect
import json
import random
import re
import sys
from pydoc_data.topics import topics
from typing import Any

from specinfer import LLM, SamplingParams

_MARK = "\x00"  # where the user's turn stands in a rendered chat
# Words that a user's turn begins with, and how often each set is used.
_BEGINNINGS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (8, ("",)),
    (3, ("What", "How", "Why", "Who", "When", "Can you explain", "What is the difference between")),
    (2, ("Write a Python function that", "Write a function", "How do I write code", "Write a SQL query", "Fix this:")),
    (2, ("List", "Give me a list of", "Name five", "Make a shopping list", "Give me ten ideas for")),
    (2, ("Write a short story about", "Tell me a story about", "Write a poem about", "Continue this story:")),
    (3, ("Rewrite the following text:", "Correct the grammar of this text:", "Summarize the following text:",
         "Make this email more friendly:", "Translate this into simple English:")),
    (1, ("Write an email to", "Help me plan", "Give me advice on")),
)  # fmt: skip
_TASKS = (
    "Rewrite the following text in simpler words:\n\n{}",
    "Summarize this in two sentences:\n\n{}",
    "Correct any mistakes in this text and return all of it:\n\n{}",
    "{}\n\nRewrite the text above as a list of points.",
    "Repeat the following text, but put it into the past tense:\n\n{}",
    "Explain this to a beginner:\n\n{}",
)
_CODE_TASKS = (
    "Explain what this code does:\n\n```python\n{}```",
    "Add comments to this function:\n\n```python\n{}```",
    "Rename the variables of this function so that they are easier to read:\n\n```python\n{}```",
)
_PASSAGE = range(250, 1200)  # characters


def beginnings(tokenizer: Any, count: int, seed: int) -> tuple[str, list[str]]:
    """Return the text of a chat before the user's turn, and words that turns begin with."""
    chat = [{"role": "user", "content": _MARK}]
    template = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    choose = random.Random(seed)
    sets = choose.choices([words for _, words in _BEGINNINGS], [weight for weight, _ in _BEGINNINGS], k=count)
    return template[: template.index(_MARK)], [choose.choice(words) for words in sets]


def is_turn(text: str) -> bool:
    """Return whether a text is long enough for a turn."""
    return len(text) > 12


def made_up(llm: LLM, count: int, seed: int) -> list[str]:
    """User turns written by the model itself; turns that did not end, or are very short, are left out."""
    before, first_words = beginnings(llm.tokenizer, count, seed)
    params = [SamplingParams(temperature=0.9, max_tokens=160, seed=seed + i) for i in range(count)]
    turns = []
    for start in range(0, count, 512):
        part = slice(start, start + 512)
        outputs = llm.generate([before + words for words in first_words[part]], params[part])
        for words, output in zip(first_words[part], outputs, strict=True):
            answer = output.outputs[0]
            turn = (words + answer.text).strip()
            if answer.finish_reason == "stop" and is_turn(turn):
                turns.append(turn)
        print(f"{min(start + 512, count)} of {count}: {len(turns)} kept", file=sys.stderr)
    return turns


def passages(count: int, seed: int) -> list[str]:
    """Tasks on passages of Python's documentation and on functions of its library."""
    choose = random.Random(seed)
    paragraphs = [
        re.sub(r"\s+", " ", paragraph).strip()
        for _, topic in sorted(topics.items())
        for paragraph in re.split(r"\n\s*\n", topic)
    ]
    texts = [text for text in paragraphs if len(text) in _PASSAGE and text.count("*") < 6 and "::" not in text]
    modules = [
        __import__(name) for name in ("textwrap", "heapq", "bisect", "shutil", "statistics", "fnmatch", "random")
    ]
    functions = [
        inspect.getsource(found)
        for module in modules
        for _, found in inspect.getmembers(module, inspect.isfunction)
        if found.__module__ == module.__name__
    ]
    code = [text for text in functions if len(text) in _PASSAGE]
    num_code = min(count // 5, len(code) * len(_CODE_TASKS))
    made = [choose.choice(_TASKS).format(choose.choice(texts)) for _ in range(count - num_code)]
    return made + [choose.choice(_CODE_TASKS).format(choose.choice(code)) for _ in range(num_code)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a chat model: folder, GGUF file or hub name")
    parser.add_argument("--num", type=int, default=6144, help="turns that the model is asked for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, help="JSON lines of chats")
    options = parser.parse_args()
    llm = LLM(options.model, tree="off", quantization="int8", max_num_seqs=64, max_model_len=1024)
    turns = made_up(llm, options.num, options.seed) + passages(options.num // 8, options.seed)
    unique = list(dict.fromkeys(turns))
    random.Random(options.seed).shuffle(unique)
    with open(options.out, "w", encoding="utf-8") as file:
        for turn in unique:
            file.write(json.dumps({"messages": [{"role": "user", "content": turn}]}) + "\n")
    print(f"{len(unique)} prompts in {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
