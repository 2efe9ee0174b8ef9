"""Engines whose target has passes in a fixed order, with the kernels of GPUs: trees and batches change no token.

Tokens of the target are twins, with nearly the same weights in its head: each choice is a near tie, which bits decide.
"""

from pathlib import Path

import pytest
import torch

from interpreter import interpreted
from on_device import load_plain, make_device_engine, run_on_device
from one_order import in_order
from one_order import one_order as one_order
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters import SmallModelDrafter
from specinfer.model.graphs.capture import Graphs
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from tiny import VOCAB, make_engine, make_model, random_prompts, requests_of, run

CPU = torch.device("cpu")
pytestmark = [interpreted, pytest.mark.slow, pytest.mark.usefixtures("one_order")]
TREE = TreeBudget.expansion((2, 2, 1))
PROMPTS = random_prompts([21, 4], seed=3)
PARAMS = [SamplingParams(temperature=0.0, max_tokens=6), SamplingParams(temperature=1.0, max_tokens=6)]
_requests = requests_of(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, path = make_model("llama", tie_word_embeddings=False), tmp_path_factory.mktemp("twins")
    with torch.no_grad():
        head = model.lm_head.weight
        head[1::2] = head[::2] * (1 + 0.01 * torch.randn(head[::2].shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("where", ["host", "device"])
def test_tokens_are_those_of_plain_decoding_alone(where: str, folder: Path) -> None:
    """Greedily and with coupled samples: with trees, in a batch, and after prompts in chunks."""
    target, small = in_order(load_model(folder, torch.bfloat16, CPU, native=False)), load_plain(folder)
    runner = ModelRunner(target, 400, graphs=Graphs(CPU))
    alone = [run(make_engine(runner), [request])[0] for request in _requests()]
    requests = _requests()
    if where == "device":
        engine = make_device_engine(target, small, TREE, max_num_batched_tokens=16)
        assert run_on_device(engine, requests) == set(requests)
    else:
        drafter = SmallModelDrafter(ModelRunner(small, 400), VOCAB)
        run(make_engine(runner, drafter, TREE, max_num_batched_tokens=16), requests)
    assert [request.output_ids for request in requests] == alone
    assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > 1
