"""Any method without an index as a drop-in for open_clip's loss: its trainer, its model and its checkpoints stay.

open_clip's model owns the temperature (``logit_scale``, always learned) and the bias (``logit_bias``); its trainer
owns the optimizer, the gradient's average over ranks and the checkpoints, which rank 0 writes alone. So the state of a
normalizer is whole on every rank here, and travels inside the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.methods import METHODS, Method, get_method
from neuclip_lib.models.base import unit_rows
from neuclip_lib.ranks import ONE, Ranks
from neuclip_lib.training import options as by_name
from neuclip_lib.training.distributed import ProcessRanks, gather
from neuclip_lib.training.open_clip_parts import Built, OpenClipOptions

PLACE = "neuclip_loss"
"""Name of the loss inside a model that it is attached to."""
STATE = "_extra_state"


def open_clip_loss(
    name: str, world_size: int = 1, rank: int = 0, *, accumulation: int = 1, **options: Any
) -> OpenClipLoss:
    """A method as open_clip's trainer calls its loss.

    Args:
        name: a method that needs no sample index.
        world_size: processes that train together, as open_clip's ``args.world_size``.
        rank: number of this one, as ``args.rank``.
        accumulation: calls in one optimizer step, each with the features of all of them: ``args.accum_freq``.
        options: fields of :class:`OpenClipOptions` by full name (``**{"prototypes.m": 512}``) or by a last part that is
            unique (``m=512``, ``rho=6.5``).

    Raises:
        ValueError: for an unknown method or one that needs an index, an unknown option, or a value that makes no sense.
    """
    return OpenClipLoss(name, world_size, rank, accumulation, by_name.override(OpenClipOptions(), options))


class OpenClipLoss(nn.Module):
    """See :func:`open_clip_loss`. It has no parameters and no buffers; sizes, device and dtype are the first batch's.

    Every rank keeps the normalizer's whole state and updates it with the whole batch: more work than shares of it, but
    open_clip asks rank 0 alone for the state, when no exchange is possible.

    Attributes:
        steps: optimizer steps in which the normalizer has seen a batch.
    """

    def __init__(self, name: str, world_size: int, rank: int, accumulation: int, options: OpenClipOptions) -> None:
        super().__init__()
        if accumulation < 1 or not 0 <= rank < world_size:
            raise ValueError(
                "accumulation must be at least 1 and rank from 0 to world_size - 1; "
                f"got accumulation={accumulation}, rank={rank}, world_size={world_size}"
            )
        self.method = _without_index(get_method(name))
        self.world_size, self.rank, self.accumulation, self.options = world_size, rank, accumulation, options
        # Built once in miniature, so that an option that makes no sense is refused here and not in the first step.
        options.temperature.of(4).check()
        Built(self.method, options, 2, 4, torch.zeros(()))
        self.steps = 0
        self._calls = 0  # of the current optimizer step
        self._built: Built | None = None
        self._waiting: Mapping[str, Any] | None = None  # a state that came before the first batch

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of the global batch, computed in float32 outside autocast.

        With ``W`` ranks every rank's value is that of the global batch, and the mean over ranks of the gradients is
        exact, which is what DistributedDataParallel forms. For members of the family the value is the loss without its
        constant: open_clip's own is larger by ``log(B-1)`` than that of ``openclip``. The normalizer sees the batch in
        the first call of an optimizer step, in training mode and with gradients enabled; never else.

        Args:
            image_features: ``[b, d]`` of this rank. Of any precision: unit length, lost to rounding in half precision,
                is restored in float32.
            text_features: ``[b, d]``, the same pairs.
            logit_scale: ``1/tau``, one number. Over the calls of an accumulated step its gradient, like that of the
                bias, adds up to that of one large batch (with open_clip's own loss: to as many times that).
            logit_bias: for methods that learn one (``siglip``). It cancels in every other method, so its gradient is 0.
            output_dict: give ``{"contrastive_loss": loss}``.

        Raises:
            ValueError: for shapes that do not fit or another batch size than the first, a missing bias, or when
                ``world_size`` and ``rank`` are not those of the process group.
        """
        with torch.autocast(image_features.device.type, enabled=False):
            loss = self._loss(image_features, text_features, logit_scale, logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss

    def attach(self, model: nn.Module) -> OpenClipLoss:
        """Let the state travel in ``model.state_dict()`` from now on, so in open_clip's checkpoints; gives itself.

        Call it before a checkpoint is loaded. A checkpoint without the state loads with a warning; one with it loads
        into a model without the loss after :func:`plain_weights`.

        Args:
            model: bare, or wrapped by DistributedDataParallel or ``torch.compile``.

        Raises:
            ValueError: when the model has a loss already.
        """
        inner = model
        while (within := inner._modules.get("_orig_mod", inner._modules.get("module"))) is not None:
            inner = within
        if PLACE in inner._modules:
            raise ValueError("a loss is attached to this model already; attach one, once")
        inner.add_module(PLACE, self)
        return self

    def get_extra_state(self) -> Mapping[str, Any]:
        """The state as tensors and plain values; the same on every rank, no rank waits for another."""
        if self._waiting is not None:
            return self._waiting
        kept = {} if self._built is None else self._built.state()
        return {"method": self.method.name, "steps": self.steps, **kept}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take back what ``get_extra_state`` gave; it waits for the next batch, which says the sizes.

        Raises:
            ValueError: for the state of another method; with the next batch, for one of other sizes.
        """
        if state["method"] != self.method.name:
            raise ValueError(
                f"the checkpoint holds the state of {state['method']!r}, this loss is {self.method.name!r}; to go on "
                "with its weights alone, load plain_weights(state_dict)"
            )
        self._waiting, self._built, self._calls = state, None, 0

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        if prefix + STATE in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *others)
        else:
            warnings.warn(
                f"the checkpoint has no {prefix}{STATE}: only weights are loaded, and the loss {self.method.name!r} "
                f"keeps its own state, that of {self.steps} steps",
                stacklevel=2,
            )

    def _loss(self, e1: Tensor, e2: Tensor, logit_scale: Tensor, logit_bias: Tensor | None) -> Tensor:
        e1, e2 = unit_rows(e1), unit_rows(e2)
        batch = gather(e1, e2, None, self._ranks())
        built = self._built or self._build(batch)
        if batch.size != built.batch_size:
            raise ValueError(
                f"this loss was built for a global batch of {built.batch_size} pairs, its first one, and got "
                f"{batch.size}; every batch must have that size (drop the last one)"
            )
        scale = self._scalar(logit_scale, e1)
        bias = None if logit_bias is None else self._scalar(logit_bias, e1)
        learns = self.training and torch.is_grad_enabled()
        loss = built.loss(e1, e2, batch, 1 / scale, bias, observe=learns and self._calls == 0)
        if learns:
            self.steps += self._calls == 0
            self._calls = (self._calls + 1) % self.accumulation
        # What a loss does not use has a gradient nevertheless: DistributedDataParallel would wait for it.
        loss = loss + 0 * (scale if bias is None else scale + bias)
        held = loss.detach()
        return loss + (batch.ranks.mean(held.clone()) - held)

    def _ranks(self) -> Ranks:
        group = dist.is_available() and dist.is_initialized()
        found = (dist.get_world_size(), dist.get_rank()) if group else (1, 0)
        if found != (self.world_size, self.rank):
            raise ValueError(
                f"the loss was built with world_size={self.world_size}, rank={self.rank}, but this process is rank "
                f"{found[1]} of {found[0]} in {'the' if group else 'no'} torch.distributed group; give "
                "open_clip_loss(...) args.world_size and args.rank (horovod is not supported)"
            )
        return ProcessRanks() if self.world_size > 1 else ONE

    def _build(self, batch: GlobalBatch) -> Built:
        with torch.inference_mode(False):
            built = Built(self.method, self.options, batch.e1.shape[1], batch.size, batch.e1)
            if self._waiting is not None:
                if "normalizer" in self._waiting:
                    built.load(dict(self._waiting))
                self.steps = int(self._waiting["steps"])
        self._built, self._waiting = built, None
        return built

    def _scalar(self, x: Tensor, like: Tensor) -> Tensor:
        """One number ``[]`` in full precision, whose gradient is shared among the calls of an optimizer step."""
        if x.numel() != 1:
            raise ValueError(f"logit_scale and logit_bias must be one number each, got {tuple(x.shape)}")
        x = x.reshape(()).to(like)
        held = x.detach()
        return held + (x - held) / self.accumulation


def plain_weights(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a ``state_dict`` without the loss's state: what a plain open_clip model loads."""
    return {key: value for key, value in state_dict.items() if not key.endswith(f"{PLACE}.{STATE}")}


def _without_index(method: Method) -> Method:
    if method.needs_index:
        others = ", ".join(other.name for other in METHODS.values() if not other.needs_index)
        raise ValueError(
            f"{method.name} keeps numbers per sample and needs an index, which open_clip's trainer does not give; "
            f"without an index: {others}. Or train with python -m neuclip_lib train --method {method.name}"
        )
    return method
