"""/v1/completions: what comes out is what `LLM.generate` says, whole, streamed, echoed, with log-probabilities."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from serving import Server, choices_of, events_of, post, serve, slow_steps
from specinfer import LLM, QueueLimits, SamplingParams
from specinfer.core.logprob import Logprob
from specinfer.core.outputs import CompletionOutput, TextChunk
from specinfer.core.speculation import StepTrace, TracedNode
from specinfer.server.field_checks import IGNORED_HEADER
from specinfer.server.generations import finish_all
from specinfer.server.logprobs import TokenTexts
from specinfer.server.state import ServerState
from tests.server.pressure.soak import agree
from tiny import save_model, save_tokenizer

TEXT_PATH = "/v1/completions"
TEXT = "the other one and that is the thing of it"
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path]) -> LLM:
    """A target that says ends of text now and then, with a drafter that is often right."""
    drafter = model_folder("llama", noise=0.1, tokenizer=True, eos_token_id=1)
    return LLM(model_folder("llama", tokenizer=True, eos_token_id=1), drafters=[str(drafter)], tree="2,2,1")


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


def test_whole_and_streamed_text_are_the_output_of_generate(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=40, temperature=0.8, n=2)
    said = [output.text for output in llm.generate(TEXT, params)[0].outputs]
    body = {"prompt": TEXT, "seed": 3, "max_tokens": 40, "temperature": 0.8, "n": 2}
    whole, stream, plain = post(llm, TEXT_PATH, body, body | {"stream": True}, body | {"speculative": {"tree": "off"}})
    assert [choice["text"] for choice in choices_of(whole)] == said
    assert [choice["text"] for choice in choices_of(plain)] == said
    events = events_of(stream.text)
    assert [joined(events, i) for i in range(2)] == said
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert len(events) < 80  # several tokens come in one event
    for index in range(2):
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["index"] == index]
        assert set(reasons[:-1]) <= {None}
        assert reasons[-1] == choices_of(whole)[index]["finish_reason"]


def test_prompts_are_text_ids_or_several(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    base = {"temperature": 0, "max_tokens": 5}
    answers = post(
        llm, TEXT_PATH, *({"prompt": p} | base for p in (TEXT, ids, [TEXT], [ids], [TEXT, "a"], [ids, ids[:3]]))
    )
    texts = [[choice["text"] for choice in choices_of(answer)] for answer in answers]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert texts[4][0] == texts[5][0] == texts[0][0]
    assert len(texts[4]) == len(texts[5]) == 2
    assert answers[4].json()["usage"]["prompt_tokens"] == len(ids) + 1


def test_each_prompt_has_n_outputs_numbered_through(llm: LLM) -> None:
    body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 6, "seed": 1}
    whole, stream = post(llm, TEXT_PATH, body, body | {"stream": True})
    assert [choice["index"] for choice in choices_of(whole)] == list(range(6))
    events = events_of(stream.text)
    assert [joined(events, i) for i in range(6)] == [choice["text"] for choice in choices_of(whole)]


def test_echo_and_logprobs_as_measuring_tools_ask_for_them(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    known = llm.generate({"prompt_token_ids": ids}, SamplingParams(prompt_logprobs=1, max_tokens=1))[0].prompt_logprobs
    assert known is not None
    body = {"prompt": TEXT, "echo": True, "logprobs": 1, "temperature": 0}
    only, one, stream = post(
        llm, TEXT_PATH, body | {"max_tokens": 0}, body | {"max_tokens": 1}, body | {"max_tokens": 9, "stream": True}
    )
    (choice,) = choices_of(only)
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "length"
    assert only.json()["usage"]["completion_tokens"] == 0
    told = choice["logprobs"]
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    expected = [entry[token].logprob for token, entry in zip(ids[1:], known[1:], strict=True) if entry is not None]
    assert told["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    assert "".join(told["tokens"]) == TEXT
    assert [TEXT[at:].startswith(token) for at, token in zip(told["text_offset"], told["tokens"], strict=True)] == [
        True
    ] * len(ids)
    (choice,) = choices_of(one)
    assert len(choice["logprobs"]["tokens"]) == len(ids) + 1
    assert choice["logprobs"]["text_offset"][-1] == len(TEXT)
    events = events_of(stream.text)
    assert joined(events).startswith(TEXT)
    assert joined(events[:1]).startswith(TEXT)
    lists = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    tokens = [token for one_list in lists for token in one_list["tokens"]]
    assert len(tokens) == len(ids) + 9
    offsets = [offset for one_list in lists for offset in one_list["text_offset"]]
    assert offsets == sorted(offsets)


def test_logprobs_of_a_stream_are_those_of_a_whole_answer(llm: LLM) -> None:
    body = {"prompt": TEXT, "seed": 4, "max_tokens": 30, "logprobs": 2, "logprob_token_ids": [7, 8]}
    whole, stream = post(llm, TEXT_PATH, body, body | {"stream": True})
    told = choices_of(whole)[0]["logprobs"]
    events = [e["choices"][0]["logprobs"] for e in events_of(stream.text) if e["choices"][0]["logprobs"]]
    for name, values in told.items():
        assert [value for event in events for value in event[name]] == values
    names = [llm.tokenizer.decode([token]) for token in (7, 8)]
    assert all(set(names) <= set(top) for top in told["top_logprobs"])
    assert all(3 <= len(top) <= 5 or len(top) == 2 for top in told["top_logprobs"])


def test_tokens_can_be_shown_by_their_ids(llm: LLM) -> None:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 4, "logprobs": 0}
    (answer,) = post(
        llm, TEXT_PATH, body | {"return_token_ids": True, "return_tokens_as_token_ids": True, "prompt_logprobs": 1}
    )
    (choice,) = choices_of(answer)
    assert choice["prompt_token_ids"] == llm.tokenizer.encode(TEXT)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    known = choice["prompt_logprobs"]
    assert known[0] is None
    for told in known[1:]:
        best = max(told.values(), key=lambda entry: entry["logprob"])
        assert [entry["rank"] == 1 for entry in told.values()] == [entry is best for entry in told.values()]


def test_log_probabilities_of_a_prompt_are_formatted_once_for_all_its_outputs(llm: LLM) -> None:
    """Eight strangers who asked for 16 outputs each kept the interpreter busy, and others' first tokens waiting."""
    texts, known = TokenTexts(None), [None, {7: Logprob(-1.0, 1, "a")}]
    shown = texts.prompt_logprobs(known)
    assert shown == [None, {"7": {"logprob": -1.0, "rank": 1, "decoded_token": "token_id:7"}}]
    assert texts.prompt_logprobs(known) is shown
    (answer,) = post(llm, TEXT_PATH, {"prompt": [TEXT, "of"], "n": 2, "max_tokens": 1, "prompt_logprobs": 1})
    told = [choice["prompt_logprobs"] for choice in choices_of(answer)]
    assert told[0] == told[1] != told[2] == told[3]


def test_parts_of_a_character_are_shown_as_bytes(llm: LLM) -> None:
    emoji = llm.tokenizer.encode("\U0001f642")
    assert len(emoji) == 4
    body = {"prompt": [emoji], "echo": True, "logprobs": 0, "max_tokens": 0}
    (answer,) = post(llm, TEXT_PATH, body)
    (choice,) = choices_of(answer)
    assert choice["text"] == "\U0001f642"
    assert choice["logprobs"]["tokens"] == [f"bytes:\\x{byte:02x}" for byte in "\U0001f642".encode()]


@pytest.mark.parametrize("seed", range(6))
def test_pieces_put_together_are_the_whole_answer(llm: LLM, seed: int) -> None:
    """With all that can be asked for at once."""
    whole_text = llm.generate(TEXT, SamplingParams(seed=seed, max_tokens=40))[0].outputs[0].text
    body = {
        "prompt": [TEXT, TEXT[:9]], "n": 2, "seed": seed, "max_tokens": 40, "stop": [whole_text[9:12], "zz"],
        "echo": True, "logprobs": 2, "return_token_ids": True, "bad_words": ["of"], "presence_penalty": 0.5,
        "logit_bias": {"9": 2}, "top_k": 40, "min_p": 0.01, "logprob_token_ids": [3],
    }  # fmt: skip
    asked = {"stream": True, "stream_options": {"include_usage": True}, "stream_interval": seed + 1}
    plain = {"speculative": {"tree": "off"}}
    whole, stream, unguessed = post(llm, TEXT_PATH, body, body | asked, body | plain)
    *events, last = events_of(stream.text)
    assert last["usage"]["completion_tokens"] == whole.json()["usage"]["completion_tokens"]
    for choice, other in zip(choices_of(whole), choices_of(unguessed), strict=True):
        pieces = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"] == other["text"]
        assert [i for piece in pieces for i in piece["token_ids"]] == choice["token_ids"] == other["token_ids"]
        assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for name, values in choice["logprobs"].items():
            told = [v for piece in pieces if piece["logprobs"] for v in piece["logprobs"][name]]
            assert agree(told, values)
        for name in ("tokens", "text_offset"):
            assert choice["logprobs"][name] == other["logprobs"][name]
        num_echoed = len(choice["prompt_token_ids"])
        assert len(choice["logprobs"]["tokens"]) == num_echoed + len(choice["token_ids"])
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"] == other["finish_reason"]


@pytest.mark.parametrize("interval", [1, 3, 50])
def test_stop_strings_never_leak(llm: LLM, interval: int) -> None:
    whole = llm.generate(TEXT, SamplingParams(seed=5, max_tokens=60, ignore_eos=True))[0].outputs[0].text
    stop = whole[30:34]
    cut = whole[: whole.index(stop)]
    body = {"prompt": TEXT, "seed": 5, "max_tokens": 60, "ignore_eos": True, "stop": [stop], "stream": True}
    (answer,) = post(llm, TEXT_PATH, body | {"stream_interval": interval})
    events = events_of(answer.text)
    assert joined(events) == cut
    shown = ""
    for event in events:
        shown += event["choices"][0]["text"]
        assert cut.startswith(shown)
    assert events[-1]["choices"][0]["stop_reason"] == stop
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    (kept,) = post(llm, TEXT_PATH, body | {"stream": False, "include_stop_str_in_output": True})
    assert choices_of(kept)[0]["text"] == cut + stop


def test_usage_adds_up(llm: LLM) -> None:
    body = {"prompt": [TEXT, "a"], "n": 2, "max_tokens": 7, "ignore_eos": True, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    bare, told, always = post(
        llm, TEXT_PATH, body, body | {"stream_options": {"include_usage": True}}, body | {"stream_options": options}
    )
    num_prompt = len(llm.tokenizer.encode(TEXT)) + 1
    assert all("usage" not in event for event in events_of(bare.text))
    *events, last = events_of(told.text)
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["metrics"] is None  # of several outputs
    usage = last["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, 28)
    assert usage["total_tokens"] == num_prompt + 28
    counts = [event["usage"]["completion_tokens"] for event in events_of(always.text)]
    assert counts == sorted(counts)
    assert counts[-1] == 28


def test_cached_tokens_are_reported_and_salts_keep_them_apart(llm: LLM) -> None:
    body = {"prompt": TEXT * 4, "max_tokens": 2, "cache_salt": "mine"}
    answers = post(llm, TEXT_PATH, body, body, body | {"cache_salt": "other"}, body | {"echo": True, "logprobs": 0})
    cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0
    assert len(choices_of(answers[3])[0]["logprobs"]["tokens"]) == answers[3].json()["usage"]["total_tokens"]


def test_keys_do_not_share_cached_prefixes(llm: LLM) -> None:
    body = {"prompt": TEXT * 4, "max_tokens": 2}
    keys = ("a-long-key-of-one", "a-long-key-of-another")

    async def work(client: httpx.AsyncClient, state: ServerState) -> list[int]:
        order = (keys[0], *keys)
        answers = [await client.post(TEXT_PATH, json=body, headers={"api-key": key}) for key in order]
        return [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]

    first, again, other = serve(llm, work, api_keys=keys)
    assert first == other == 0
    assert again > 0


def test_counters_of_speculation_come_with_one_output(llm: LLM) -> None:
    body = {"prompt": TEXT, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    whole, stream = post(llm, TEXT_PATH, body, body | {"stream": True, "stream_options": {"include_usage": True}})
    counted = whole.json()["metrics"]["speculative_decoding"]
    assert counted["num_draft_tokens"] > 0
    assert counted["num_accepted_draft_tokens"] > 0
    last = events_of(stream.text)[-1]
    assert last["metrics"]["speculative_decoding"].keys() == counted.keys()


def test_a_prediction_is_counted(llm: LLM) -> None:
    base = {"prompt": TEXT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    (first,) = post(llm, TEXT_PATH, base)
    text = choices_of(first)[0]["text"]
    num_predicted = len(llm.tokenizer.encode(text))
    (answer,) = post(llm, TEXT_PATH, base | {"prediction": {"type": "content", "content": text}})
    assert choices_of(answer)[0]["text"] == text
    details = answer.json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert sum(details.values()) == num_predicted
    assert "completion_tokens_details" not in first.json()["usage"]


def test_traces_are_sent_to_those_who_ask(llm: LLM) -> None:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    plain, whole, stream = post(llm, TEXT_PATH, body, body | {"trace": True}, body | {"trace": True, "stream": True})
    assert "specinfer" not in choices_of(plain)[0]
    told = choices_of(whole)[0]["specinfer"]
    assert len(told["origins"]) == 12
    assert any(node["accepted"] for step in told["steps"] for node in step["nodes"])
    events = events_of(stream.text)
    origins = [origin for event in events for origin in event["specinfer"]["origins"]]
    assert origins == told["origins"]
    steps = [step for event in events for step in event["specinfer"]["steps"]]
    assert [step["position"] for step in steps] == [step["position"] for step in told["steps"]]


def test_a_whole_answer_has_a_limited_number_of_trees(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.server.generations._MAX_TRACED_NODES", 20)
    body = {"prompt": TEXT, "max_tokens": 40, "ignore_eos": True, "trace": True}
    whole, stream = post(llm, TEXT_PATH, body, body | {"stream": True})
    told = choices_of(whole)[0]["specinfer"]
    assert len(told["origins"]) == 40
    assert 0 < sum(1 + len(step["nodes"]) for step in told["steps"]) <= 20
    assert sum(len(event["specinfer"]["steps"]) for event in events_of(stream.text)) > len(told["steps"])


def test_steps_that_come_together_are_kept_up_to_the_limit_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.server.generations._MAX_TRACED_NODES", 8)
    node = TracedNode(1, 0, ("draft",), 0.5, 0.5, True)
    steps = [StepTrace(0.0, position, 1, (node,) * 2, (1, 2), 3, 0.5) for position in range(4)]

    class Generation:
        """An output whose reader comes late, and gets all steps in one chunk."""

        requests = (None,)

        async def __aiter__(self) -> AsyncIterator[TextChunk]:
            yield TextChunk("text", [1] * 12, [None] * 12, finish_reason="length", steps=steps)

        def output(self) -> Any:
            return SimpleNamespace(
                outputs=[CompletionOutput(0, "text", [1] * 12, None, None, "length", None, [None] * 12)]
            )

        def close(self) -> None:
            pass

    generation: Any = Generation()
    ((whole,),) = asyncio.run(finish_all([generation]))
    assert whole.steps == steps[:2]  # of three nodes each, with the root


def test_limits_nobody_asked_for_give_way(llm: LLM) -> None:
    ids = [5] * (llm.max_model_len - 3)
    short, cut = post(
        llm,
        TEXT_PATH,
        {"prompt": ids, "ignore_eos": True},
        {"prompt": [5] * 500, "max_tokens": 6, "ignore_eos": True, "truncate_prompt_tokens": -1},
    )
    assert short.json()["usage"]["completion_tokens"] == 3
    assert cut.json()["usage"]["total_tokens"] == llm.max_model_len


def test_the_schema_has_streams_and_refusals(llm: LLM) -> None:
    async def run(client: httpx.AsyncClient, state: ServerState) -> Any:
        return (await client.get("/openapi.json")).json()

    schema = serve(llm, run)
    for path in ("/v1/completions", "/v1/chat/completions"):
        answers = schema["paths"][path]["post"]["responses"]
        assert set(answers) == {"200", "4XX", "5XX"}
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    properties = schema["components"]["schemas"]["CompletionFields"]["properties"]
    assert {"type": "null"} in properties["stop"]["anyOf"]


def test_request_ids_are_the_callers(llm: LLM) -> None:
    named, other = post(llm, TEXT_PATH, {"prompt": "a", "request_id": "mine"}, {"prompt": "a"})
    assert named.json()["id"] == "cmpl-mine"
    assert other.json()["id"] != "cmpl-mine"


def test_too_much_at_once_is_refused_before_the_stream(llm: LLM) -> None:
    async def run(client: httpx.AsyncClient, state: ServerState) -> None:
        long = {"prompt": "a", "n": 32, "max_tokens": 200, "ignore_eos": True}
        first = asyncio.create_task(client.post("/v1/completions", json=long))
        while llm.engine.scheduler.running == []:
            await asyncio.sleep(0.005)
        refused = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert (await first).status_code == 200
        many = {"prompt": "a", "n": 33, "max_tokens": 2}
        others = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in (long, many)]
        assert (await others[1]).status_code == 429
        assert (await others[0]).status_code == 200
        alone = await client.post("/v1/completions", json=many)
        assert len(choices_of(alone)) == 33
        never = await client.post("/v1/completions", json={"prompt": ["a"] * 33})
        assert never.status_code == 400

    serve(llm, run, limits=QueueLimits(max_num_queued_reqs=0))


def test_a_failure_in_a_stream_is_sent_in_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, 0.03)

    with Server(llm, limits=QueueLimits(request_timeout=1.0)) as server:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "speculative": {"tree": "off"}}
        answer = server.post("/v1/completions", json=body | {"stream": True})
        assert answer.status_code == 200
        *events, last = events_of(answer.text)
        assert events
        assert all(c["finish_reason"] is None for event in events for c in event["choices"])
        assert last["error"]["code"] == "timeout"
        answer = server.post("/v1/completions", json=body)
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"


def test_silence_is_filled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, 0.1)

    with Server(llm, ping_seconds=0.02) as server:
        body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True, "stream": True}
        answer = server.post("/v1/completions", json=body)
        assert answer.text.count(": ping\n\n") >= 2
        assert len(events_of(answer.text)) >= 2


def test_middles_are_filled_in_by_models_that_know_how(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama", vocab_size=99)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(folder)
    llm = LLM(folder, drafters=[])
    body = {"prompt": "the ", "suffix": " end", "max_tokens": 4, "return_token_ids": True, "temperature": 0}
    filled, echoed = post(llm, TEXT_PATH, body, body | {"echo": True})
    ids = [96, *tokenizer.encode("the "), 97, *tokenizer.encode(" end"), 98]
    assert choices_of(filled)[0]["prompt_token_ids"] == ids
    assert echoed.status_code == 400


def test_the_makers_recommendations_are_followed(tmp_path: Path) -> None:
    folder = save_tokenizer(save_model(tmp_path, "llama"))
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_p": 7, "do_sample": false}')
    llm = LLM(folder, drafters=[])
    assert llm.target.loaded.sampling_defaults == {"temperature": 0.0}
    greedy = llm.generate(TEXT, SamplingParams(temperature=0))[0].outputs[0].text
    sampled = llm.generate(TEXT, SamplingParams(seed=1))[0].outputs[0].text
    assert greedy != sampled
    default, asked = post(llm, TEXT_PATH, {"prompt": TEXT, "seed": 1}, {"prompt": TEXT, "seed": 1, "temperature": 1.0})
    assert choices_of(default)[0]["text"] == greedy
    assert choices_of(asked)[0]["text"] == sampled


@pytest.mark.parametrize(
    ("tree", "is_streamed", "config", "limit"),
    [
        ("best-first:64:16", False, {}, None),
        ("best-first:65:4", False, {}, "nodes; use at most 64"),
        ("best-first:32:17", False, {}, "levels; use at most 16"),
        ("best-first:100:4", False, {"max_tree_nodes": 100}, None),
        ("best-first:256:32", True, {}, None),
        ("best-first:257:4", True, {}, "nodes; use at most 256"),
        ("best-first:64:33", True, {}, "levels; use at most 32"),
        ("best-first:9:4", True, {"max_tree_nodes": 8}, "nodes; use at most 8"),
    ],
)
def test_how_large_a_tree_a_request_may_ask_for(
    llm: LLM, tree: str, is_streamed: bool, config: dict[str, Any], limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where passes take seconds, larger ones are hardly seen."""
    if is_streamed:
        stream = SimpleNamespace(seconds_waiting=0.0, bytes_read=0, seconds_reading=0.0, bytes_per_pass=1)
        monkeypatch.setattr(llm.target, "loaded", replace(llm.target.loaded, stream=stream))
    (answer,) = post(llm, TEXT_PATH, {"prompt": TEXT, "max_tokens": 3, "speculative": {"tree": tree}}, **config)
    if limit is None:
        assert answer.status_code == 200, answer.text
    else:
        assert answer.status_code == 400
        assert limit in answer.json()["error"]["message"]


# ------------------------------------------------------------------------------- as other engines do

BOS = 99


def _with_beginning(folder: Path) -> Path:
    """A model that can fill in the middle, whose tokenizer puts a token before every text."""
    save_tokenizer(save_model(folder, "llama", vocab_size=BOS + 1))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, "<bos>"]})
    frame = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.backend_tokenizer.post_processor = frame
    tokenizer.save_pretrained(folder)
    return folder


def test_an_empty_prompt_is_the_token_that_begins_texts(tmp_path: Path) -> None:
    llm = LLM(_with_beginning(tmp_path))
    body = {"max_tokens": 4, "ignore_eos": True, "seed": 3, "return_token_ids": True, "echo": True}
    one, listed, ids, without, none = post(
        llm,
        TEXT_PATH,
        body | {"prompt": ""},
        body | {"prompt": ["", "the"]},
        body | {"prompt": [BOS]},
        body | {"prompt": "", "add_special_tokens": False},
        body | {"prompt": []},
    )
    (choice,) = choices_of(one)
    assert choice["prompt_token_ids"] == [BOS]
    assert choices_of(listed)[0]["token_ids"] == choices_of(ids)[0]["token_ids"] == choice["token_ids"]
    assert (without.status_code, none.status_code) == (400, 400)
    (output,) = llm.generate("", SamplingParams(seed=3, max_tokens=4, ignore_eos=True))
    assert output.prompt_token_ids == [BOS]
    assert output.outputs[0].token_ids == choice["token_ids"]
    (held,) = llm.generate({"prompt": ""}, SamplingParams(max_tokens=1))
    assert held.prompt_token_ids == [BOS]


@pytest.mark.parametrize("prompt", ["the ", ""])
def test_a_middle_is_filled_in_within_the_tokenizers_frame(tmp_path: Path, prompt: str) -> None:
    llm = LLM(_with_beginning(tmp_path))
    body = {"prompt": prompt, "suffix": " end", "max_tokens": 1, "return_token_ids": True}
    framed, bare = post(llm, TEXT_PATH, body, body | {"add_special_tokens": False})
    (choice,), (without,) = choices_of(framed), choices_of(bare)
    assert choice["prompt_token_ids"] == [BOS, *without["prompt_token_ids"]]
    assert without["prompt_token_ids"][0] == llm.tokenizer.convert_tokens_to_ids("<|fim_prefix|>")


def test_a_stop_token_is_a_part_of_the_text_if_asked_for(llm: LLM) -> None:
    body = {"prompt": "the", "seed": 5, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    (plain,) = choices_of(post(llm, TEXT_PATH, body)[0])
    place = next(i for i, token in enumerate(plain["token_ids"]) if i > 2 and token not in plain["token_ids"][:i])
    stop = {"stop_token_ids": [plain["token_ids"][place]]}
    kept = {"include_stop_str_in_output": True}
    without, including, streamed, whole = post(
        llm,
        TEXT_PATH,
        body | stop,
        body | stop | kept,
        body | stop | kept | {"stream": True},
        body | {"stop": ["\u20ac\u20ac"]} | kept,
    )
    (cut,), (full,) = choices_of(without), choices_of(including)
    text = llm.tokenizer.decode(plain["token_ids"][: place + 1])
    assert (cut["text"], full["text"]) == (llm.tokenizer.decode(plain["token_ids"][:place]), text)
    assert full["stop_reason"] == stop["stop_token_ids"][0]
    assert "".join(event["choices"][0]["text"] for event in events_of(streamed.text) if event["choices"]) == text
    assert choices_of(whole)[0]["text"] == plain["text"]


def test_parts_of_requests_that_are_ignored_are_named(llm: LLM) -> None:
    (answer,) = post(llm, TEXT_PATH, {"prompt": "a", "max_new_tokens": 5, "stream_options": {}})
    assert answer.headers[IGNORED_HEADER] == "max_new_tokens, stream_options"
