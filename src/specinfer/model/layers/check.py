"""Check that rebuilt layers compute what the family's definition computes, layer by layer.

Whole passes cannot show it. Trained models have a few hidden states thousands of times larger than the others (massive
activations, arXiv 2402.17762), and later layers amplify one layer's rounding in any implementation. So each layer gets
the same inputs in both models. The reference is the definition in float32, with its weights widened a part at a time.
Errors are compared with those of the definition in the model's own type.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from specinfer.model.batch import ForwardBatch, Piece, pack
from specinfer.model.forward import forward
from specinfer.model.kv_tensors import KVTensors, LayerShape
from specinfer.model.layers.families import trunk_of
from specinfer.model.sharding.placeholder import EmbeddingPlaceholder, Placeholder
from specinfer.model.sharding.stage import received
from specinfer.ops.quantization import BITS

_WIDENED = 2**18  # weights widened at a time, few enough for the processor's cache
_SMALL = 1e-3  # root mean square of the last token's hidden states, small so that the epsilon of norms matters
# Allowed error of a layer, as a share of what it adds to its inputs. Correct layers have less than half of it.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.004, torch.bfloat16: 0.015}
_ROUNDED = {8: 0.12, 4: 0.5}  # allowed error by bits of quantized weights, for the median token
_OWN = 2.0  # allowed multiple of the definition's own error
_MEDIAN = 0.5  # share of the allowed error that the median token may have, as a wrong layer errs for most tokens
_DISTURBED = 3  # further passes for that error; where one activation outweighs all, a single one is small by chance
_PASSES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}  # allowed error of a whole pass's logits


@dataclass(frozen=True, slots=True)
class Reference:
    """The results of a definition, recorded layer by layer.

    Attributes:
        inputs: [tokens, width] float32 each: inputs of the layers and the head, rounded to the model's type.
        outputs: [tokens, width] float32 each: outputs of the embedding (or the previous stage) and of the layers.
        own: [tokens] each: norm of the definition's error in the model's own type, by output; last that of the head. Of
            layers the largest of several, with inputs that differ in their last bits.
    """

    piece: Piece
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The place where a model's error is worst, and errors relative to what is computed there.

    Attributes:
        place: Description of the place.
        own_error: Error of the definition in the model's own type.
        allowed: Largest error that rounding may explain.
    """

    place: str
    error: float
    own_error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    def __str__(self) -> str:
        return (
            f"{self.place} errs by {self.error:.2%} measured against float32, where PyTorch's own errs by "
            f"{self.own_error:.2%} and up to {self.allowed:.2%} may be rounding"
        )


# Functions that refuse float32 inputs with weights of another type.
_NOT_MIXED = {
    functional.layer_norm, functional.rms_norm, functional.conv1d, torch.matmul, torch.bmm, torch.baddbmm,
    Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.baddbmm,
}  # fmt: skip


class Widened(TorchFunctionMode):
    """A mode that computes embeddings in float32, and what has float32 inputs, for weights of any type.

    So a definition's passes compute in float32.

    Args:
        keeps: Type to which float32 hidden states are not narrowed, as some definitions do before a norm, or None.
    """

    def __init__(self, keeps: torch.dtype | None = None) -> None:
        super().__init__()
        self.keeps = keeps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = None
        options = (*args[1:], *(kwargs or {}).values())
        if self.keeps is not None and func is Tensor.to and args[0].dtype == torch.float32 and _is_hidden(args[0]):
            result = args[0] if any(one is self.keeps for one in options) else None
        if func is functional.linear and args[0].dtype == torch.float32:
            result = _linear(*args, **(kwargs or {}))
        if func in _NOT_MIXED and _has_float32((*args, *options)):
            args, kwargs = tuple(map(_wide, args)), {name: _wide(value) for name, value in (kwargs or {}).items()}
        if result is None:
            result = func(*args, **(kwargs or {}))
        return result.float() if func is functional.embedding else result


def _has_float32(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in values)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_hidden(x: Tensor) -> bool:
    """Return whether numbers are hidden states [1, tokens, width], not weights that are read meanwhile."""
    return x.ndim == 3 and len(x) == 1


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return the float32 product, computed a part at a time, or None if PyTorch can compute it directly."""
    if weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32):
        return None
    rows = max(1, _WIDENED // weight.shape[1])
    result = torch.cat([functional.linear(x, part.float()) for part in weight.split(rows)], dim=-1)
    return result if bias is None else result + bias


@contextmanager
def recording(model: Any, reference: Reference, narrow: ForwardBatch) -> Iterator[None]:
    """Return a context in which a float32 pass through a definition that can be fused fills the reference.

    Args:
        narrow: The same pass with a store of its own, for the definition in its own type.
    """
    dtype = next(model.parameters()).dtype
    widened = Widened(None if dtype == torch.float32 else dtype)

    def as_own(value: Any) -> Any:
        if isinstance(value, MutableMapping):  # of keys and values that layers share: a copy, to which they add
            copied = copy(value)
            copied.update({name: as_own(one) for name, one in value.items()})
            return copied
        if isinstance(value, tuple):
            return tuple(map(as_own, value))
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            return value.to(dtype)
        return narrow if isinstance(value, ForwardBatch) else value

    def own(module: nn.Module, args: Any, kwargs: Any, wanted: Tensor) -> Tensor:
        if dtype == torch.float32:
            return torch.zeros_like(wanted)
        widened.keeps = None
        found = module.forward(*as_own(args), **{name: as_own(value) for name, value in kwargs.items()})
        widened.keeps = dtype
        found = found[0] if isinstance(found, tuple) else found
        error: Tensor = found[0].float() - wanted
        return error

    def begin(_layer: nn.Module, args: tuple[Tensor, ...], kwargs: Any) -> tuple[Any, Any]:
        add(args[0], torch.zeros(len(args[0][0]), device=args[0].device))
        return (reference.inputs[-1].unsqueeze(0), *args[1:]), kwargs

    def add(output: Tensor, error: Tensor) -> Tensor:
        reference.outputs.append(output[0])
        reference.own.append(error)
        reference.inputs.append(_as_input(output[0], dtype))
        return reference.inputs[-1].unsqueeze(0)

    def end(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        result = output[0] if isinstance(output, tuple) else output
        errors = [
            own(layer, (one, *args[1:]), kwargs, result[0] + (one - args[0])[0]).norm(dim=1).nan_to_num(0.0, 0.0)
            for one in _disturbed(args[0], dtype)
        ]
        following = add(result, torch.stack(errors).amax(0))
        return (following, *output[1:]) if isinstance(output, tuple) else following

    def end_head(head: nn.Module, args: Any, kwargs: Any, logits: Tensor) -> None:
        reference.own.append(_spread(own(head, args, kwargs, logits[0])))

    layers = [layer for layer in trunk_of(model).layers if not isinstance(layer, Placeholder)]
    with ExitStack() as stack:
        for embedding in (module for module in model.modules() if isinstance(module, EmbeddingPlaceholder)):
            embedding.dtype = torch.float32  # rotations take the type of its result
            stack.callback(setattr, embedding, "dtype", dtype)
        handles = [layers[0].register_forward_pre_hook(begin, with_kwargs=True)]
        handles += [layer.register_forward_hook(end, with_kwargs=True) for layer in layers]
        if not isinstance(model.lm_head, Placeholder):
            handles.append(model.lm_head.register_forward_hook(end_head, with_kwargs=True))
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(widened)
        yield


def _disturbed(hidden: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield inputs of this type, in float32, that differ from `hidden` in their last bits, and at last `hidden`.

    At last, because the keys and values of the last pass stay.
    """
    source = torch.Generator().manual_seed(0)
    for _ in range(0 if dtype == torch.float32 else _DISTURBED):
        noise = (torch.rand(hidden.shape, generator=source) - 0.5) * 2 * torch.finfo(dtype).eps
        yield (hidden * (1 + noise.to(hidden.device))).to(dtype).float()
    yield hidden


def _as_input(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the next layer's input [tokens, width]: close to this output, but small for the last token."""
    largest = torch.finfo(dtype).max
    hidden = hidden.clamp(-largest, largest)
    last = hidden[-1] * (_SMALL / hidden[-1].pow(2).mean().sqrt().clamp(min=1e-30))
    return torch.cat([hidden[:-1], last.unsqueeze(0)]).to(dtype).float()


def _spread(logits: Tensor) -> Tensor:
    """Return [tokens] norms of the logits after subtracting each token's mean, which changes no probability."""
    spread: Tensor = (logits - logits.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return spread


class _Judge:
    """A comparison of results with a reference; `verdict` is the worst result so far."""

    def __init__(self, reference: Reference, dtype: torch.dtype, bits: int | None, routed: Sequence[bool]) -> None:
        self._reference, self._is_rounded = reference, bits is not None
        self._routed = [dtype != torch.float32 and one for one in routed]
        self._tolerance = _TOLERANCES[dtype] if bits is None else max(_TOLERANCES[dtype], _ROUNDED[bits])
        self.verdict, self._ratio = Verdict("the embedding", 0.0, 0.0, self._tolerance), 0.0

    def watch(self, num_layers: int, hidden: Tensor) -> None:
        """Compare a layer's output (see `fused.Watch`), and replace it by the reference's input of the next layer."""
        inputs, wanted = self._reference.inputs, self._reference.outputs[num_layers]
        size = (wanted - inputs[num_layers - 1] if num_layers else wanted).norm(dim=1)
        own = self._reference.own[num_layers]
        # Adding to the input rounds the sum to the type of the hidden states.
        lost = torch.finfo(hidden.dtype).eps * wanted.norm(dim=1)
        place = f"layer {num_layers - 1}" if num_layers else "the embedding"
        is_routed = num_layers > 0 and self._routed[num_layers - 1]
        self._add(place, (hidden.float() - wanted).norm(dim=1), own, size, lost, is_routed)
        hidden.copy_(inputs[num_layers])

    def head(self, found: Tensor, wanted: Tensor) -> None:
        """Compare logits; both [tokens, vocab]."""
        size = _spread(wanted)
        self._add("the head", _spread(found - wanted), self._reference.own[-1], size, torch.zeros_like(size), False)

    def _add(self, place: str, error: Tensor, own: Tensor, size: Tensor, lost: Tensor, is_routed: bool) -> None:
        """Update the verdict; all [tokens]. The median token counts where rounding may choose another expert."""
        own = own.nan_to_num(0.0, 0.0)  # the definition's numbers are too large for its type
        allowed = self._tolerance * size + _OWN * own + lost + 1e-9
        ratios, order = (error / allowed).nan_to_num(torch.inf).sort()
        median = len(order) // 2
        for at, share in [(median, 1.0)] if self._is_rounded or is_routed else [(median, _MEDIAN), (-1, 1.0)]:
            if (ratio := float(ratios[at]) / share) > self._ratio:
                self._ratio = ratio
                errors = (error, own, share * allowed)
                self.verdict = Verdict(place, *(float(one[order[at]] / size[order[at]].clamp(1e-9)) for one in errors))


def judge_pass(place: str, found: Tensor, wanted: Tensor, exact: Tensor, dtype: torch.dtype) -> Verdict:
    """Compare the logits of two passes that differ only in rounding; all [rows, vocab].

    Args:
        wanted: Logits of the pass that is known to be correct.
        exact: Logits of that pass computed in float32.
    """
    size = _spread(exact).norm().clamp(min=1e-9)
    error, own = (float(_spread(one - exact).norm() / size) for one in (found, wanted))
    return Verdict(place, error, own, _PASSES[dtype] + _OWN * own + 1e-5)


def judge(
    model: nn.Module,
    reference: Reference,
    logits: Tensor,
    layer_shapes: tuple[LayerShape, ...],
    dtype: torch.dtype,
    rounded_to: str | None,
) -> Verdict:
    """Run a model that accepts a watch once over the reference's tokens, and return its verdict.

    Args:
        logits: [tokens, vocab] logits of the reference, or [tokens, width] of a stage without a head.
        rounded_to: Quantization of the model's weights, if the reference was made before it. None otherwise.
    """
    routed = [hasattr(layer, "call") and layer.call.has_experts for layer in getattr(model, "layers", ())]
    worst = _Judge(reference, dtype, None if rounded_to is None else BITS[rounded_to], routed)
    device = logits.device
    before = reference.outputs[0]
    hidden = None if getattr(model, "is_first", True) else received(model, len(before), dtype, device).copy_(before)
    with torch.inference_mode():
        store = KVTensors(layer_shapes, len(reference.piece.tokens), dtype, device)
        found = forward(model, pack([reference.piece], store, device), hidden, worst.watch)
        if len(reference.own) > len(reference.outputs):
            worst.head(found, logits)
    return worst.verdict
