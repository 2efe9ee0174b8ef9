"""The drafters that were loaded for a target, and the policy that sets how much they propose."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from specinfer.core.config import SpeculativeConfig
from specinfer.core.drafter_forms import TOKEN_MAP_AUTO, TOKEN_MAP_FULL
from specinfer.core.errors import ModelError
from specinfer.core.lookups import LOOKUPS, is_model, is_self, reserved_names
from specinfer.core.progress import ProgressCallback
from specinfer.core.rules import AUTO, is_random
from specinfer.core.tree_shape import TreeShape
from specinfer.drafters import HeadRunner, MergedDrafter, SelfRunner, make_drafter
from specinfer.drafters.growth.draft_sampling import CHOSEN
from specinfer.drafters.lookup.corpus import Corpus
from specinfer.drafters.merge.merged import window_of
from specinfer.drafters.remote.drafter import RemoteModel
from specinfer.drafters.vocabulary.token_map import Vocabulary
from specinfer.engine.device.conditions import why_not
from specinfer.engine.device.draft_programs import DraftPrograms, use_draft_programs
from specinfer.model.graphs.sizes import max_rows
from specinfer.model.load import LoadedModel
from specinfer.model.recurrent.layers import is_hybrid
from specinfer.model.runner import ModelRunner, TargetRunner
from specinfer.policy.acceptance import AcceptanceProfile
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import NO_DRAFTER, TREE_OFF, FixedPolicy, SpeculationPolicy
from specinfer.policy.cost_cache import cached_costs
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.learned_choice import LearnedChoice, load_policy_network
from specinfer.policy.network import PolicyNetwork
from specinfer.policy.request_policy import make_policy
from specinfer.policy.step_log import LoggedPolicy, StepLogFile
from specinfer.setup.acceptance_profile import ProfileSource
from specinfer.setup.model_names import find_drafter

# Rows of a pass, and the most seconds it may take where acceptance is measured at start.
_CHECKED_ROWS, _MOST_SECONDS = 8, 0.7
logger = logging.getLogger(__name__)


def check_drafters(
    config: SpeculativeConfig,
    names: Sequence[str],
    drafter_quantization: str | None,
    drafter_token_map: int | str | Path,
    *,
    adapts: bool,
    has_corpus: bool,
) -> None:
    """Check that these drafters support the settings.

    Raises:
        ValueError: They do not; the message names the field.
    """
    num_models = len(set(names) - set(LOOKUPS))
    of_models = {
        "drafter_quantization": drafter_quantization is not None,
        "drafter_token_map": drafter_token_map not in (TOKEN_MAP_AUTO, TOKEN_MAP_FULL),
    }
    for name, is_given in of_models.items():
        if not config.shape.is_off and is_given and not num_models:
            raise ValueError(f"{name}: no drafter is a model; leave it out, or name one in drafters")
    if not config.shape.is_off and config.max_asked is not None and num_models < 2:
        raise ValueError(
            f"select: {config.select} chooses among drafters that are models, and there are fewer than two; name "
            "another in drafters, or leave select out"
        )
    if adapts and not num_models:
        raise ValueError("adapt_drafters: no drafter is a model; leave it out, or name one in drafters")
    if has_corpus and not config.shape.is_off and "suffix" not in names:
        raise ValueError('suffix_corpus: only "suffix" searches it; name that in drafters, too, or leave it out')


def find_drafters(names: Sequence[str], target: Path) -> dict[str, Path]:
    """Return the folders of the model drafters among these names, by name.

    Args:
        target: Folder of the target, which is that of its MTP layer too.

    Raises:
        ModelError: A model does not exist.
        ValueError: Two names stand for the same model.
    """
    found = {name: _find(name) for name in names if name not in reserved_names()}
    if len({folder.resolve() for folder in found.values()}) < len(found):
        raise ValueError(f"drafters: two of {', '.join(found)} are one model; leave one out")
    return {name: found.get(name, target) for name in names if name not in LOOKUPS}


def _find(name: str) -> Path:
    try:
        return find_drafter(name)
    except ModelError as error:
        raise ModelError(f"drafters: {str(error).removeprefix('model: ')}") from error


def _cost_of(kind: ModelRunner, target: LoadedModel) -> float:
    """Return the cost of a level of drafts as a fraction of a target pass, if both read every weight once."""
    num_bytes = float(kind.loaded.num_bytes)
    if not isinstance(kind, HeadRunner):
        return num_bytes / target.num_bytes
    head = kind.head
    if head.embedding is not None:
        num_bytes -= head.embedding.nbytes  # of which a few rows are read
    if head.lm_head is None:
        num_bytes += target.num_bytes / target.num_parameters * target.vocab_size * head.width  # the target's own
    return num_bytes / target.num_bytes / (1 if head.block is None else head.block.max_depth)


def _window_of(kind: str | ModelRunner | RemoteModel, config: SpeculativeConfig) -> int | None:
    """Return the tokens of a long prompt that a drafter reads at least, or None for all, as steps on a GPU need."""
    if not isinstance(kind, ModelRunner):
        return None
    return config.window(on_cpu=kind.loaded.device.type == "cpu" and kind.padded is None)


class Speculator:
    """The drafters loaded for a target, the active ones merged, and the policy that uses them.

    Args:
        target: The runner of the target.
        kinds: Runners of small models, those on other ranks, and names of lookups, by the names that they were
            requested with.
        vocabularies: Vocabularies of the small models of this process.
        step_log: File to record what is known before each step and its outcome, or None for no record.
        progress: Callback for the progress of long work.
        profiles: Source of measured acceptance, or None if it is assumed.
        corpus: Texts of the operator that "suffix" searches, or None.
    """

    def __init__(
        self,
        target: TargetRunner,
        kinds: Mapping[str, str | ModelRunner | RemoteModel],
        vocabularies: Mapping[str, Vocabulary],
        step_log: str | Path | None = None,
        progress: ProgressCallback | None = None,
        profiles: ProfileSource | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        self._corpus = corpus
        self._profiles, self._found = profiles, dict[tuple[str, ...], AcceptanceProfile | None]()
        self._config = SpeculativeConfig()
        self._target = target
        self._progress = progress
        self._kinds = kinds
        self._vocabularies = vocabularies
        self._step_log = None if step_log is None else StepLogFile(step_log)
        self._predictor: PolicyNetwork | None = None
        self._is_off = False  # set by `configure`
        self.drafter: MergedDrafter | None = None
        self.policy: SpeculationPolicy = FixedPolicy()
        self.draft_programs: list[DraftPrograms] = []

    @property
    def small_models(self) -> dict[str, ModelRunner]:
        """Model drafters of this process, by the names they were loaded with."""
        return {name: kind for name, kind in self._kinds.items() if isinstance(kind, ModelRunner)}

    @property
    def why_not_captured(self) -> dict[str, str | None]:
        """Why passes of model drafters of this process are not captured, by name; None where they are."""
        captured = [programs.runner for programs in self.draft_programs]
        return {name: None if one in captured else one.why_not_captured for name, one in self.small_models.items()}

    def configure(self, config: SpeculativeConfig) -> None:
        """Make a fresh drafter and policy, with nothing learned yet.

        Args:
            config: New settings. Its drafters are some of those that were loaded; None is all of them.

        Raises:
            ValueError: The config selects among drafters of which some are on other ranks, or lets the engine choose
                their rule, or the step log cannot record it.
        """
        kinds, target = [self._kinds[name] for name in self._names(config)], self._target.loaded
        if config.max_asked is not None and any(isinstance(kind, RemoteModel) for kind in kinds):
            raise ValueError(
                'select: drafters on other ranks are not scored; load the model with drafter_placement="first", or '
                "leave select out"
            )
        copies = any(isinstance(kind, SelfRunner) for kind in kinds)
        if config.max_asked is not None and copies and is_hybrid(self._target.loaded.model):
            raise ValueError(
                "select: copies of a target that has layers without attention are not scored; leave them out of "
                "drafters, or select"
            )
        if config.verification == AUTO and any(isinstance(kind, RemoteModel) for kind in kinds):
            raise ValueError(
                "verification: drafters on other ranks draw for one rule; name coupled or traversal in place of auto, "
                'or load the model with drafter_placement="first"'
            )
        self._config, self.drafter = config, self._make_drafter(config)
        self.draft_programs = use_draft_programs(self.drafter, target.vocab_size)
        policy = config.speculation_policy
        self._predictor = None if policy is None else load_policy_network(policy, self.drafter)
        self._is_off = config.shape.is_off
        self.policy = self.make_policy(config.shape)
        if (summary := self.policy.summary()) is not None:
            logger.info("%s", summary)
        if self._step_log is not None and self.drafter is not None:
            if self.drafter.selection is not None or (config.draft_sampling not in CHOSEN and len(kinds) > 1):
                raise ValueError(
                    "step_log: what each drafter would have guessed is known only where all guess freely; leave select "
                    "out, and use coupled or target-only verification"
                )
            self.policy = LoggedPolicy(self.policy, self.drafter, self._step_log.note)
            self._step_log.start(self.policy.tracker)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the active drafters, as they were requested."""
        return self._names(self._config)

    def _names(self, config: SpeculativeConfig) -> tuple[str, ...]:
        """Return the names of the drafters that are active."""
        return () if config.shape.is_off else tuple(self._kinds if config.drafters is None else config.drafters)

    def _make_drafter(self, config: SpeculativeConfig) -> MergedDrafter | None:
        """Return the active drafters, merged, with nothing learned yet."""
        names = self._names(config)
        kinds, target = [self._kinds[name] for name in names], self._target.loaded
        return make_drafter(
            kinds,
            target.vocab_size,
            [Path(name).name for name in names],
            config.draft_sampling,
            [self._vocabularies.get(name) for name in names],
            max_asked=config.max_asked,
            ngram_sizes=(config.prompt_lookup_min, config.prompt_lookup_max),
            windows=[_window_of(kind, config) for kind in kinds],
            costs=[_cost_of(kind, target) if isinstance(kind, ModelRunner) else 0 for kind in kinds],
            corpus=self._corpus,
            rule_draws=is_random(config.verification),
        )

    def _find_profile(self, costs: CostModel) -> AcceptanceProfile | None:
        """Return the acceptance of the active drafters that was measured, if any was."""
        names = self._names(self._config)
        if names not in self._found:
            if self._profiles is None or self.drafter is None or any(_is_remote(self._kinds[name]) for name in names):
                return None
            is_quick = isinstance(costs.target, Curve) and float(costs.target(_CHECKED_ROWS)) < _MOST_SECONDS
            make = partial(self._make_drafter, self._config)
            self._found[names] = self._profiles.find(self.drafter, make, may_measure=is_quick)
        return self._found[names]

    def keep(self, profile: AcceptanceProfile) -> None:
        """Expect this acceptance of the active drafters, also in the next 30 days."""
        assert self._profiles is not None
        assert self.drafter is not None
        self._found[self._names(self._config)] = profile
        self._profiles.kept(self.drafter).write(profile.as_dict())

    def make_policy(self, shape: TreeShape, *, fresh: bool = False, learned: bool = True) -> SpeculationPolicy:
        """Return the policy for a tree shape.

        Args:
            shape: Tree shape. "auto" needs costs: those kept from an earlier run on this machine, or measured now.
            fresh: Measure the costs in any case.
            learned: Let the learned policy, if one was given, choose for "auto"; otherwise costs alone decide.
        """
        if self.drafter is None:
            return FixedPolicy(why_off=self._why_off)
        make_costs = partial(_make_costs, self._target, self.drafter, fresh=fresh, progress=self._progress)
        names = [one.name for one in self.drafter.drafters]
        lookups, has_models = LOOKUPS.keys() & names, any(map(is_model, names))
        has_self = any(map(is_self, names))
        drafter, network = self.drafter, self._predictor if learned else None
        find_profile = weakref.WeakMethod(self._find_profile)  # the policy, which keeps `auto`, is an attribute of self

        def auto(costs: CostModel) -> AutoPolicy:
            choice = None if network is None else LearnedChoice(network, costs, drafter)
            find = find_profile() if choice is None else None
            profile = None if find is None else find(costs)
            return AutoPolicy(
                costs, lookups, has_models=has_models, has_self=has_self, network=choice, profile=profile,
                remedy=_remedy(names),
            )  # fmt: skip

        return make_policy(shape, make_costs, drafter.num_drafters, auto)

    @property
    def _why_off(self) -> str:
        return TREE_OFF if self._is_off else NO_DRAFTER

    def prepare(self) -> None:
        """Measure now the costs that latency targets and a request with its own "auto" need.

        Slow passes of a streamed target are not measured for latency targets alone.
        """
        self.policy.prepare()
        if self.drafter is None and self._target.loaded.stream is None:
            costs = cached_costs(self._target, None, progress=self._progress)
            self.policy = AutoPolicy(costs, why_off=self._why_off)

    def close(self) -> None:
        """Close the step log."""
        if self._step_log is not None:
            self._step_log.close()


def _remedy(names: Sequence[str]) -> str | None:
    """Return what to do where drafting with these drafters loses; lookups rest by themselves."""
    if not any(map(is_model, names)):
        return None
    alone = next((name for name in names if name in LOOKUPS), "suffix")
    return f"leave the drafter out (--drafter none), or name a lookup alone (--drafter {alone})"


def _is_remote(kind: str | ModelRunner | RemoteModel) -> bool:
    return isinstance(kind, RemoteModel)


def _make_costs(
    target: TargetRunner, drafter: MergedDrafter, *, fresh: bool, progress: ProgressCallback | None
) -> CostModel:
    """Return the costs of steps, with the limit of those on a device."""
    costs = cached_costs(target, drafter, fresh=fresh, progress=progress)
    costs.window = window_of(drafter)
    if why_not(target, drafter) is None:
        assert isinstance(target, ModelRunner)
        costs.max_rows = max_rows(has_states=bool(target.tensors.states.pools))
    return costs
