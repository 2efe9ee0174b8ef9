"""Where a pass costs the same up to some hundred rows, "auto" grows trees about as good as the best of one size."""

from collections.abc import Iterator

import pytest

from specinfer import LLM, SamplingParams
from specinfer.core.config import SpeculativeConfig
from specinfer.demo.corpus import heldout_prompts
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.setup import drafter_setup

BEND = 200


class Fixed(CostModel):
    """Costs as those of a streamed target, whatever the embedded one takes."""

    def __init__(self) -> None:
        super().__init__(Curve([1, BEND, 1000], [4.0, 4.0, 20.0]), Curve([1, 64], [0.02, 0.02]))

    def observe(self, step: object) -> None:
        pass


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter_setup, "cached_costs", lambda *_, **__: Fixed())
        yield LLM("demo", tree="auto", max_model_len=512, max_num_seqs=16, kv_cache_memory_bytes=2**28)


def _run(demo: LLM, tree: str, temperature: float, num_prompts: int, max_tokens: int) -> float:
    """Tokens a second at these costs, of steps with trees: first tokens have none. One prompt after the other."""
    demo.speculate(SpeculativeConfig(tree=tree))
    tokens = 0
    for i, prompt in enumerate(heldout_prompts(num_prompts, num_chars=400)):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=i)
        (output,) = demo.generate(prompt, params, use_tqdm=False)
        tokens += len(output.outputs[0].token_ids)
    steps, costs = demo.engine.metrics.recent, Fixed()
    drafted = [step for step in steps if step.num_guessed]
    seconds = sum(float(costs.step(1, step.num_guessed, step.num_levels)) for step in drafted)
    return (tokens - len(steps) + len(drafted)) / seconds


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_alone_gets_trees_up_to_the_bend(demo: LLM, temperature: float) -> None:
    fixed = _run(demo, f"best-first:{BEND - 8}:24", temperature, 4, 48)
    chosen = _run(demo, "auto", temperature, 4, 48)
    assert max(step.num_rows for step in demo.engine.metrics.recent if step.num_guessed) <= BEND
    assert chosen > 0.95 * fixed


@pytest.mark.slow
def test_many_requests_share_what_is_free(demo: LLM) -> None:
    demo.speculate(SpeculativeConfig(tree="auto"))
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 16
    demo.generate(heldout_prompts(16, num_chars=200), params, use_tqdm=False)
    steps = demo.engine.metrics.recent
    rows = [step.num_rows for step in steps if step.num_requests == 16 == step.num_rows - step.num_guessed]
    assert rows
    assert all(0.7 * BEND < count < 1.2 * BEND for count in rows[1:-1])
