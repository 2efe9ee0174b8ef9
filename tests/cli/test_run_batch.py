"""run-batch: every line of the input becomes one of the output, in order, whatever is wrong with it."""

import asyncio
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from full_disk import limited_files
from specinfer.cli.app import app
from specinfer.core.sampling import SamplingParams
from specinfer.engine.engine import Engine
from specinfer.llm import LLM
from specinfer.server.batch import (
    BatchCounts,
    BatchLine,
    BatchResponse,
    ServerGoneError,
    output_record,
    read_line,
    run_lines,
    written_ids,
)
from tiny import save_model, save_tokenizer


def request_line(name: str, **changes: Any) -> bytes:
    record = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name}} | changes
    return json.dumps(record).encode() + b"\n"


def run_all(
    lines: Iterable[bytes], post: Any = None, concurrency: int = 2, skipped_ids: set[str] | None = None
) -> tuple[list[Any], BatchCounts]:
    async def echo(url: str, body: dict[str, Any]) -> BatchResponse:
        return BatchResponse(200, "r", {"url": url, **body})

    output, steps = io.BytesIO(), []
    counts = asyncio.run(
        run_lines(
            iter(lines),
            output,
            post or echo,
            concurrency=concurrency,
            skipped_ids=skipped_ids or set(),
            advance=lambda: steps.append(1),
        )
    )
    assert len(steps) == counts.num_served + counts.num_failed + counts.num_skipped
    return [json.loads(line) for line in output.getvalue().splitlines()], counts


# ---------------------------------------------------------------------------------------- the lines


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{no json", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "custom_id"),
        (request_line("a", custom_id=""), "custom_id"),
        (request_line("a", custom_id=5), "custom_id"),
        (request_line("a", method="GET"), "method: must be POST"),
        (request_line("a", url="/v1/embeddings"), "url: must be one of"),
        (request_line("a", url=["/v1/completions"]), "url: must be one of"),
        (request_line("a", body="x"), "body: must be an object"),
        (request_line("a", body=None), "body: must be an object"),
        (request_line("a", body={"stream": True}), "stream: a batch has whole responses"),
    ],
)
def test_a_bad_line_becomes_an_error_line(line: bytes, told: str) -> None:
    (before, record, after), counts = run_all([request_line("x"), line, request_line("y")])
    assert record["response"] is None
    assert record["error"]["code"] == "invalid_line"
    assert record["error"]["message"].startswith("line 2: ")
    assert told in record["error"]["message"]
    assert before["error"] is after["error"] is None
    assert (counts.num_served, counts.num_failed) == (2, 1)


def test_output_lines_have_the_batch_format() -> None:
    (record,), _ = run_all([request_line("a")])
    assert set(record) == {"id", "custom_id", "response", "error"}
    assert record["id"].startswith("batch_req_")
    assert record["custom_id"] == "a"
    body = {"url": "/v1/completions", "prompt": "a"}
    assert record["response"] == {"status_code": 200, "request_id": "r", "body": body}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"error": {"message": "m", "code": "invalid_value"}}, {"code": "invalid_value", "message": "m"}),
        ({"error": {"message": "m", "code": None}}, {"code": "400", "message": "m"}),
        ("plain", {"code": "400", "message": "plain"}),
        ([], {"code": "400", "message": "[]"}),
    ],
)  # fmt: skip
def test_a_refused_request_has_its_answer_and_an_error(body: Any, error: Any) -> None:
    record, is_served = output_record(BatchLine("a", "/v1/completions", {}), BatchResponse(400, "r", body))
    assert not is_served
    assert record["response"] == {"status_code": 400, "request_id": "r", "body": body}
    assert record["error"] == error


def test_blank_lines_are_no_lines_and_the_last_may_lack_its_end() -> None:
    records, counts = run_all([b"\n", request_line("a"), b"  \r\n", request_line("b").rstrip()])
    assert [record["custom_id"] for record in records] == ["a", "b"]
    assert counts.num_served == 2


def test_a_name_stands_once() -> None:
    records, counts = run_all([request_line("a"), request_line("a"), request_line("b")])
    assert [record["error"] is None for record in records] == [True, False, True]
    assert "stands in two lines" in records[1]["error"]["message"]
    assert counts.num_failed == 1


def test_a_request_keeps_its_body() -> None:
    body = {"prompt": "a", "temperature": 0, "nested": {"x": [None, True]}}
    assert read_line(request_line("a", body=body)) == BatchLine("a", "/v1/completions", body)


# ------------------------------------------------------------------------------------- the run


def test_order_is_kept_and_no_more_run_at_once_than_asked_for() -> None:
    now, most = 0, 0

    async def post(url: str, body: dict[str, Any]) -> BatchResponse:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02 if body["prompt"].endswith("0") else 0.001)
        now -= 1
        return BatchResponse(200, "", {})

    names = [f"n{i}" for i in range(40)]
    records, counts = run_all([request_line(name) for name in names], post, concurrency=3)
    assert [record["custom_id"] for record in records] == names
    assert counts.num_served == 40
    assert most == 3


def test_input_is_not_read_far_ahead() -> None:
    num_read = num_ended = 0

    def lines() -> Iterable[bytes]:
        nonlocal num_read
        for i in range(100):
            num_read += 1
            yield request_line(str(i))

    async def post(url: str, body: dict[str, Any]) -> BatchResponse:
        nonlocal num_ended
        await asyncio.sleep(0.001)
        assert num_read - num_ended <= 2 * 4 + 2
        num_ended += 1
        return BatchResponse(200, "", {})

    assert run_all(lines(), post, concurrency=2)[1].num_served == 100


def test_a_server_that_is_gone_ends_the_run_with_whole_lines() -> None:
    output = io.BytesIO()

    async def post(url: str, body: dict[str, Any]) -> BatchResponse:
        if body["prompt"] == "3":
            raise ServerGoneError("gone")
        return BatchResponse(200, "", {})

    with pytest.raises(ServerGoneError):
        asyncio.run(
            run_lines(
                iter([request_line(str(i)) for i in range(9)]),
                output,
                post,
                concurrency=1,
                skipped_ids=set(),
                advance=lambda: None,
            )
        )
    assert [json.loads(line)["custom_id"] for line in output.getvalue().splitlines()] == ["0", "1", "2"]


# ---------------------------------------------------------------------------------- going on later


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert written_ids(path) == set()
    whole = b'{"custom_id": "a"}\n{"custom_id": null}\n{"custom_id": "b"}\n'
    path.write_bytes(whole + b'{"custom_id": "c"')
    assert written_ids(path) == {"a", "b"}
    assert path.read_bytes() == whole
    assert written_ids(path) == {"a", "b"}


@pytest.mark.parametrize("line", [b"no json\n", b"[]\n", b'{"id": 1}\n'])
def test_what_is_no_output_is_left_as_it_is(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(line)
    with pytest.raises(ValueError, match=r"line 1 is not a line of a batch's output"):
        written_ids(path)
    assert path.read_bytes() == line


def test_lines_that_are_there_are_skipped() -> None:
    records, counts = run_all([request_line("a"), request_line("b")], skipped_ids={"a"})
    assert [record["custom_id"] for record in records] == ["b"]
    assert (counts.num_served, counts.num_skipped) == (1, 1)


# ------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
    return str(save_tokenizer(save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=512), template))


def invoke(*words: str, code: int = 0, stdin: bytes | None = None) -> Any:
    result = CliRunner().invoke(app, ["run-batch", *words], input=stdin)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def completion(name: str, **changes: Any) -> bytes:
    body = {"prompt": f"the {name}", "max_tokens": 5, "temperature": 0} | changes
    return request_line(name, body=body)


def test_a_file_is_served_and_gone_on_with(model: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 4, "temperature": 0}
    lines = [
        completion("a"),
        completion("b", top_p=7),
        b"no json\n",
        request_line("c", url="/v1/chat/completions", body=chat),
        completion("d", model="other"),
        request_line("f", url="/v1/responses", body={"input": "the", "max_output_tokens": 16, "temperature": 0}),
        completion("e", prompt=["the", "and"], n=2, temperature=1, seed=3),
    ]
    source.write_bytes(b"".join(lines))
    words = (
        "-i",
        str(source),
        "-o",
        str(output),
        "--model",
        model,
        "--served-model-name",
        "tiny",
        "--drafter",
        "ngram",
    )
    result = invoke(*words, code=1)
    assert result.stderr == "specinfer: 4 served, 3 refused or failed\n"
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["custom_id"] for record in records] == ["a", "b", None, "c", "d", "f", "e"]
    statuses = [(record["response"] or {}).get("status_code") for record in records]
    assert statuses == [200, 400, None, 200, 404, 200, 200]
    assert [record["error"] is None for record in records] == [status == 200 for status in statuses]
    assert records[4]["error"]["code"] == "model_not_found"
    assert records[0]["response"]["body"]["model"] == "tiny"
    with LLM(model, drafters=[]) as llm:
        wanted = llm.generate("the a", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0]
    assert records[0]["response"]["body"]["choices"][0]["text"] == wanted.text
    assert records[0]["response"]["request_id"]
    assert records[5]["response"]["body"]["output"][0]["type"] == "message"
    assert len(records[6]["response"]["body"]["choices"]) == 4
    # What was cut off is served again, and nothing else.
    whole = output.read_bytes()
    cut = b"".join(whole.splitlines(keepends=True)[:6])
    output.write_bytes(cut + b'{"custom_id": "e", "resp')
    source.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    result = invoke(*words, "--resume")
    assert result.stderr == "specinfer: 1 served, 0 refused or failed, 5 there already\n"
    assert output.read_bytes().startswith(cut)
    choices = json.loads(output.read_bytes()[len(cut) :])["response"]["body"]["choices"]
    assert choices == records[6]["response"]["body"]["choices"]


def test_a_hostile_line_is_refused_by_its_field_and_the_run_goes_on(model: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = {
        completion("surrogate", prompt="\ud800"): "a text is not valid Unicode (a lone surrogate)",
        completion("nan", temperature=float("nan")): "NaN is not a JSON number",
        completion("deep", prompt=0).replace(b": 0,", b": " + b"[" * 50_000 + b"]" * 50_000 + b",", 1): "too deeply",
        completion("digits", max_tokens=7).replace(b"7", b"7" * 5000): "Exceeds the limit",
        completion("long", prompt="a" * 3_000_000): "maximum context length",
        completion("many", n=10**6): "n must be from 1 to 128",
        b"[" * 100_000 + b"\n": "nested too deeply",
        b"\xff\xfe\n": "not valid JSON",
    }
    source.write_bytes(b"".join([*lines, completion("last")]))
    invoke("-i", str(source), "-o", str(output), model, "--served-model-name", "tiny", code=1)
    *refused, last = [json.loads(line) for line in output.read_text().splitlines()]
    for record, part in zip(refused, lines.values(), strict=True):
        assert part in record["error"]["message"]
    assert (last["custom_id"], last["error"]) == ("last", None)


def test_standard_streams_are_files_too(model: str) -> None:
    result = invoke("-i", "-", "-o", "-", model, "--drafter", "none", stdin=completion("a", model=model) + b"\n")
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["response"]["status_code"] == 200


def test_an_output_is_not_written_over(model: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(completion("a"))
    output.write_bytes(b'{"custom_id": "x"}\n')
    files = ("-i", str(source), "-o", str(output), model)
    assert "add --resume to go on with it" in invoke(*files, code=2).stderr
    assert output.read_bytes() == b'{"custom_id": "x"}\n'
    assert "on standard output" in invoke("-i", str(source), "-o", "-", model, "--resume", code=2).stderr
    assert "cannot be read" in invoke("-i", str(tmp_path / "no"), "-o", str(output), model, code=2).stderr
    for more in ((), ("--resume",)):
        assert "Is a directory" in invoke("-i", str(source), "-o", str(tmp_path), model, *more, code=2).stderr
        assert "is the input file" in invoke("-i", str(source), "-o", str(source), model, *more, code=2).stderr


def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_space(model: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(completion(str(i), model=model) for i in range(4)))
    words = ("-i", str(source), "-o", str(output), model, "--drafter", "none")
    with limited_files(1500):
        told = invoke(*words, code=2).stderr
    assert f"-o: {output} cannot be written: File too large; free some space, and go on with --resume" in told
    assert output.stat().st_size <= 1500
    invoke(*words, "--resume")
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["0", "1", "2", "3"]


def test_an_engine_that_fails_ends_the_run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(completion(str(i)) for i in range(4)))
    step, left = Engine.step, [7]

    def broken(self: Engine) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("none left")
        return step(self)

    words = ("-i", str(source), "-o", str(output), model, "--drafter", "none", "--max-concurrency", "1")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", broken)
        assert (
            "the engine failed: MemoryError; what is missing can be served with --resume"
            in invoke(*words, code=1).stderr
        )
    names = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert names[0] == "0"
    assert len(names) < 4
    invoke(*words, "--resume", code=1 if len(names) > 1 else 0)
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["0", "1", "2", "3"]
