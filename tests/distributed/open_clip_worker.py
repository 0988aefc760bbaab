"""open_clip's own training loop with our loss, in float64, on the processes that torchrun starts; rank 0 saves figures.

Every variant is compared with one process: a plain loop around the method's parts on the whole batches.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from open_clip import CLIP
from open_clip_train.train import train_one_epoch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import neuclip_lib as nc
from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.methods import Settings, get_method
from neuclip_lib.normalizers import AmortizedOptions, PrototypeOptions
from neuclip_lib.temperature import TemperatureOptions

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 60, "width": 32, "heads": 2, "layers": 1},
}
SIZE, STEPS, RHO = 12, 3, 1.0
PROTOTYPES = {"m": 14, "updates": 3, "restart_every": 2, "adagrad_eps": 1e-4}
AVERAGED = {"average": 0.5}
NPN = {f"prototypes.{name}": value for name, value in PROTOTYPES.items()}
OPTIONS: dict[str, dict[str, Any]] = {
    "openclip": {},
    "gcl-batch": {"rho": RHO},
    "neuclip": {"rho": RHO, **NPN},
    "neuclip-mixed": {"rho": RHO, **NPN},
    "amorlip": {"rho": RHO, "steps_per_epoch": 2, "epochs": 2, **AVERAGED},
    "siglip": {},
    "dhel": {},
    "kcl": {},
}
VARIANTS = [(name, 1) for name in OPTIONS] + [(name, 2) for name in ("openclip", "neuclip", "siglip")]


def fresh(name: str) -> CLIP:
    torch.manual_seed(0)
    bias = {"init_logit_bias": -3.0} if name == "siglip" else {}
    return CLIP(**copy.deepcopy(CONFIG), output_dict=True, **bias).double()


def whole_batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(epoch)
    return [
        (torch.randn(SIZE, 3, 16, 16, generator=g, dtype=torch.float64), torch.randint(1, 60, (SIZE, 8), generator=g))
        for _ in range(STEPS)
    ]


class Loader(list):
    """This rank's micro-batches, with what open_clip's loop asks of a loader."""

    def __init__(self, epoch: int, accumulation: int) -> None:
        own = SIZE // dist.get_world_size()
        rows = slice(dist.get_rank() * own, (dist.get_rank() + 1) * own)
        for images, texts in whole_batches(epoch):
            micro = own // accumulation
            self.extend(zip(images[rows].split(micro), texts[rows].split(micro), strict=True))
        self.num_batches, self.num_samples = len(self), SIZE * STEPS


class Recorded(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss, self.values = loss, []

    def forward(self, **inputs: Any) -> Any:
        found = self.loss(**inputs)
        self.values.append(found["contrastive_loss"].item())
        return found


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, eps=1e-3)


def epoch_of_its_loop(
    model: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer, number: int, accumulation: int
) -> list[float]:
    sizes = {"accum_freq": accumulation, "batch_size": SIZE // accumulation, "world_size": dist.get_world_size()}
    quiet = {"skip_scheduler": True, "distill": False, "grad_clip_norm": None, "log_every_n_steps": 1, "wandb": False}
    args = SimpleNamespace(device="cpu", precision="fp32", rank=dist.get_rank(), horovod=False, **sizes, **quiet)
    data = {"train": SimpleNamespace(set_epoch=lambda epoch: None, dataloader=Loader(number, accumulation))}
    recorded = Recorded(loss)
    train_one_epoch(model, data, recorded, number, optimizer, None, None, None, args)
    return recorded.values


def made(name: str, accumulation: int) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """As open_clip's main: the model, with the loss's state in it, then the wrapper, then the optimizer."""
    model = fresh(name)
    sizes = dist.get_world_size(), dist.get_rank()
    loss = nc.open_clip_loss(name, *sizes, accumulation=accumulation, **OPTIONS[name]).attach(model)
    wrapped = DistributedDataParallel(model)
    return wrapped, loss, adamw(wrapped.parameters())


def plainly(name: str) -> tuple[nn.Module, dict[str, Any], list[float]]:
    """One process: model, state of the normalizer, values of the loss."""
    temperature = TemperatureOptions(learned=True, rho=OPTIONS[name].get("rho", 0.0))
    parts = get_method(name).build(
        Settings(
            dim=16,
            batch_size=SIZE,
            temperature=temperature,
            prototypes=PrototypeOptions(**PROTOTYPES),
            amortized=AmortizedOptions(**AVERAGED),
            steps_per_epoch=2,
            epochs=2,
            dtype=torch.float64,
        )
    )
    model, values = fresh(name), []
    for bias in parts.learned.parameters():
        bias.data.copy_(model.logit_bias)
    optimizer = adamw([*model.parameters(), *parts.learned.parameters()])
    for images, texts in whole_batches(0):
        out = model(images, texts)
        e1, e2 = out["image_features"], out["text_features"]
        outcome = parts.loss(e1, e2, GlobalBatch(e1, e2), 1 / out["logit_scale"])
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        values.append(outcome.loss.item())
    for bias in parts.learned.parameters():
        model.logit_bias.data.copy_(bias)
    return model, {} if parts.normalizer is None else parts.normalizer.state_dict(), values


def flat(state: dict[str, Any]) -> Tensor:
    """The normalizer's tensors, but the draw's generator, as one vector."""
    found = [x.flatten().double() for key, x in state.items() if isinstance(x, Tensor) and key != "generator"]
    return torch.cat(found) if found else torch.zeros(1, dtype=torch.float64)


def gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def compared(name: str, accumulation: int) -> dict[str, float]:
    """Largest differences from one process; how far the weights and the scale moved."""
    wrapped, loss, optimizer = made(name, accumulation)
    values = epoch_of_its_loop(wrapped, loss, optimizer, 0, accumulation)
    model, state, expected = plainly(name)
    weights, exact, start = (dict(m.named_parameters()) for m in (wrapped.module, model, fresh(name)))
    own = flat(loss.get_extra_state().get("normalizer", {}))
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    return {
        "weights": max(gap(weights[key], x) for key, x in exact.items()),
        "values": max(abs(a - b) for a, b in zip(values[::accumulation], expected, strict=True)),
        "state": gap(own, flat(state)),
        "state over ranks": max(gap(own, other) for other in others),
        "moved": gap(exact["visual.proj"], start["visual.proj"]),
        "scale moved": gap(exact["logit_scale"], start["logit_scale"]),
    }


def resumed(name: str, folder: Path) -> dict[str, bool]:
    """A checkpoint that rank 0 writes alone, taken up by all: equal to the bit?"""
    wrapped, loss, optimizer = made(name, 1)
    epoch_of_its_loop(wrapped, loss, optimizer, 0, 1)
    file = folder / f"{name}.pt"
    if dist.get_rank() == 0:
        torch.save({"state_dict": wrapped.state_dict(), "optimizer": optimizer.state_dict()}, file)
    dist.barrier()
    epoch_of_its_loop(wrapped, loss, optimizer, 1, 1)
    again, other, its_optimizer = made(name, 1)
    checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    again.load_state_dict(checkpoint["state_dict"])
    its_optimizer.load_state_dict(checkpoint["optimizer"])
    epoch_of_its_loop(again, other, its_optimizer, 1, 1)
    pairs = zip(again.parameters(), wrapped.parameters(), strict=True)
    same = torch.tensor([all(torch.equal(a, b) for a, b in pairs)]).int()
    dist.all_reduce(same, dist.ReduceOp.MIN)
    states = [flat(one.get_extra_state()["normalizer"]) for one in (loss, other)]
    return {"weights": bool(same), "state": torch.equal(*states), "steps": other.steps == 2 * STEPS}


def refusal() -> str:
    """What a loss says that was built for one process."""
    e = nn.functional.normalize(torch.randn(4, 6), dim=1)
    try:
        nc.open_clip_loss("openclip")(e, e, torch.tensor(10.0))
    except ValueError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {
        "compared": {f"{name} x{accumulation}": compared(name, accumulation) for name, accumulation in VARIANTS},
        "resumed": {name: resumed(name, folder) for name in ("neuclip", "amorlip")},
        "refusal": refusal(),
    }
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
