"""Whatever is asked of sampling, guesses change nothing: the same answer with speculation on and off, over HTTP."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hostile import CHAT, TEXT, Attack, Attacked
from specinfer import LLM
from specinfer.engine import host_executor
from specinfer.engine.commit import Committer
from specinfer.engine.host_executor import HostExecutor
from specinfer.engine.host_step import HostStep
from specinfer.model.kv_cache import OutOfSlotsError
from tests.server.pressure.soak import agree

pytestmark = pytest.mark.usefixtures("small_demo")
CODE = "def read(self, size):\n    "
TREES = ("2,2,1", "1,1,1,1,1", "auto", "4")
ASKED: dict[str, dict[str, Any]] = {
    # 49
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": -2},
    # 50
    "allowed tokens": {"allowed_token_ids": list(range(100, 400))},
    "one allowed token": {"allowed_token_ids": [300]},
    "allowed tokens and penalties": {"allowed_token_ids": list(range(100, 160)), "frequency_penalty": 2},
    "biases": {"logit_bias": {str(i): (-1) ** i * 5 for i in range(0, 2000, 7)}},
    # 51: nothing that is guessed can be accepted
    "no guess is ever right": {
        "logit_bias": {"1999": 100}, "bad_words": ["x"], "prediction": {"type": "content", "content": "y " * 50},
    },
    # 52: only a distribution or an equality shows a word that was dropped
    "hot": {"temperature": 2.0},
    "truncated": {"temperature": 1.3, "top_p": 0.7, "top_k": 17, "min_p": 0.02},
    # 53
    "several outputs": {"n": 5, "temperature": 1.2},
    "log-probabilities": {"logprobs": 5, "logprob_token_ids": [7, 9], "repetition_penalty": 1.2, "echo": True},
    "prompt log-probabilities": {"prompt_logprobs": 2, "logprobs": 0},
    "a stop string": {"stop": ["e", "zz"], "include_stop_str_in_output": True},
    "a stop string of several tokens": {"stop": ["(self", "return s", "):\n"], "max_tokens": 60},
    "a stop token": {"stop_token_ids": list(range(200, 300))},
    "a late end": {"stop_token_ids": list(range(200, 600)), "min_tokens": 9},
    "one token": {"max_tokens": 1},
    "seven tokens": {"max_tokens": 7},
    "bad words": {"bad_words": ["self", "return", " ", "\n"]},
    "a grammar": {"structured_outputs": {"regex": "[a-z_ ]{5,40}(\\n|;)"}},
    "a grammar that ends inside a path": {"structured_outputs": {"choice": ["self.read(size)", "return", "pass"]}},
    "a right prediction": {
        "temperature": 0, "prediction": {"type": "content", "content": "return self.read(size)\n" * 9},
    },
    "all of it": {
        "n": 2, "temperature": 1.4, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.3, "min_tokens": 3,
        "bad_words": ["the"], "logit_bias": {"300": 3}, "logprobs": 2, "stop": ["\n\n\n"], "echo": True,
        "ignore_eos": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Attacked]:
    with Attacked(LLM("demo", drafters=["demo", "ngram"], tree="2,2,1")) as attacked:
        yield attacked


def choices(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("name", ASKED)
def test_49_to_53_guesses_change_nothing(server: Attacked, name: str) -> None:
    body = {"prompt": CODE, "seed": 11, "temperature": 0.9, "max_tokens": 24, "return_token_ids": True} | ASKED[name]
    plain, *guessed = server.beside(
        *(Attack(body | {"speculative": {"tree": tree}}, 200) for tree in ("off", *TREES)),
    )
    for answer in guessed:
        assert agree(choices(answer), choices(plain), 1e-4, 1e-4)


# 53: up to the very end of the context
def test_53_the_end_of_the_context_inside_a_tree(server: Attacked) -> None:
    limit = server.llm.max_model_len
    for room in (1, 2, 3, 5):
        body = {"prompt": [300, 301, 302, 303] * limit, "truncate_prompt_tokens": limit - room, "ignore_eos": True}
        body |= {"max_tokens": room, "temperature": 0, "return_token_ids": True}
        plain, guessed = server.beside(
            *(Attack(body | {"speculative": {"tree": tree}}, 200) for tree in ("off", "1,1,1,1"))
        )
        assert choices(plain) == choices(guessed)
        assert len(choices(plain)[0]["token_ids"]) == room


# 53: each request has its own way to guess, and there are too few slots for all of them at once
def test_53_requests_that_are_put_back() -> None:
    llm = LLM("demo", drafters=["demo", "ngram"], tree="2,2,1", max_model_len=128, kv_cache_memory_bytes=1 << 16)
    bodies = [
        {"prompt": CODE, "seed": i, "temperature": 0.9, "max_tokens": 60, "ignore_eos": True, "n": 1 + i % 2}
        for i in range(5)
    ]
    with Attacked(llm) as server:
        alone = [choices(server.send(Attack(body | {"speculative": {"tree": "off"}}))) for body in bodies]
        before = llm.engine.metrics.num_preempted
        trees = [body | {"speculative": {"tree": (*TREES, "off")[i % 5]}} for i, body in enumerate(bodies)]
        together = server.beside(*(Attack(body, 200) for body in trees))
        assert [choices(answer) for answer in together] == alone
        assert llm.engine.metrics.num_preempted > before


# 53: between drafting and verifying
@pytest.mark.parametrize("stage", [(HostExecutor, "_draft"), (HostExecutor, "_verify"), (Committer, "store")])
def test_53_clients_that_leave_in_the_middle_of_a_step(
    server: Attacked, stage: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, tasks = getattr(*stage), []

    def leaving(self: Any, *args: Any) -> Any:
        for task in tasks:
            server._loop.call_soon_threadsafe(task.cancel)
        return original(self, *args)

    async def work() -> None:
        for body in ({"stream": True}, {"n": 3}):
            asked = {"prompt": CODE, "max_tokens": 500, "ignore_eos": True} | body
            tasks.append(asyncio.ensure_future(server.client.post(TEXT, json=asked)))
        await server.until(lambda: server.engine.num_running > 4)
        monkeypatch.setattr(*stage, leaving)
        await asyncio.gather(*tasks, return_exceptions=True)

    server.beside_work(work)


# 51: values that are no numbers end only the request they came in
def test_51_values_that_are_no_numbers(server: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    original = host_executor.logits_by_tree

    def spoilt(step: HostStep, logits: torch.Tensor) -> list[torch.Tensor]:
        rows = original(step, logits)
        pairs = zip(step.spans, step.trees, strict=True)
        saying = [span.request for span, tree in pairs if tree is not None and not span.request.is_finished]
        is_bad = [request.params.max_tokens == 77 for request in saying]
        return [torch.full_like(row, torch.nan) if bad else row for row, bad in zip(rows, is_bad, strict=True)]

    monkeypatch.setattr(host_executor, "logits_by_tree", spoilt)
    broken = {"prompt": CODE, "max_tokens": 77, "seed": 1}
    server.beside(Attack(broken, 500, "not numbers"), Attack(broken | {"n": 3, "logprobs": 2}, 500, "not numbers"))
    (answer,) = server.beside(Attack(broken | {"stream": True}, 200))
    assert '"generation_failed"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


# 53: all wait for the largest tree
@pytest.mark.parametrize("tree", ["best-first:1024", "best-first:65", "65", "8,8,2", "1" + ",1" * 64])
def test_53_trees_that_would_hold_up_the_others(server: Attacked, tree: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 2, "speculative": {"tree": tree}}
    server.beside(
        Attack({"prompt": CODE} | fields, 400, r"^speculative\.tree: .*64"),
        Attack({"messages": [{"role": "user", "content": "a"}]} | fields, 400, r"^speculative\.tree: .*64", CHAT),
    )


# 53: and one that is deep: each level is a pass of the drafter
def test_53_a_tree_that_is_too_deep(server: Attacked) -> None:
    deep = {"prompt": CODE, "max_tokens": 2, "speculative": {"tree": ",".join(["1"] * 17)}}
    server.beside(Attack(deep, 400, r"^speculative\.tree: .*17 levels; use at most 16"))


# 53: costs that cannot be measured while others run
def test_53_a_policy_that_fails_costs_guesses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OutOfSlotsError("no room")

    with Attacked(LLM("demo", drafters=["demo"], tree="2,2,1")) as server:
        monkeypatch.setattr("specinfer.setup.drafter_setup.cached_costs", fail)
        server.beside(Attack({"prompt": CODE, "max_tokens": 4, "speculative": {"tree": "auto"}}, 200))


# 53: what names no way to guess
def test_53_ways_to_guess_that_are_none(server: Attacked) -> None:
    trees: list[Any] = ["", "nonsense", "0", "-1", "1,,2", "9" * 200, "1," * 100, "1e9", 5, None, ["2"], "x" * 300]
    for tree in trees:
        answer = server.send(Attack({"prompt": CODE, "max_tokens": 2, "speculative": {"tree": tree}}))
        assert answer.status_code == (200 if tree is None else 400), (tree, answer.text)
        assert tree is None or answer.json()["error"]["message"].startswith("speculative.tree: "), answer.text
    too_large = {"prompt": CODE, "speculative": {"tree": "best-first:65"}}
    server.beside(Attack(too_large, 400, "at most 64"))
    messages = [{"role": "user", "content": "a"}]
    server.beside(
        *(Attack({"prompt": CODE, "speculative": s}, 400, "speculative") for s in (5, [], "off", {"drafters": ["x"]})),
        Attack({"messages": messages, "speculative": {"tree": "99999,99999"}, "max_tokens": 2}, 400, "tree", CHAT),
    )
