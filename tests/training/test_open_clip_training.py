"""The drop-in for open_clip's loss, in open_clip's own training loop, with its source untouched."""

from __future__ import annotations

import copy
import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.loss import SigLipLoss
from open_clip_train import main as trainer
from open_clip_train.data import get_data
from open_clip_train.file_utils import pt_load
from open_clip_train.params import parse_args
from open_clip_train.train import train_one_epoch
from PIL import Image
from torch import Tensor, nn

import neuclip_lib as nc
from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.methods import Settings, get_method
from neuclip_lib.models import build_model, export_open_clip
from neuclip_lib.normalizers import AmortizedOptions, PrototypeOptions
from neuclip_lib.temperature import TemperatureOptions
from neuclip_lib.training.open_clip_loss import OpenClipLoss, plain_weights

pytestmark = pytest.mark.filterwarnings("ignore:.pin_memory. argument")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_open_clip.py"
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
NPN = {"m": 12, "prototypes.updates": 3, "restart_every": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "openclip": {},
    "gcl-batch": {"rho": 1.0},
    "neuclip": {"rho": 1.0, **NPN},
    "neuclip-mixed": {"rho": 1.0, "weight_cap": 1.5, **NPN},
    "amorlip": {"rho": 1.0, "average": 0.5, "steps_per_epoch": 2, "epochs": 2},
    "siglip": {},
    "dhel": {},
    "kcl": {},
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 pictures and their captions, as open_clip reads them."""
    folder, random = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    rows = ["filepath\ttitle"]
    for k in range(24):
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{k}.png")
        rows.append(f"{folder / f'{k}.png'}\tpicture number {k}")
    (folder / "pairs.csv").write_text("\n".join(rows) + "\n")
    return folder / "pairs.csv"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("configs")
    (folder / "tiny-for-a-test.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(folder)
    return "tiny-for-a-test"


class Training:
    """What open_clip's ``main`` prepares for its loop: model, arguments, data, optimizer."""

    def __init__(self, pairs: Path, tiny: str, *, bias: bool = False, size: int = 8, accumulation: int = 1) -> None:
        torch.manual_seed(0)
        extra = {"init_logit_scale": math.log(10), "init_logit_bias": -10.0} if bias else {}
        self.model, *transforms = open_clip.create_model_and_transforms(tiny, output_dict=True, **extra)
        csv = ["--model", tiny, "--train-data", str(pairs), "--dataset-type", "csv", "--workers", "0"]
        sizes = ["--batch-size", str(size), "--accum-freq", str(accumulation), "--log-every-n-steps", "1"]
        self.args = parse_args([*csv, *sizes, "--device", "cpu", "--precision", "fp32"])
        self.args.distributed, self.args.world_size, self.args.rank = False, 1, 0
        self.args.wandb = self.args.distill = False
        self.data = get_data(self.args, transforms, tokenizer=open_clip.get_tokenizer(tiny))
        # A large eps: AdamW would make steps of gradients that are rounding noise.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0, eps=1e-4)

    def epoch(self, loss: nn.Module, number: int = 0) -> None:
        torch.manual_seed(100 + number)
        train_one_epoch(self.model, self.data, loss, number, self.optimizer, None, lambda step: None, None, self.args)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def plainly(training: Training, name: str, options: dict[str, Any]) -> None:
    """One epoch by a loop of our own around the method's parts."""
    npn = {k.removeprefix("prototypes."): v for k, v in options.items() if k in {*NPN, "weight_cap"}}
    settings = Settings(
        dim=16,
        batch_size=8,
        temperature=TemperatureOptions(learned=True, rho=options.get("rho", 0.0)),
        prototypes=PrototypeOptions(**npn),
        amortized=AmortizedOptions(average=options.get("average", 0.999)),
        steps_per_epoch=options.get("steps_per_epoch", 1),
        epochs=options.get("epochs", 1),
    )
    parts = get_method(name).build(settings)
    model = training.model.train()
    training.optimizer.add_param_group({"params": list(parts.learned.parameters())})
    torch.manual_seed(100)
    for images, texts in training.data["train"].dataloader:
        out = model(images, texts)
        e1, e2 = out["image_features"], out["text_features"]
        training.optimizer.zero_grad()
        parts.loss(e1, e2, GlobalBatch(e1, e2), 1 / out["logit_scale"]).loss.backward()
        training.optimizer.step()
    for bias in parts.learned.parameters():
        model.logit_bias.data.copy_(bias)


def assert_close(made: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert made.keys() == expected.keys()
    gaps = {name: (made[name] - x).abs().max().item() for name, x in expected.items()}
    assert max(gaps.values()) <= tolerance, {name: gap for name, gap in gaps.items() if gap > tolerance}


def move(before: dict[str, Tensor], after: dict[str, Tensor], name: str) -> float:
    return (after[name] - before[name]).abs().max().item()


def state_of(loss: OpenClipLoss) -> dict[str, Any]:
    return copy.deepcopy(dict(loss.get_extra_state()))


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right


# In open_clip's loop


@pytest.mark.parametrize("name", OPTIONS)
def test_three_steps_of_its_loop_are_those_of_a_plain_loop(name: str, pairs: Path, tiny: str) -> None:
    theirs, ours = (Training(pairs, tiny, bias=name == "siglip") for _ in range(2))
    before = theirs.weights()
    theirs.epoch(nc.open_clip_loss(name, **OPTIONS[name]))
    plainly(ours, name, OPTIONS[name])
    assert_close(theirs.weights(), ours.weights(), 1e-5)
    assert move(before, theirs.weights(), "visual.proj") > 1e-3
    assert (move(before, theirs.weights(), "logit_scale") > 1e-4) == (name != "kcl")


@pytest.mark.parametrize(("name", "published"), [("openclip", open_clip.ClipLoss()), ("siglip", SigLipLoss())])
def test_three_steps_are_those_of_its_own_loss(name: str, published: nn.Module, pairs: Path, tiny: str) -> None:
    made, expected = (Training(pairs, tiny, bias=name == "siglip") for _ in range(2))
    made.epoch(nc.open_clip_loss(name))
    expected.epoch(published)
    assert_close(made.weights(), expected.weights(), 1e-5)


@pytest.mark.parametrize("name", ["openclip", "gcl-batch", "neuclip", "amorlip", "siglip"])
def test_accumulated_steps_equal_those_of_whole_batches(name: str, pairs: Path, tiny: str) -> None:
    """Temperature and bias included, which open_clip's own loss counts once for each call; AdamW would hide that."""
    bias = name == "siglip"
    whole, halves = Training(pairs, tiny, bias=bias), Training(pairs, tiny, bias=bias, size=4, accumulation=2)
    before = whole.weights()
    losses = [nc.open_clip_loss(name, accumulation=a, **OPTIONS[name]) for a in (1, 2)]
    for training, loss in zip((whole, halves), losses, strict=True):
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.05)
        training.epoch(loss)
    assert_close(halves.weights(), whole.weights(), 1e-5)
    assert losses[0].steps == losses[1].steps == 3
    assert move(before, whole.weights(), "logit_scale") > 1e-4


# The state travels


@pytest.mark.parametrize("name", ["neuclip", "amorlip", "siglip"])
def test_a_resumed_training_is_the_unbroken_one_to_the_bit(name: str, pairs: Path, tiny: str, tmp_path: Path) -> None:
    """Saved and loaded as open_clip's main does it."""
    bias, options = name == "siglip", OPTIONS[name]
    unbroken = Training(pairs, tiny, bias=bias)
    loss = nc.open_clip_loss(name, **options).attach(unbroken.model)
    unbroken.epoch(loss, 0)
    saved = {"epoch": 1, "state_dict": unbroken.model.state_dict(), "optimizer": unbroken.optimizer.state_dict()}
    torch.save(saved, tmp_path / "epoch_1.pt")
    unbroken.epoch(loss, 1)

    resumed = Training(pairs, tiny, bias=bias)
    again = nc.open_clip_loss(name, **options).attach(resumed.model)
    checkpoint = pt_load(str(tmp_path / "epoch_1.pt"), map_location="cpu")  # with weights_only, torch's default
    resumed.model.load_state_dict(checkpoint["state_dict"])
    resumed.optimizer.load_state_dict(checkpoint["optimizer"])
    assert equal(state_of(again), dict(checkpoint["state_dict"]["neuclip_loss._extra_state"]))
    resumed.epoch(again, 1)
    assert all(torch.equal(a, b) for a, b in zip(resumed.weights().values(), unbroken.weights().values(), strict=True))
    assert again.steps == 6 and equal(state_of(again), state_of(loss))

    # Nothing is left out by chance: without the state the same epoch ends elsewhere.
    if name != "siglip":
        other = Training(pairs, tiny)
        other.model.load_state_dict(plain_weights(checkpoint["state_dict"]))
        other.optimizer.load_state_dict(checkpoint["optimizer"])
        other.epoch(nc.open_clip_loss(name, **options), 1)
        assert move(other.weights(), unbroken.weights(), "visual.proj") > 1e-6


# The example


def test_the_example_trains_and_resumes_by_its_command_line(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = export_open_clip(build_model("nano", [], 32, 0), tmp_path / "nano", tau=0.07)
    mine = ["--neuclip-method", "neuclip", "--neuclip-options", "m=12", "rho=1.0", "--neuclip-tau", "0.05"]
    csv = ["--model", f"local-dir:{model}", "--dataset-type", "csv", "--train-data", str(pairs), "--batch-size", "4"]
    others = ["--workers", "0", "--device", "cpu", "--precision", "fp32", "--accum-freq", "2", "--warmup", "1"]
    logs = ["--logs", str(tmp_path), "--name", "run"]
    command = [str(EXAMPLE), *mine, *csv, *others, *logs]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, "--epochs", "1"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Contrastive_loss" in done.stderr + done.stdout
    # The second epoch in this process, which has what the first has to import.
    for name in ("create_model_and_transforms", "create_loss"):
        monkeypatch.setattr(trainer, name, getattr(trainer, name))
    monkeypatch.setattr(trainer, "setup_logging", lambda *arguments: None)
    monkeypatch.setattr(sys, "argv", [*command, "--epochs", "2", "--resume", "latest"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert not ended.value.code
    states = [torch.load(tmp_path / "run" / "checkpoints" / f"epoch_{k}.pt")["state_dict"] for k in (1, 2)]
    carried = [state["neuclip_loss._extra_state"] for state in states]
    assert [state["steps"] for state in carried] == [3, 6]
    assert [state["normalizer"]["counters"][3] for state in carried] == [3, 6]
    assert carried[0]["batch_size"] == 8
    for state in states:
        assert state["logit_scale"].item() == pytest.approx(-math.log(0.05), rel=1e-6)
    open_clip.create_model(f"local-dir:{model}").load_state_dict(plain_weights(states[1]))
