"""Plan of the choices of tree="auto" on this machine, by batch size.

From the costs of passes and the acceptance rates, it finds the tree with the most expected tokens per second. While
serving, the engine updates costs and acceptance with each step, and gives more nodes to requests whose text is easy to
predict.
"""

from collections.abc import Sequence

from rich.console import Console
from torch import Tensor

from specinfer.bench.loop import write_files
from specinfer.bench.models import Models, find_models
from specinfer.bench.prompts import token_prompts
from specinfer.core.config import SpeculativeConfig, parse_tree
from specinfer.core.progress import ProgressCallback
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.llm import LLM
from specinfer.model.device import find_device
from specinfer.planning.options import PlanConfig
from specinfer.planning.plan_report import Choice, PlanReport, Streaming
from specinfer.planning.plan_table import plot_plan
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.base import FixedPolicy, budget_of
from specinfer.policy.cost_cache import cached_costs
from specinfer.policy.cost_model import CostModel
from specinfer.policy.optimizer import TreeOptimizer
from specinfer.policy.streamed_costs import StreamedCurve
from specinfer.reporting.environment import Environment
from specinfer.reporting.files import check_files, options_of
from specinfer.reporting.progress_bar import stage_bar
from specinfer.verify import Acceptance

# Every node that verification reaches has children of all ranks, so that each rank is tried equally often.
_SURVEY = "4,4"


def run_plan(config: PlanConfig, console: Console | None = None) -> PlanReport:
    """Measure costs and acceptance where unknown, compare all trees, and write the requested files.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used; the message names it. Nothing was measured.
        RuntimeError: A request failed.
    """
    check_files(config.json, config.plot)
    find_device(config.device)
    models = find_models(config.model, config.drafters)
    prompts = []
    if config.acceptance is None:
        prompts = token_prompts(models.target, config.max_tokens, count=config.num_prompts, prompts=config.prompts)
    with stage_bar(console) as progress:
        progress.stage("loading")
        with _load(config, models, progress.report_bytes) as llm:
            progress.stage("timing passes")
            assert llm.drafter is not None
            costs = cached_costs(llm.target, llm.drafter, fresh=config.remeasure, progress=progress.report_bytes)
            progress.stage("measuring acceptance")
            if config.acceptance is None:
                acceptance = _survey(llm, prompts, config.sampling_params())
            else:
                acceptance = AcceptanceModel.assumed(config.acceptance)
            environment = Environment.of(llm, models.drafter_parameters)
            streaming = _streaming(llm, costs)
    choices = tuple(choose(costs, acceptance, size) for size in config.batch_sizes)
    by_rank = tuple(acceptance.by_rank().tolist())
    report = PlanReport(costs, by_rank, choices, options_of(config), environment, streaming)
    write_files(report, config.json, config.plot, plot_plan)
    return report


def find_acceptance(config: PlanConfig, models: Models, console: Console | None = None) -> AcceptanceModel:
    """Return the given acceptance, or measure it with the models on this machine.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used; the message names it.
        RuntimeError: A request failed.
    """
    if config.acceptance is not None:
        return AcceptanceModel.assumed(config.acceptance)
    prompts = token_prompts(models.target, config.max_tokens, count=config.num_prompts, prompts=config.prompts)
    with stage_bar(console) as progress:
        progress.stage("loading")
        with _load(config, models, progress.report_bytes) as llm:
            progress.stage("measuring acceptance")
            return _survey(llm, prompts, config.sampling_params())


def _load(config: PlanConfig, models: Models, progress: ProgressCallback) -> LLM:
    return LLM(
        models.target,
        drafters=models.drafters,
        tree="1",
        dtype=config.dtype,
        quantization=config.quantization,
        drafter_quantization=config.drafter_quantization,
        device=config.device,
        offload=config.offload,
        memory_budget=config.memory_budget,
        offload_folder=config.offload_folder,
        progress=progress,
    )


def _streaming(llm: LLM, costs: CostModel) -> Streaming | None:
    """Return the streaming numbers of an offloaded target, or None. The model must still be loaded."""
    stream, curve = llm.target.loaded.stream, costs.target
    if stream is None:
        return None
    seconds, bend = float(curve(1)), curve.bend if isinstance(curve, StreamedCurve) else None
    return Streaming(stream.num_layers, stream.num_resident, stream.bytes_per_pass, seconds, bend)


class _Survey:
    """A policy that gives all requests the same wide tree and counts the ranks of accepted tokens."""

    reads_logits = False

    def __init__(self, budget: TreeBudget) -> None:
        self._fixed = FixedPolicy(budget)
        self.acceptance = AcceptanceModel()

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        return self._fixed.budgets(spans)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        for tree, acceptance in outcomes:
            if tree.num_guessed:
                self.acceptance.observe(tree, acceptance)

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        pass

    def reason(self, request: Request) -> str | None:
        return None


def _survey(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> AcceptanceModel:
    llm.speculate(SpeculativeConfig(tree=_SURVEY))
    assert llm.drafter is not None
    survey = llm.engine.policy = _Survey(budget_of(parse_tree(_SURVEY), llm.drafter.num_drafters))
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    for number, output in enumerate(outputs):
        if output.error is not None:
            raise RuntimeError(f"prompt {number}: {output.error}")
    return survey.acceptance


def choose(costs: CostModel, acceptance: AcceptanceModel, num_requests: int) -> Choice:
    """Return the tree that the optimiser chooses for each request of a batch with these costs and acceptance."""
    optimizer = TreeOptimizer(costs, acceptance)
    rates = optimizer.rates(num_requests)  # index 0 is plain decoding
    best = int(rates.argmax()) if optimizer.choose(num_requests).max_nodes else 0
    expected = optimizer.expected_tokens()
    return Choice(
        num_requests,
        int(optimizer.sizes.num_nodes[best]),
        int(optimizer.sizes.num_levels[best]),
        float(expected[best]),
        float(rates[best]),
        float(rates[0]),
    )
