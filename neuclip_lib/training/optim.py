"""AdamW with its parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuclip_lib.temperature import TemperatureOptions

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class OptimOptions:
    """AdamW and its schedule.

    Args:
        lr: peak learning rate of the encoders.
        weight_decay: on matrices and kernels; never on biases, norms or the temperature.
        beta1: decay of the gradient's mean.
        beta2: decay of the squared gradient's mean.
        eps: added to the root of the latter.
        warmup: steps of linear growth of the learning rate, before the cosine.
        clip_norm: largest norm of the encoders' gradient; None leaves it as it is.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    warmup: int = 0
    clip_norm: float | None = None

    def check(self) -> None:
        """Raise ValueError, naming the value, when an option makes no sense."""
        if not self.lr > 0:
            raise ValueError(f"optim.lr must be above 0, got {self.lr}")
        if self.weight_decay < 0:
            raise ValueError(f"optim.weight_decay must not be negative, got {self.weight_decay}")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"optim.{name} must be in [0, 1), got {beta}")
        if not self.eps > 0:
            raise ValueError(f"optim.eps must be above 0, got {self.eps}")
        if self.warmup < 0:
            raise ValueError(f"optim.warmup must not be negative, got {self.warmup} steps")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optim.clip_norm must be above 0 or None, got {self.clip_norm}")


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """What the peak learning rate is multiplied by in step ``step`` (0 is the first) of ``steps``.

    Linear up to 1 in the last of ``warmup`` steps, then half a cosine that would reach 0 in the step after the last.
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """The model's trainable parameters as two AdamW groups, with and without weight decay.

    No decay on whatever has fewer than two dimensions, on biases and on the parameters of norms: pulling those to zero
    moves the function itself, not its complexity.
    """
    of_norms = {id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_free = parameter.ndim < 2 or id(parameter) in of_norms or name.rsplit(".", 1)[-1] == "bias"
        (free if is_free else decayed).append(parameter)
    groups = [("decayed", decayed, weight_decay), ("free", free, 0.0)]
    return [{"name": name, "params": members, "weight_decay": decay} for name, members, decay in groups if members]


def build_optimizer(
    model: nn.Module,
    temperature: Iterable[nn.Parameter],
    options: OptimOptions,
    temperature_options: TemperatureOptions,
    learned: Iterable[nn.Parameter] = (),
) -> torch.optim.AdamW:
    """AdamW over the encoders and, when they are learned, the temperature and a loss's scalars.

    The scalars are in groups of their own without decay. They share the temperature's learning rate.

    Args:
        temperature: its parameters.
        temperature_options: its ``lr`` is the peak for ``log(1/tau)``, None meaning a quarter of the encoders'; with
            ``lr_rule`` ``step_thresh`` that group has neither warm-up nor cosine.
        learned: further scalars, such as SigLIP's bias.
    """
    groups = [dict(group, peak=options.lr) for group in parameter_groups(model, options.weight_decay)]
    peak = options.lr / 4 if temperature_options.lr is None else temperature_options.lr
    held = temperature_options.lr_rule == "step_thresh"
    for name, scalars, constant in (("temperature", temperature, held), ("loss", learned, False)):
        if members := [parameter for parameter in scalars if parameter.requires_grad]:
            groups.append({"name": name, "params": members, "weight_decay": 0.0, "peak": peak, "constant": constant})
    if not groups:
        raise ValueError("nothing to train: every parameter of the model and the temperature is frozen")
    device = groups[0]["params"][0].device
    return torch.optim.AdamW(
        groups,
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=device.type in ("cpu", "cuda"),
    )


def set_learning_rates(optimizer: torch.optim.Optimizer, step: int, steps: int, warmup: int) -> None:
    """Give every group its learning rate for ``step``; the optimizer keeps no position in the schedule."""
    factor = learning_rate_factor(step, steps, warmup)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * (1.0 if group.get("constant") else factor)


def encoder_gradient_norm(model: nn.Module, clip_norm: float | None) -> Tensor:
    """Norm of the encoders' gradient, which is scaled down to ``clip_norm`` when it is longer."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm
