"""What the next drafter is to learn, against slow references; and predictions against what the engine drafts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree
from specinfer.drafters import SmallModelDrafter
from specinfer.learning.batches import Batch
from specinfer.learning.distillation import distillation_loss, restrict
from specinfer.learning.examples import DamagedError, ExampleRecorder, Source, TrainingExample
from specinfer.learning.trainable import TrainableModel
from specinfer.learning.tune import boosting
from specinfer.learning.tune.boosting import (
    Predictions,
    is_predicted,
    load_predictions,
    predict,
    residual_logprobs,
    save_predictions,
    token_weights,
)
from specinfer.model.runner import ModelRunner
from specinfer.verify import Acceptance
from tiny import VOCAB, make_engine, make_model, make_request, random_prompts, run, transformers_model

SAMPLED = SamplingParams(temperature=1.0, max_tokens=40)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
chances = st.floats(0.0, 1.0, width=32)


def predictions_of(accepted: Any, top_probs: Any = None) -> Predictions:
    accepted = np.asarray(accepted, dtype=np.float32)
    if top_probs is None:
        top_probs = np.zeros((len(accepted), 1))
    return Predictions(np.zeros(len(accepted), np.int16), accepted, np.asarray(top_probs, dtype=np.float16))


def distributions(seed: int, rows: int, width: int) -> np.ndarray:
    """[rows, width] a distribution in each row, in half precision as marks keep them."""
    source = np.random.default_rng(seed)
    return source.dirichlet(np.full(width, 0.5), rows).astype(np.float16).astype(np.float64)


def example_of(distribution: np.ndarray, source: Source = Source.SAMPLED, kept: int | None = None) -> TrainingExample:
    """An example whose target had that distribution at each place; of it the best `kept` tokens are on record."""
    order = np.argsort(-distribution, axis=1)[:, :kept]
    output_ids = order[:, 0].astype(np.int32)
    logs = np.log(np.maximum(np.take_along_axis(distribution, order, 1), 1e-7)).astype(np.float16)
    return TrainingExample(
        np.concatenate([[0], output_ids]).astype(np.int32), 1, order.astype(np.int32), logs, logs[:, 0], 5, source
    )


# ------------------------------------------------------------------------------------- distillation


@given(st.integers(0, 10**6), st.integers(1, 7), st.booleans())
def test_the_loss_is_the_divergence_over_the_tokens_kept_and_all_others(seed: int, top: int, weighed: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = (2 * torch.randn((3, 8), generator=generator)).log_softmax(-1)
    logits = 2 * torch.randn((3, 8), generator=generator)
    best = target.topk(top, dim=-1)
    weights = torch.rand(3, generator=generator) + 0.1 if weighed else torch.ones(3)
    found = distillation_loss(logits, best.indices, best.values, weights if weighed else None)
    by_place = [
        reference.divergence(p.exp().tolist(), q.softmax(-1).tolist(), kept.tolist())
        for p, q, kept in zip(target, logits, best.indices, strict=True)
    ]
    wanted = sum(w * x for w, x in zip(weights.tolist(), by_place, strict=True)) / float(weights.sum())
    assert float(found) == pytest.approx(wanted, abs=1e-4)


def test_the_loss_is_least_where_the_distributions_are_the_same() -> None:
    logits = torch.randn((4, 9), generator=torch.Generator().manual_seed(1), requires_grad=True)
    best = logits.detach().log_softmax(-1).topk(3, dim=-1)
    loss = distillation_loss(logits, best.indices, best.values)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-6


def test_a_token_that_the_target_never_emits_makes_no_infinity() -> None:
    logits = torch.zeros((1, 4), requires_grad=True)
    loss = distillation_loss(logits, torch.tensor([[0, 1]]), torch.tensor([[0.0, -torch.inf]]))
    loss.backward()
    assert bool(loss.isfinite())
    assert bool(logits.grad.isfinite().all())  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------------- weights


def _table(num: int) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(st.lists(chances, min_size=num, max_size=num), min_size=1, max_size=3)


@given(st.integers(1, 12).flatmap(_table), st.integers(1, 9))
def test_weights_are_those_of_every_chain_counted_by_itself(accepted: list[list[float]], depth: int) -> None:
    found = token_weights([predictions_of(one) for one in accepted], depth)
    wanted = reference.token_weights(accepted, depth, boosting._LIKELY, boosting._LEAST_WEIGHT)
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(("ranks", "predicted"), [([0] * 10, True), ([0] * 9 + [1], True), ([0] * 8 + [1, 1], False)])
def test_an_example_is_predicted_when_one_drafter_has_nearly_all_of_it(ranks: list[int], predicted: bool) -> None:
    one = Predictions(np.asarray(ranks, np.int16), np.ones(10, np.float32), np.zeros((10, 1), np.float16))
    none = Predictions(np.full(10, 7, np.int16), np.zeros(10, np.float32), np.zeros((10, 1), np.float16))
    assert is_predicted([none, one]) is predicted
    assert not is_predicted([none])


# ---------------------------------------------------------------------------------------- residuals


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 6))
def test_residuals_are_those_of_multi_step_sampling(seed: int, num_drafters: int, depth: int) -> None:
    places, width = 5, 6
    example = example_of(distributions(seed, places, width))
    p = np.exp(example.top_logprobs.astype(np.float64))
    q = [distributions(seed + 1 + i, places, width) for i in range(num_drafters)]
    accepted = np.random.default_rng(seed).random((num_drafters, places))
    found = np.exp(residual_logprobs(example, [predictions_of(*one) for one in zip(accepted, q, strict=True)], depth))
    coverage = reference.together(accepted.tolist(), depth, boosting._LIKELY)
    for place, share in enumerate(coverage):
        distribution, reached = reference.residual(p[place].tolist(), [one[place].tolist() for one in q])
        if 0 < reached < 0.01:
            continue  # half precision leaves too little of it
        wanted = share * reached * np.asarray(distribution) + (1 - share) * p[place]
        total = share * reached + 1 - share
        if total > 0.01:
            assert found[place] == pytest.approx(wanted / total, abs=5e-3)


def test_what_the_kept_tokens_leave_out_is_one_more_outcome_of_the_residual() -> None:
    example = example_of(np.asarray([[0.5, 0.2, 0.2, 0.1]]), kept=2)
    # The drafter has 0.1 and 0.2 on them, and 0.7 on the others, of which the target has 0.3: 0.4 stay, of the first.
    found = residual_logprobs(example, [predictions_of([0.3], [[0.1, 0.2]])], 4)
    assert np.exp(found[0]) == pytest.approx([1.0, 0.0], abs=2e-3)


def test_greedy_text_has_no_residual() -> None:
    example = example_of(distributions(3, 4, 5), Source.GREEDY)
    found = residual_logprobs(example, [predictions_of([0.9] * 4, distributions(4, 4, 5))], 4)
    assert np.array_equal(found, example.top_logprobs.astype(np.float32))


def test_a_drafter_that_is_the_target_leaves_no_number_undefined() -> None:
    example = example_of(distributions(3, 4, 5))
    same = predictions_of([1.0] * 4, np.exp(example.top_logprobs.astype(np.float32)))
    found = residual_logprobs(example, [same, same], 4)
    assert np.isfinite(found).all()
    assert np.exp(found[0]) == pytest.approx(np.exp(example.top_logprobs[0].astype(np.float32)), abs=2e-3), "p itself"


def test_a_miss_is_no_hit_in_a_large_vocabulary() -> None:
    vocab = 65_536
    example = TrainingExample(
        np.asarray([1, vocab - 1], dtype=np.int32),
        1,
        np.asarray([[vocab - 1]], dtype=np.int32),
        np.zeros((1, 1), dtype=np.float16),
        np.zeros(1, dtype=np.float16),
    )

    class Wrong(TrainableModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            return -torch.arange(vocab).float().expand(1, vocab)

    (predictions,) = predict(Wrong(make_model("llama")), [example])
    assert predictions.ranks.tolist() == [128]
    assert not predictions.hits.any()


# -------------------------------------------------------------------------------------- predictions


class Drafts:
    """The place of each step's root, the tokens drafted there, and the token that was emitted."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[int, list[int], int]]] = {}

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        place = request.num_output - num_generated
        self.found.setdefault(request.request_id, []).append((place, list(tree.tokens[1:]), request.output_ids[place]))

    def on_step(self, record: object) -> None:
        pass


def recorded(
    target: ModelRunner, drafter: ModelRunner, width: int, params: SamplingParams
) -> tuple[list[TrainingExample], list[list[tuple[int, list[int], int]]]]:
    """Examples of a few requests whose steps have `width` drafts at the root, and those drafts."""
    engine = make_engine(target, SmallModelDrafter(drafter, VOCAB), (width,))
    recorder, drafts = ExampleRecorder(VOCAB), Drafts()
    engine.observers += [recorder, drafts]
    requests = [make_request(f"r{i}", ids, params, seed=77 + i) for i, ids in enumerate(random_prompts([3, 9, 5]))]
    run(engine, requests)
    examples = [recorder.finish(request) for request in requests]
    return [one for one in examples if one is not None], [drafts.found[one.request_id] for one in requests]


@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("width", [1, 4])
def test_ranks_are_places_among_the_tokens_that_the_engine_drafts(
    model_folder: Callable[..., Path], runner_of: Callable[..., ModelRunner], width: int, params: SamplingParams
) -> None:
    examples, drafts = recorded(runner_of(), runner_of(noise=0.4), width, params)
    model = transformers_model(model_folder(noise=0.4))
    model.set_attn_implementation("eager")
    places = set()
    for found, of_request in zip(predict(TrainableModel(model), examples, rows=2), drafts, strict=True):
        for place, tokens, output_ids in of_request:
            if tokens:
                rank = tokens.index(output_ids) if output_ids in tokens else width
                assert min(int(found.ranks[place]), width) == rank
                places.add(rank)
    assert places == set(range(width + 1))  # all came up


def test_predictions_have_the_drafters_distribution_and_the_acceptance_probability(
    model_folder: Callable[..., Path], runner_of: Callable[..., ModelRunner]
) -> None:
    target, drafter = runner_of(), runner_of(noise=0.4)
    examples = [example for params in (SAMPLED, GREEDY) for example in recorded(target, drafter, 1, params)[0]]
    read = examples[0]
    examples.append(
        TrainingExample(
            read.tokens, read.num_prompt, read.top_ids, read.top_logprobs, read.generated_logprobs, source=Source.READ
        )
    )
    model = transformers_model(model_folder(noise=0.4))
    model.set_attn_implementation("eager")
    for example, found in zip(examples, predict(TrainableModel(model), examples, rows=3), strict=True):
        for i in range(example.num_output):
            before = example.tokens[: example.num_prompt + i].tolist()
            distribution = reference.last_logits(model, before).softmax(-1)
            output_ids = int(example.tokens[example.num_prompt + i])
            assert found.top_probs[i] == pytest.approx(distribution[example.top_ids[i].tolist()].numpy(), abs=1e-3)
            p = np.exp(example.top_logprobs[i].astype(np.float64))
            wanted = {
                Source.SAMPLED: min(
                    1.0, float(distribution[output_ids]) / float(np.exp(np.float64(example.generated_logprobs[i])))
                ),
                Source.GREEDY: float(distribution.argmax() == output_ids),
                Source.READ: float(np.minimum(p, distribution[example.top_ids[i].tolist()].numpy()).sum()),
            }[example.source]
            assert found.accepted[i] == pytest.approx(wanted, abs=5e-3)


def test_predictions_come_back_from_their_file_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    examples = [example_of(distributions(1, 4, 3)), example_of(distributions(2, 7, 3))]
    predictions = [
        predictions_of([0.25] * 4, distributions(3, 4, 3)),
        predictions_of([0.5] * 7, distributions(4, 7, 3)),
    ]
    save_predictions(predictions, path := tmp_path / "marks.safetensors")
    for saved, loaded in zip(predictions, load_predictions(path, examples), strict=True):
        for name in ("ranks", "accepted", "top_probs"):
            assert np.array_equal(getattr(saved, name), getattr(loaded, name))
    with pytest.raises(DamagedError, match="other examples"):
        load_predictions(path, [example_of(distributions(1, 5, 3)), examples[1]])
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[:-3], b"\xff" * 200):
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"marks\.safetensors cannot be read"):
            load_predictions(path, examples)


# -------------------------------------------------------------------------------- token maps


def batch_of(logits: torch.Tensor, top: int) -> Batch:
    """What the target of these logits says at each place, as a batch with its best tokens."""
    best, output_ids = logits.log_softmax(-1).topk(top, dim=-1), logits.argmax(-1)
    places = torch.arange(len(logits))
    return Batch(
        output_ids[None], torch.zeros_like(places), places, best.indices, best.values, output_ids, best.values[:, 0]
    )


def test_a_map_of_all_tokens_changes_no_distribution() -> None:
    batch = batch_of(torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(1)), 8)
    restricted, mass = restrict(batch, torch.arange(VOCAB), VOCAB)
    assert torch.equal(restricted.top_ids, batch.top_ids)
    torch.testing.assert_close(restricted.top_logprobs, batch.top_logprobs)
    torch.testing.assert_close(mass, torch.ones(5))


def test_the_loss_on_a_map_is_least_for_the_target_s_distribution_among_its_tokens() -> None:
    logits = 2 * torch.randn((6, VOCAB), generator=torch.Generator().manual_seed(2))
    token_map = torch.arange(0, VOCAB, 2)
    restricted, mass = restrict(batch_of(logits, VOCAB), token_map, VOCAB)
    torch.testing.assert_close(mass, logits.softmax(-1)[:, token_map].sum(-1))
    best = logits[:, token_map]
    least = distillation_loss(best, restricted.top_ids, restricted.top_logprobs)
    assert abs(float(least)) < 1e-4
    assert float(distillation_loss(best.roll(1, 1), restricted.top_ids, restricted.top_logprobs)) > 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_map_are_those_of_the_whole_head(tied: bool) -> None:
    model = make_model("llama", tie_word_embeddings=tied)
    batch = batch_of(torch.randn((7, VOCAB), generator=torch.Generator().manual_seed(3)), 4)
    token_map = torch.tensor([1, 5, 6, VOCAB - 1])
    mapped = TrainableModel(model, token_map)
    with torch.no_grad():
        whole, some, expanded = TrainableModel(model)(batch), mapped(batch), mapped.next_logits(batch)
    torch.testing.assert_close(some, whole[:, token_map])
    assert torch.equal(expanded[:, token_map], some)
    assert expanded.isinf().sum() == 7 * (VOCAB - 4)
