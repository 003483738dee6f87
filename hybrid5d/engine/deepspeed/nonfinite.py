"""Steps whose numbers are not finite: refused by all ranks before the optimizer writes, and where they come from.

DeepSpeed skips a step whose gradient norm is not finite (deepspeed.md: Skipped steps). What its norm does not see (the
loss, copies that it counts once) is looked at here, and a step is refused by giving it such a norm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from hybrid5d.engine.deepspeed.optimizer_state import OptimizerState
from hybrid5d.models.batch import LocalBatch
from hybrid5d.parallel.agree import world_axis
from hybrid5d.parallel.collectives import max_scalars
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.shard import pieces_of

_LAYER = re.compile(r"\.layers\.(\d+)(?:\.|$)")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")  # of DeepSpeed's engine
END = 1 << 30  # after every decoder layer


def finite(x: Tensor) -> bool:
    """Whether all values are."""
    return all_finite([x])


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all values of all are; one pass, nothing of their size is allocated, the host waits once."""
    ends = [end for x in tensors if x.numel() and x.is_floating_point() for end in torch.aminmax(x)]
    return not ends or bool(torch.stack([end.double() for end in ends]).isfinite().all())


def _gradients(optimizer: Any) -> list[Tensor]:
    """This rank's reduced gradients, which DeepSpeed takes the norm of. None is offloaded (plan/rules.py)."""
    if isinstance(optimizer, BF16_Optimizer):
        return list(optimizer.fp32_groups_gradients_flat)
    return [g for group in optimizer.averaged_gradients.values() for g in group or () if g is not None]


@torch.no_grad()
def refuse_not_finite(optimizer: Any, loss: Tensor, always: bool = False) -> None:
    """Let DeepSpeed skip this update where loss or gradients of any rank are not finite. Collective over the world.

    Called when gradients are reduced, before they are clipped. `always`: skip it whatever they are.
    """
    gradients = _gradients(optimizer)
    fine = all_finite([loss, *gradients])
    (refused,) = max_scalars([float(always or not fine)], world_axis(), loss.device)
    if refused:
        for gradient in gradients:
            gradient.fill_(torch.inf)


@dataclass(frozen=True, order=True)
class Fault:
    """A tensor that is not finite; the least one came first.

    Attributes:
        micro: number of the micro-batch; -1: before any.
        backward: in its backward pass.
        place: of the layer, in the order of the pass.
        turn: when its rank saw it.
        what: the tensor.
    """

    micro: int
    backward: bool
    place: int
    turn: int
    what: str


class Inspector:
    """Looks at every tensor of a step that is run again: weights, inputs and outputs of layers, their gradients.

    Attributes:
        micro: the micro-batch that is computed now; the engine sets it.
        first: the first fault seen on this rank.
    """

    def __init__(self, module: nn.Module):
        self.module, self.micro = module, -1
        self.first: Fault | None = None
        self._turn = 0
        for param in module.parameters():
            for name, part in _parts(param, param):
                self.check(part, name, _layer(name))

    def begin(self, micro: int, batch: LocalBatch) -> None:
        """A forward pass begins."""
        self.micro = micro
        for name, column in batch.columns.items():
            self.check(column, f"column {name} of the rows", -1)

    def check(self, x: Any, what: str, layer: int, backward: bool = False) -> None:
        """Note `x` (a tensor, or a tuple with some) where it is not finite."""
        for part in x if isinstance(x, tuple | list) else (x,):
            if isinstance(part, Tensor) and not finite(part.detach()):
                self._turn += 1
                found = Fault(self.micro, backward, -layer if backward else layer, self._turn, what)
                self.first = min(found, self.first or found)

    def check_gradients(self, gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        """After a backward pass: what has accumulated for each parameter."""
        for param in self.module.parameters():
            self.check_gradient(param, gradient(param))

    def check_gradient(self, param: nn.Parameter, gradient: Tensor | None) -> None:
        """One parameter's."""
        if gradient is not None:
            for name, part in _parts(param, gradient):
                self.check(part, f"gradient of {name}", _layer(name), backward=True)

    @contextmanager
    def watching(self, parameters: bool) -> Iterator[None]:
        """Hooks on layers; on `parameters` too, where autograd makes all gradients and they do not stay."""
        hooks: list[Any] = []
        for module in self.module.modules():
            if name := _label(module):
                hooks += [
                    module.register_forward_pre_hook(self._before(name)),
                    module.register_forward_hook(self._after(name)),
                ]
        for param in self.module.parameters():
            if parameters and param.requires_grad:
                hooks.append(param.register_hook(lambda grad, param=param: self.check_gradient(param, grad)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, name: str) -> Callable[..., None]:
        layer = _layer(name)
        return lambda module, args: self.check(args, f"input of {name}", layer)

    def _after(self, name: str) -> Callable[..., None]:
        layer = _layer(name)

        def look(module: nn.Module, args: Any, output: Any) -> None:
            self.check(output, f"output of {name}", layer)
            for part in output if isinstance(output, tuple | list) else (output,):
                if isinstance(part, Tensor) and part.requires_grad:
                    part.register_hook(
                        lambda grad: self.check(grad, f"gradient of the output of {name}", layer, backward=True)
                    )

        return look


class Inspected:
    """Of an engine: it refuses steps that are not finite, and can run one again to see why.

    Attributes:
        inspector: while a step is run again.
        products: gradients of matrices are added up beside autograd, and stay till the update.
    """

    inspector: Inspector | None = None
    products: bool
    optimizer: Any
    module: Any
    total_loss: Any

    def inspect(self, batches: Sequence[LocalBatch], scales: Sequence[float]) -> Fault | None:
        """Run a step again, without its update, and look at its tensors: the first fault on this rank.

        Weights, moments, loss scale and random state stay as they are. Collective over the world.
        """
        engine: Any = self
        state = OptimizerState(self.optimizer, Axis.single())
        scaler, counters = state.loss_scaler(), {name: getattr(engine, name) for name in _COUNTERS}
        self.inspector = Inspector(self.module)
        try:
            with torch.random.fork_rng(), self.inspector.watching(parameters=not self.products):
                engine.train_step(batches, scales)
            return self.inspector.first
        finally:
            self.inspector = None
            state.set_loss_scaler(scaler)
            for name, value in counters.items():
                setattr(engine, name, value)

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        refuse_not_finite(self.optimizer, self.total_loss, always=self.inspector is not None)
        super()._take_model_step(*args, **kwargs)  # type: ignore[misc]


def _parts(param: nn.Parameter, values: Tensor) -> Iterable[tuple[str, Tensor]]:
    """(Hugging Face name, part) of a tensor laid out as a parameter; whole where it is cut another way (ZeRO 3)."""
    pieces = pieces_of(param)
    if values.shape == getattr(param, "ds_shape", param.shape):
        return [(piece.name, piece.local_view(values)) for piece in pieces]
    return [(" and ".join(piece.name for piece in pieces), values)]


def _label(module: nn.Module) -> str:
    """A layer's name by the tensors it holds; "" for one without."""
    names = sorted({piece.name.rpartition(".")[0] for p in module.parameters() for piece in pieces_of(p)})
    if len(names) < 2:
        return "".join(names)
    parts = [name.split(".") for name in names]
    depth = next((i for i, level in enumerate(zip(*parts)) if len(set(level)) > 1), 0)
    label, below = ".".join(parts[0][:depth]), [part[depth:] for part in parts]
    return f"{label} ({', '.join(b[0] for b in below)})" if all(len(b) == 1 for b in below) else label


def _layer(name: str) -> int:
    """Where a tensor stands in the model: -1 the embedding, then the decoder layers, then the rest."""
    match = _LAYER.search(name)
    return int(match[1]) if match else -1 if "embed" in name else END
