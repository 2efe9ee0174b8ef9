"""StepPrograms of steps on a device: of every kind of head, with numbers on the CPU, and without any."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from assistants import save_assistant
from heads import save_eagle3, save_tiny_block, save_tiny_head
from on_device import load_device_head
from pair_heads import save_eagle, save_mtp
from specinfer.core.tree import TreeBudget
from specinfer.drafters import HeadRunner, SelfRunner, make_drafter
from specinfer.drafters.assistant_drafter import AssistantRunner
from specinfer.drafters.vocabulary.token_map import SharedVocabulary
from specinfer.engine.device.draft_loop import DeviceDrafter
from specinfer.engine.device.draft_shape import PLAIN, shape_of, shape_of_guesses
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.logprobs import Asked
from specinfer.engine.device.masks import TokenMasks
from specinfer.engine.device.processing import Processing
from specinfer.engine.device.state import DeviceState
from specinfer.engine.device.step_programs import StepPrograms
from specinfer.model.heads.assistant import AssistantHead
from specinfer.model.heads.eagle3 import Eagle3Head
from specinfer.model.heads.load import load_head, taps_of
from specinfer.model.layers.device import DeviceDecoder
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops.logits import Adjustments

CPU, META = torch.device("cpu"), torch.device("meta")
_BLOCKS = ("dflash", "dspark")
ASSISTANT = "assistant, as PyTorch has it"


def save_head(folder: Path, kind: str) -> None:
    """Save a head of a kind, such as "EAGLE-3"; the folder of an MTP layer has its target, too."""
    if kind == "MTP":
        save_mtp(folder, "mimo")
    elif kind == "P-EAGLE":
        save_eagle3(folder, "speculators", eagle_aux_hidden_state_layer_ids=[0, 1, 2], parallel=True, mask_token_id=90)
    elif kind == ASSISTANT:
        save_assistant(folder)
    elif (method := kind.partition(",")[0].lower()) in _BLOCKS:
        save_tiny_block(folder, method)
    else:
        (save_eagle if kind == "EAGLE" else save_tiny_head)(folder)


def target_of(kind: str, folder: Path, model_folder: Callable[..., Path]) -> Path:
    """Return the folder of the target of a head that is saved in `folder`."""
    if kind == "MTP":
        return folder
    return model_folder("gemma4_text" if kind == ASSISTANT else "llama")


def on_meta(folder: Path, *, is_fused: bool = False) -> LoadedModel:
    loaded = load_model(folder, torch.bfloat16, CPU, native=False)
    if is_fused:
        loaded = replace(loaded, model=DeviceDecoder(loaded.model, loaded.max_position).eval())
    loaded.model.to(META)
    return replace(loaded, device=META)


def with_head(folder: Path, target: Path, *, is_fused: bool = False) -> tuple[LoadedModel, LoadedModel]:
    """Return a target that stores what a head reads, and the head."""
    loaded = load_model(target, torch.bfloat16, CPU, native=False)
    if is_fused:
        loaded = replace(loaded, model=DeviceDecoder(loaded.model, loaded.max_position).eval())
    head = (load_device_head if is_fused else load_head)(folder, loaded)
    return replace(loaded, taps=taps_of(loaded, [head])), head


def head_on_meta(folder: Path, target: Path, *, is_fused: bool = False) -> tuple[LoadedModel, LoadedModel]:
    """Return what `with_head` returns, without numbers."""
    loaded, head = with_head(folder, target, is_fused=is_fused)
    token_map = None if head.token_map is None else head.token_map.to(META)
    for one in (loaded, head):
        one.model.to(META)
    if isinstance(head.model, Eagle3Head) and head.model.mask_hidden is not None:
        head.model.mask_hidden = head.model.mask_hidden.to(META)
    return replace(loaded, device=META), replace(head, token_map=token_map, device=META)


def programs_of(
    loaded: LoadedModel,
    budget: TreeBudget | None,
    rows: int,
    processing: Processing = Processing.NONE,
    guess_depth: int = 0,
    asked: Asked | None = None,
    num_models: int = 1,
    rule: str | None = None,
    head: LoadedModel | None = None,
    copy: LoadedModel | None = None,
    *,
    is_sparse: bool = False,
    num_recomputed: int = 0,
    is_masked: bool = False,
) -> StepPrograms:
    """Return the programs of a step whose drafters are all alike.

    Args:
        loaded: The target, whose weights small models have, too.
        num_models: Number of drafters; 0 for lookups alone.
        head, copy: What drafts in place of small models: a head, or a copy of the target in its cache.
        is_sparse: Whether the copy attends to a part of the context.
        num_recomputed: Tokens before the root that recurrent layers compute once more.
        is_masked: Whether some requests have grammars or bad words.
    """
    target = ModelRunner(loaded, 512)
    drafter = ModelRunner(loaded, 512)
    if copy is not None:
        drafter = SelfRunner(copy, target, is_sparse=is_sparse)
    elif head is not None:
        is_assistant = isinstance(head.model, AssistantHead)
        drafter = AssistantRunner(head, target) if is_assistant else HeadRunner(head, target, 512)
    drafting = make_drafter([drafter], loaded.vocab_size)
    assert drafting is not None
    kind, most, shape = drafting.models[0].kind, 256 // rows, PLAIN
    if budget is not None and num_models:
        shape = shape_of([budget], most - 1, most, guess_depth, [kind] * num_models)
    elif budget is not None:
        shape = shape_of_guesses(budget.max_nodes, budget.max_depth, most - 1)
    token_map = None if head is None else head.token_map
    vocabulary = SharedVocabulary(loaded.vocab_size, loaded.vocab_size, token_map)
    state = DeviceState.empty(rows, 256, loaded.device, [kind] * num_models)
    adjustments = Adjustments.empty(rows, loaded.vocab_size, loaded.device)
    masks = TokenMasks(torch.zeros(256, loaded.vocab_size, device=loaded.device)) if is_masked else None
    size = LaunchSize(rows, shape, processing, asked, rule, num_recomputed=num_recomputed, is_masked=is_masked)
    drafters = [DeviceDrafter(drafter, kind, vocabulary.to_target)] * num_models
    return StepPrograms(size, state, target, drafters, adjustments, masks)
