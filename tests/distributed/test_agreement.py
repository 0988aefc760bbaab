"""Real processes agree with one: every gradient, the whole normalizer state and the weights, for every method."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from neuclip_lib.ranks import ONE

HERE = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("agreement", HERE / "agreement.py")
assert SPEC and SPEC.loader
agreement = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(agreement)


def launched(size: int, out: Path) -> dict[str, Any]:
    """What torchrun with ``size`` processes saved."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    done = subprocess.run(
        [*command, str(HERE / "agreement.py"), str(out)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return agreement.everything(ONE, controls=False)


@pytest.fixture(scope="module", params=[2, 3, 4])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launched(request.param, tmp_path_factory.mktemp("ranks") / "made.pt")


def tensors(value: Any, where: str = "") -> dict[str, torch.Tensor]:
    """All tensors in nested containers, by place; plain numbers are made tensors."""
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        return {where: torch.as_tensor(value)}
    return {name: x for key, item in pairs for name, x in tensors(item, f"{where}/{key}").items()}


def gaps(made: dict[str, Any], expected: dict[str, Any], part: str) -> dict[str, float]:
    """Largest difference over the largest entry, by tensor. A gradient is measured against the longest of its step."""
    got, want = tensors(made[part]), tensors(expected[part])
    assert got.keys() == want.keys()
    found = {}
    for name, exact in want.items():
        a, b = got[name].double(), exact.double()
        finite = torch.isfinite(b)
        assert torch.equal(finite, torch.isfinite(a)), name
        scale = b[finite].abs().max().item() if finite.any() else 1.0
        if part == "gradients" and "scalar" not in name:
            peers = [
                x for other, x in want.items() if other.split("/")[1] == name.split("/")[1] and "scalar" not in other
            ]
            scale = max(x.abs().max().item() for x in peers)
        found[name] = ((a - b)[finite].abs().max().item() if finite.any() else 0.0) / max(scale, 1e-12)
    return found


PARTS = ("seen", "gradients", "tau gradients", "normalizer", "temperature", "weights")


@pytest.mark.parametrize("name", agreement.variants())
def test_every_number_equals_that_of_one_process(name: str, alone: dict[str, Any], together: dict[str, Any]) -> None:
    for part in PARTS:
        worst = {key: gap for key, gap in gaps(together[name], alone[name], part).items() if not gap <= 1e-10}
        assert not worst, f"{part}: {dict(list(worst.items())[:5])}"
    moved = alone[name]["gradients"][0]
    assert max(g.abs().max().item() for g in moved.values()) > 1e-6, "nothing was compared"


@pytest.mark.parametrize("method", ["openclip", "neuclip"])
@pytest.mark.parametrize(
    ("control", "encoders", "tau"),
    [
        ("no column part", 0.1, 0.0),
        ("pairs twice", 0.05, 0.0),
        ("tau attached", 0.0, 0.01),
    ],
)
def test_each_common_mistake_is_seen(
    method: str, control: str, encoders: float, tau: float, alone: dict[str, Any], together: dict[str, Any]
) -> None:
    if f"{method}: {control}" not in together:
        pytest.skip("made with two processes")
    made = gaps(together[f"{method}: {control}"], alone[method], "gradients")
    of_first = {name: gap for name, gap in made.items() if name.startswith("/0/")}
    of_scalars = max(gap for name, gap in of_first.items() if "scalar" in name)
    of_encoders = max(gap for name, gap in of_first.items() if "scalar" not in name)
    assert of_encoders >= encoders and of_scalars >= tau
    assert tau == 0 or of_encoders < 1e-10
