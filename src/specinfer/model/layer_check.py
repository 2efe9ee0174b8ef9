"""Whether layers that were put together anew compute what the family's definition does, judged layer by layer.

Whole passes cannot tell: trained models have hidden states thousands of times as large as the others (massive
activations, arXiv 2402.17762), and what one layer rounds there the next ones make large, whoever computes them. So each
layer gets the same inputs. The measure is the definition in float32, its weights widened a part at a time; errors are
compared with those of the definition in the model's own type.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from specinfer.kernels.quantization import BITS
from specinfer.model.batch import ForwardBatch, Piece, pack
from specinfer.model.forward import forward
from specinfer.model.kv_cache import KVTensors, LayerShape
from specinfer.model.left_out import EmbeddingLeftOut, LeftOut

_WIDENED = 2**18  # weights widened at once: they stay in the processor's cache
_SMALL = 1e-3  # root mean square of the last token's hidden states: there the epsilon of norms shows
# What a layer may err by, as a share of what it adds to its inputs; right ones err by less than half of it.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.004, torch.bfloat16: 0.015}
_ROUNDED = {8: 0.12, 4: 0.5}  # the same of weights rounded to so many bits, on half of the tokens
_OWN = 2.0  # times what the definition errs by
_PASSES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}  # what logits of a whole pass may err by


@dataclass(frozen=True, slots=True)
class Reference:
    """What a definition computes, each layer by itself.

    Attributes:
        inputs: [tokens, width] float32 each, of the layers and the head; numbers that the model's type has.
        outputs: [tokens, width] float32 each, of the embedding (or the stage before) and the layers.
        own: [tokens] each: the norm of what the definition errs by in the model's type; in the end that of the head.
    """

    piece: Piece
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where a model errs most, as shares of what is computed there.

    Attributes:
        place: In words.
        own_error: Of the definition.
        allowed: The largest error that may be rounding.
    """

    place: str
    error: float
    own_error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed  # not so of NaN

    def __str__(self) -> str:
        return (
            f"{self.place} errs by {self.error:.2%} measured against float32, where PyTorch's own errs by "
            f"{self.own_error:.2%} and up to {self.allowed:.2%} may be rounding"
        )


class _Widened(TorchFunctionMode):
    """Computes embeddings in float32, and linear layers whose inputs are, whatever the type of their weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = None
        if func is functional.linear and args[0].dtype == torch.float32:
            result = _linear(*args, **(kwargs or {}))
        if result is None:
            result = func(*args, **(kwargs or {}))
        return result.float() if func is functional.embedding else result


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """None: PyTorch can do it as it is."""
    if weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32):
        return None
    rows = max(1, _WIDENED // weight.shape[1])
    result = torch.cat([functional.linear(x, part.float()) for part in weight.split(rows)], dim=-1)
    return result if bias is None else result + bias


def widened() -> TorchFunctionMode:
    """A context in which a definition's embeddings and linear layers, and so its passes, are computed in float32."""
    return _Widened()


@contextmanager
def recording(model: Any, reference: Reference, narrow: ForwardBatch) -> Iterator[None]:
    """Meanwhile a pass through a definition, of the shape that can be fused, is in float32 and makes the reference.

    Args:
        narrow: The same pass with a store of its own, for the definition in its own type.
    """
    dtype = next(model.parameters()).dtype

    def as_own(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(as_own, value))
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            return value.to(dtype)
        return narrow if isinstance(value, ForwardBatch) else value

    def own(module: nn.Module, args: Any, kwargs: Any, wanted: Tensor) -> Tensor:
        if dtype == torch.float32:
            return torch.zeros_like(wanted)
        found = module.forward(*as_own(args), **{name: as_own(value) for name, value in kwargs.items()})
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

    def end(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        return add(output, own(layer, args, kwargs, output[0]).norm(dim=1))

    def end_head(head: nn.Module, args: Any, kwargs: Any, logits: Tensor) -> None:
        reference.own.append(_spread(own(head, args, kwargs, logits[0])))

    layers = [layer for layer in model.model.layers if not isinstance(layer, LeftOut)]
    with ExitStack() as stack:
        for embedding in (module for module in model.modules() if isinstance(module, EmbeddingLeftOut)):
            embedding.dtype = torch.float32  # rotations have the type of what it returns
            stack.callback(setattr, embedding, "dtype", dtype)
        handles = [layers[0].register_forward_pre_hook(begin, with_kwargs=True)]
        handles += [layer.register_forward_hook(end, with_kwargs=True) for layer in layers]
        if not isinstance(model.lm_head, LeftOut):
            handles.append(model.lm_head.register_forward_hook(end_head, with_kwargs=True))
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(widened())
        yield


def _as_input(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, width] what the next layer gets: near what the one before has made, and the last token's small."""
    largest = torch.finfo(dtype).max
    hidden = hidden.clamp(-largest, largest)
    last = hidden[-1] * (_SMALL / hidden[-1].pow(2).mean().sqrt().clamp(min=1e-30))
    return torch.cat([hidden[:-1], last.unsqueeze(0)]).to(dtype).float()


def _spread(logits: Tensor) -> Tensor:
    """[tokens] the norm of logits; what is added to all of a token's changes nothing."""
    spread: Tensor = (logits - logits.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return spread


class _Judge:
    """Compares with a reference; the worst that it saw is `verdict`."""

    def __init__(self, reference: Reference, dtype: torch.dtype, bits: int | None) -> None:
        self._reference, self._is_rounded = reference, bits is not None
        self._tolerance = _TOLERANCES[dtype] if bits is None else max(_TOLERANCES[dtype], _ROUNDED[bits])
        self.verdict, self._ratio = Verdict("the embedding", 0.0, 0.0, self._tolerance), 0.0

    def watch(self, num_layers: int, hidden: Tensor) -> None:
        """See `fused.Watch`; the next layer gets what the reference says."""
        inputs, wanted = self._reference.inputs, self._reference.outputs[num_layers]
        size = (wanted - inputs[num_layers - 1] if num_layers else wanted).norm(dim=1)
        own = self._reference.own[num_layers]
        # The sum with what comes in is rounded to the type of hidden states.
        lost = torch.finfo(hidden.dtype).eps * wanted.norm(dim=1)
        place = f"layer {num_layers - 1}" if num_layers else "the embedding"
        self._add(place, (hidden.float() - wanted).norm(dim=1), own, size, lost)
        hidden.copy_(inputs[num_layers])

    def head(self, found: Tensor, wanted: Tensor) -> None:
        """Both [tokens, vocab]."""
        size = _spread(wanted)
        self._add("the head", _spread(found - wanted), self._reference.own[-1], size, torch.zeros_like(size))

    def _add(self, place: str, error: Tensor, own: Tensor, size: Tensor, lost: Tensor) -> None:
        """All [tokens]."""
        own = own.nan_to_num(0.0, 0.0)  # the definition's numbers are too large for its type
        allowed = self._tolerance * size + _OWN * own + lost + 1e-9
        ratios, order = (error / allowed).nan_to_num(torch.inf).sort()
        at = len(order) // 2 if self._is_rounded else -1
        if (ratio := float(ratios[at])) > self._ratio:
            self._ratio = ratio
            shares = [float(one[order[at]] / size[order[at]].clamp(min=1e-9)) for one in (error, own, allowed)]
            self.verdict = Verdict(place, *shares)


def judge_pass(place: str, found: Tensor, wanted: Tensor, exact: Tensor, dtype: torch.dtype) -> Verdict:
    """Compares logits of two passes, which are the same but for rounding; all [rows, vocab].

    Args:
        wanted: Those of the pass that is right.
        exact: Those of that pass computed in float32.
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
    """Runs a model that can be watched once over the reference's tokens.

    Args:
        logits: [tokens, vocab] of the reference; or [tokens, width] of a stage without a head.
        rounded_to: The quantization of its weights, where the reference was made before they were rounded.
    """
    worst = _Judge(reference, dtype, None if rounded_to is None else BITS[rounded_to])
    device = logits.device
    hidden = None if getattr(model, "is_first", True) else reference.outputs[0].clone()
    with torch.inference_mode():
        store = KVTensors(layer_shapes, len(reference.piece.tokens), dtype, device)
        found = forward(model, pack([reference.piece], store, device), hidden, worst.watch)
        if len(reference.own) > len(reference.outputs):
            worst.head(found, logits)
    return worst.verdict
