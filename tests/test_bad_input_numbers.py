"""Numbers that are none, too large or of another kind: each is refused by name, and neighbours do not notice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostile import CHAT, DETOKENIZE, MESSAGES, PROMPT, TEXT, Attack, Attacked
from specinfer import LLM, RequestError
from specinfer.core.sampling import MAX_LOGPROBS
from tiny import save_model, save_tokenizer

pytestmark = pytest.mark.usefixtures("small_demo")
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTS = (
    "n", "best_of", "seed", "priority", "max_tokens", "min_tokens", "top_k", "truncate_prompt_tokens", "logprobs",
    "prompt_logprobs", "stream_interval",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Attacked]:
    with Attacked(LLM("demo", tree="2,2,1")) as attacked:
        yield attacked


def asks(fields: dict[str, Any], names: str = "", status: int | tuple[int, ...] = 400) -> Attack:
    """A completion with these fields; the first names what is wrong unless said otherwise."""
    return Attack(PROMPT | fields, status, names or next(iter(fields)))


def raw(name: str, value: str, path: str = TEXT) -> Attack:
    """A field whose value JSON's writer would not write."""
    text = json.dumps(PROMPT if path == TEXT else MESSAGES)
    return Attack(f"{text[:-1]}, {json.dumps(name)}: {value}}}".encode(), 400, "", path)


# 1: comparisons let what is no number through
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_01_floats_that_are_no_numbers(server: Attacked, value: str) -> None:
    server.beside(
        *(raw(name, value) for name in FLOATS),
        *(raw(name, value, CHAT) for name in FLOATS),
        raw("logit_bias", f'{{"5": {value}}}'),
        raw("seed", value),
        raw("prompt", f"[{value}]"),
        raw("unknown", f"[[{value}]]"),
    )


# 2
def test_02_floats_out_of_range(server: Attacked) -> None:
    wrong: dict[str, tuple[float, ...]] = {
        "temperature": (999999, -1, 1e308), "top_p": (-1, 1.0001), "min_p": (-0.1, 1.1),
        "repetition_penalty": (0, -1, 1e-30), "presence_penalty": (2.1,), "frequency_penalty": (-2.1,),
    }  # fmt: skip
    server.beside(*(asks({name: value}) for name, values in wrong.items() for value in values))


# 2: at the ends of their ranges they work
def test_02_floats_at_the_ends_of_their_ranges(server: Attacked) -> None:
    server.beside(
        asks({"temperature": 100, "top_p": 5e-324}, status=200),
        asks({"temperature": 5e-324, "min_p": 5e-324}, status=200),
        asks({"temperature": 1e-5, "min_p": 1}, status=200),
        asks({"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": 2}, status=200),
        asks({"repetition_penalty": 100, "top_k": 2**63 - 1, "seed": -(2**63)}, status=200),
    )


# 3
def test_03_too_many_outputs(server: Attacked) -> None:
    server.beside(
        *(asks({"n": n}) for n in (10**9, 129, 0, -1)),
        *(asks({"best_of": n}) for n in (10**9, 2, 0)),
        Attack(MESSAGES | {"n": 10**9}, 400, "^n ", CHAT),
        Attack({"prompt": ["a"] * 100, "n": 100}, 400, "outputs are more than"),
    )


# 4
def test_04_biases(server: Attacked) -> None:
    size = server.llm.target.loaded.vocab_size
    keys = [
        str(size),
        str(2**31),
        str(2**63),
        "9" * 5000,
        "-1",
        "a",
        "",
        "1.5",
        "0x1",
        " 1",
        "\u0661\u0662\u0663\u0664",
    ]
    server.beside(
        *(asks({"logit_bias": {key: 1}}) for key in keys),
        asks({"logit_bias": {str(i): 1 for i in range(20_000)}}),
        asks({"logit_bias": [1]}),
        asks({"logit_bias": {"1": "1"}}),
        asks({"logit_bias": {"1": 1e30}}),
        asks({"logit_bias": {"1": True}}),
    )


# 5: the ends that are held back are looked up in the logits
def test_05_ends_out_of_range_with_min_tokens(server: Attacked) -> None:
    size = server.llm.target.loaded.vocab_size
    server.beside(
        *(
            asks({"stop_token_ids": [token], "min_tokens": 2})
            for token in (size, 2**31 - 1, 2**31, 2**63 - 1, -1, -size)
        ),
        asks({"stop_token_ids": [True], "min_tokens": 2}),
        asks({"stop_token_ids": [1] * 100_000}),
        asks({"stop_token_ids": list(range(1024)), "min_tokens": 2}, status=200),
    )


# 6, 7, 12: a model has logits for more tokens than its tokenizer knows
def test_06_tokens_between_tokenizer_and_logits(tmp_path: Path) -> None:
    folder = save_tokenizer(save_model(tmp_path / "wide", vocab_size=128, eos_token_id=1))
    llm = LLM(save_tokenizer(folder), drafters="ngram", tree="2,1")
    with Attacked(llm) as server:
        text = {"prompt": "the other", "max_tokens": 8}
        answers = server.beside(
            Attack(text | {"allowed_token_ids": [100, 127], "logprobs": 3, "return_token_ids": True}, 200),
            Attack(text | {"logit_bias": {"127": 100}, "repetition_penalty": 2, "stop_token_ids": [126]}, 200),
            Attack({"prompt": [100, 127], "max_tokens": 8, "echo": True, "logprobs": 2}, 200),
            Attack(text | {"allowed_token_ids": [128]}, 400, "allowed_token_ids"),
            Attack({"prompt": [128]}, 400, "prompt"),
            Attack({"tokens": [100, 127]}, 200, path=DETOKENIZE),
            Attack({"tokens": [128]}, 400, "tokens", DETOKENIZE),
            Attack(text | {"bad_words": ["the", "e", "zzz\u4e16"], "max_tokens": 20}, 200),
        )
        assert set(answers[0].json()["choices"][0]["token_ids"]) <= {100, 127}


# 6
def test_06_sets_of_allowed_tokens(server: Attacked) -> None:
    size = server.llm.target.loaded.vocab_size
    server.beside(
        *(asks({"allowed_token_ids": ids}) for ids in ([], [size], [-1], [2**63 - 1], [5, size], ["5"], 5)),
        asks({"allowed_token_ids": [5, True]}),
        asks({"allowed_token_ids": [0], "min_tokens": 2}),
        asks({"allowed_token_ids": [5], "logit_bias": {"5": -100}}, status=200),
    )


# 7
def test_07_bad_words(server: Attacked) -> None:
    server.beside(
        *(asks({"bad_words": words}) for words in (["a"] * 257, ["a" * 1025], "a", [5], [None])),
        asks({"bad_words": [" ", "\n", "\U0001f642", "<|endoftext|>", "\x00"], "max_tokens": 20}, status=200),
    )


# 7: where nothing is left to say only this request ends
def test_07_bad_words_that_leave_no_token(server: Attacked) -> None:
    (token,) = server.llm.tokenizer.encode("a")
    server.beside(asks({"bad_words": ["a"], "allowed_token_ids": [token]}, "bad_words"))


# 8
def test_08_log_probabilities(server: Attacked) -> None:
    too_many = MAX_LOGPROBS + 1
    server.beside(
        *(asks({name: n}) for name in ("logprobs", "prompt_logprobs") for n in (-1, -2, too_many, 2048, 2**63 - 1)),
        *(Attack(MESSAGES | {"logprobs": True, "top_logprobs": n}, 400, "top_logprobs", CHAT) for n in (-1, too_many)),
        Attack(MESSAGES | {"top_logprobs": 2}, 400, "top_logprobs", CHAT),
        asks({"logprob_token_ids": list(range(129))}),
        asks({"logprob_token_ids": [2048]}),
        asks({"logprob_token_ids": [-1]}),
        asks({"logprob_token_ids": [3] * 128, "logprobs": MAX_LOGPROBS}, status=200),
        Attack(MESSAGES | {"logprob_token_ids": [3, 3], "logprobs": True, "top_logprobs": 0}, 200, "", CHAT),
    )


# 9
@pytest.mark.parametrize("name", INTS)
def test_09_whole_numbers(server: Attacked, name: str) -> None:
    server.beside(
        *(raw(name, value) for value in ("1" + "0" * 23, "-1" + "0" * 23, "true", '"five"', "1.5", "[5]", "{}")),
        *(raw(name, value, CHAT) for value in ("1" + "0" * 23, '"five"', "[5]") if name != "best_of"),
    )
    ends = (-(2**63), -(2**31), -5, 2**31 - 1, 2**31, 2**63 - 1, 2**63)
    for value in ends:
        answer = server.send(asks({name: value}))
        assert answer.status_code in (200, 400), (value, answer.text)
        good = name == "seed" and -(2**63) <= value < 2**63
        good |= name == "priority" and -(2**31) <= value < 2**31
        good |= name in ("top_k", "max_tokens") and value > 0
        good |= name == "truncate_prompt_tokens" and 0 < value <= 2**31
        assert (answer.status_code == 200) == good, (value, answer.text)


# 10
def test_10_limits_and_stops(server: Attacked) -> None:
    server.beside(
        asks({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        asks({"max_tokens": 0}),
        asks({"max_tokens": -1}),
        Attack(MESSAGES | {"max_tokens": 0}, 400, "max_tokens", CHAT),
        Attack(MESSAGES | {"max_completion_tokens": 0}, 400, "max_tokens", CHAT),
        *(asks({"stop": stop}) for stop in (["a"] * 10_000, "a" * 2**20, ["a" * 2**20], 5, {})),
        *(asks({"stop": stop}, status=200) for stop in ([], "", [""], ["a", ""])),
        asks({"stop": None}, status=200),
    )


def test_the_messages_name_field_and_range(server: Attacked) -> None:
    error = server.send(asks({"temperature": 999999})).json()["error"]
    assert error["param"] == "temperature"
    assert error["message"] == "temperature must be from 0 to 100, not 999999"
    with pytest.raises(RequestError):
        server.llm.generate("a" * 5000)
