"""Plan of the choices of tree="auto" on this machine, by batch size.

From the costs of passes and the acceptance rates, it finds the tree with the most expected tokens per second. While
serving, the engine updates costs and acceptance with each step, and gives more nodes to requests whose text is easy to
predict.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specinfer.bench.models import Models, find_models
from specinfer.bench.options import load_options_of
from specinfer.bench.prompts import PromptSet, find_prompts, kinds_for
from specinfer.core.config import OffloadConfig
from specinfer.llm import LLM
from specinfer.model.device import find_device
from specinfer.planning.offload_plan import command_of, offload_choices
from specinfer.planning.options import PlanConfig
from specinfer.planning.plan_report import Choice, Plan, Streaming
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.cost_cache import cached_costs
from specinfer.policy.cost_model import CostModel
from specinfer.policy.offload_choice import best_of
from specinfer.policy.rank_choice import RankChoice
from specinfer.policy.streamed_costs import StreamedCurve
from specinfer.reporting.environment import Environment
from specinfer.reporting.progress_bar import StageBar
from specinfer.setup.acceptance_profile import CHAT_PROMPTS


def make_plan(config: PlanConfig, progress: StageBar) -> Plan:
    """Measure costs and acceptance where unknown, and compare all trees.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used; the message names it. Nothing was measured.
        RuntimeError: A request failed.
    """
    find_device(config.device)
    offload = OffloadConfig(config.offload, config.memory_budget, config.offload_folder)
    models = find_models(config.model, config.drafters, offload, config.quantization, config.device)
    with _survey(config, models, progress) as survey:
        llm = survey.llm
        survey.progress.stage("timing passes")
        assert llm.drafter is not None
        costs = cached_costs(llm.target, llm.drafter, fresh=config.remeasure, progress=survey.progress.report_bytes)
        acceptance = survey.acceptance()
        by_rank = tuple(acceptance.by_rank().tolist())
        environment = Environment.from_llm(llm, models.drafter_parameters)
        streaming = _streaming(llm, costs)
        offloaded = offload_choices(llm, models, costs, acceptance)
    choices = tuple(choose(costs, acceptance, size) for size in config.batch_sizes)
    command = command_of(config, best_of(offloaded)) if offloaded else None
    return Plan(costs, by_rank, choices, config, environment, streaming, offloaded, command)


def find_acceptance(config: PlanConfig, models: Models, progress: StageBar) -> AcceptanceModel:
    """Return the given acceptance, or measure it with the models on this machine.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used; the message names it.
        RuntimeError: A request failed.
    """
    if config.acceptance is not None:
        return AcceptanceModel.assumed(config.acceptance)
    with _survey(config, models, progress) as survey:
        return survey.acceptance()


@dataclass(frozen=True, slots=True)
class _Survey:
    """Loaded models, and the prompts that acceptance is measured on."""

    llm: LLM
    config: PlanConfig
    prompts: PromptSet
    progress: StageBar

    def acceptance(self) -> AcceptanceModel:
        """Return the given acceptance, or measure it.

        Raises:
            RuntimeError: A request failed.
        """
        if self.config.acceptance is not None:
            return AcceptanceModel.assumed(self.config.acceptance)
        self.progress.stage("measuring acceptance")
        is_usual = self.config.prompts is None and self.config.temperature == 0
        profile = self.llm.measure_acceptance(
            self.prompts.token_ids, self.config.sampling_params(), self.text, keep=is_usual and bool(self.prompts.kinds)
        )
        return AcceptanceModel() if profile is None else AcceptanceModel.from_profile(profile)

    @property
    def text(self) -> str:
        """Name of the texts that acceptance is measured on."""
        return CHAT_PROMPTS if self.prompts.kinds else "texts to continue"


@contextmanager
def _survey(config: PlanConfig, models: Models, progress: StageBar) -> Iterator[_Survey]:
    """Load the models, after the prompts are checked."""
    prompts = PromptSet([])
    if config.acceptance is None:
        kinds = kinds_for(models.target, None, config.prompts)
        prompts = find_prompts(
            models.target, config.max_tokens, kinds, count=config.num_prompts, prompts=config.prompts
        )
    progress.stage("loading")
    with LLM(
        models.target,
        drafters=models.drafters,
        tree="1",
        **load_options_of(config, config.dtype),
        batch_invariant=config.batch_invariant,
        device=config.device,
        offload=config.offload,
        memory_budget=config.memory_budget,
        offload_folder=config.offload_folder,
        progress=progress.report_bytes,
    ) as llm:
        yield _Survey(llm, config, prompts, progress)


def _streaming(llm: LLM, costs: CostModel) -> Streaming | None:
    """Return the streaming numbers of an offloaded target, or None. The model must still be loaded."""
    stream, curve = llm.target.loaded.stream, costs.target
    if stream is None:
        return None
    seconds, bend = float(curve(1)), curve.bend if isinstance(curve, StreamedCurve) else None
    return Streaming(stream.num_layers, stream.num_resident, stream.bytes_per_pass, seconds, bend)


def choose(costs: CostModel, acceptance: AcceptanceModel, num_requests: int) -> Choice:
    """Return the tree that the optimiser chooses for each request of a batch with these costs and acceptance."""
    trees = RankChoice(costs, acceptance)
    rates = trees.rates(num_requests)  # index 0 is plain decoding
    best = int(rates.argmax()) if trees.choose(num_requests).max_nodes else 0
    tree, plain = trees.expected()[best], float(rates[0])
    tokens = 1.0 + acceptance.coverage * (float(tree.tokens) - 1.0)
    rate = trees.gain(num_requests, best) * plain
    return Choice(num_requests, int(tree.nodes), int(tree.levels), tokens, rate, plain)
