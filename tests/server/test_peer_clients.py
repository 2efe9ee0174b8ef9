"""Other projects' programs against a server: what they measure is what the library says.

They are looked for on PATH, or where LM_EVAL and GUIDELLM say: an environment of their own suits them best.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specinfer.bench.serve_process import ServerAddress, running_server
from specinfer.core.sampling import SamplingParams
from specinfer.demo.pair import demo_folders
from specinfer.llm import LLM

pytestmark = pytest.mark.peer

_DOCUMENTS = (
    ("import os\nimport sys\n\ndef main(argv", ("):\n", "zebra")),
    ("for i in range", ("(10):", " purple elephant")),
    ("class Foo(object", ("):\n    pass", "]]]")),
)
_TASK = """
task: continuations
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def program(name: str, variable: str) -> str:
    found = shutil.which(os.environ.get(variable, name))
    if found is None:
        pytest.skip(f"{name} is not there; install it apart and say where with {variable}")
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[ServerAddress]:
    with running_server("demo", ["--dtype", "float32", "--drafter", "demo"]) as address:
        yield address


def run(words: list[str], folder: Path, key: str | None) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": key or "", "HF_HOME": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def expected(llm: LLM, question: str, choice: str) -> tuple[float, bool]:
    """The log-probability of a continuation, and whether greedy decoding says it."""
    ids = llm.tokenizer.encode(question + choice)
    start = len(llm.tokenizer.encode(question))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    logprobs = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].prompt_logprobs
    assert logprobs is not None
    said = [(logprobs[i] or {}, ids[i]) for i in range(start, len(ids))]
    total = sum(each[token].logprob for each, token in said)
    return total, all(each[token].rank == 1 for each, token in said)


def test_lm_eval_reads_the_librarys_likelihoods(server: ServerAddress, tmp_path: Path) -> None:
    lm_eval = program("lm_eval", "LM_EVAL")
    data, target = tmp_path / "data.jsonl", demo_folders().target
    records = [{"question": question, "choices": choices, "answer": 0} for question, choices in _DOCUMENTS]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "task.yaml").write_text(_TASK.format(data=data))
    arguments = (
        f"model=demo,base_url={server.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={target},"
        "num_concurrent=1,tokenized_requests=False"
    )
    words = [lm_eval, "run", "--model", "local-completions", "--model_args", arguments, "--tasks", "continuations"]
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    run(words, tmp_path, server.api_key)
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    measured = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    assert len(measured) == len(_DOCUMENTS)
    with LLM("demo", drafters=[], dtype="float32") as llm:
        for (question, choices), answers in zip(_DOCUMENTS, measured, strict=True):
            for choice, (logprob, is_greedy) in zip(choices, answers, strict=True):
                wanted, says_so = expected(llm, question, choice)
                assert float(logprob) == pytest.approx(wanted, abs=1e-4)
                assert str(is_greedy) == str(says_so)


def test_guidellm_measures_a_server(server: ServerAddress, tmp_path: Path) -> None:
    guidellm, target = program("guidellm", "GUIDELLM"), demo_folders().target
    backend = f"kind=openai_http,target={server.url},model=demo,api_key={server.api_key}"
    words = [guidellm, "run", "--backend", backend, "--tokenizer", f"kind=hf_auto,model={target}"]
    words += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--disable-console"]
    run([*words, "--output", f"kind=json,path={tmp_path / 'report.json'}"], tmp_path, server.api_key)
    report: Any = json.loads((tmp_path / "report.json").read_text())
    (benchmark,) = report["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 4
    assert not requests["errored"]
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {8}
