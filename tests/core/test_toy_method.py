"""A method is one entry in the table and one file: here a toy one is added that way, trained, resumed and evaluated."""

import torch

from neuclip_lib import presets
from neuclip_lib.cli import methods as command
from neuclip_lib.losses import Objective
from neuclip_lib.methods import METHODS, Method, Settings, bytes_per_sample, method_names
from neuclip_lib.normalizers import Normalizer
from neuclip_lib.parts import Contrastive
from neuclip_lib.training import Run, train
from neuclip_lib.training.evaluate import evaluate


class OneForAll(Normalizer):
    """Alpha is one number a side: the running mean of log g over everything seen."""

    def __init__(self, device):
        self.mean, self.seen = torch.zeros(2, device=device), 0

    def update(self, batch, log_g, tau):
        self.seen += 1
        self.mean += (torch.stack(batch.whole(log_g)).mean(1) - self.mean) / self.seen

    def __call__(self, e1, e2, log_g, batch, tau):
        alpha = self.mean[:, None].to(e1).expand(2, len(e1))
        return alpha[0], alpha[1]

    def state_dict(self):
        return {"mean": self.mean.clone(), "seen": self.seen}

    def load_state_dict(self, state):
        self.mean.copy_(state["mean"])
        self.seen = state["seen"]


def build(settings: Settings):
    return Contrastive(OneForAll(settings.device), Objective(0.0, "tau"))


TOY = Method("toy", "A toy", "one number for all", "this file", build)


def test_one_entry_and_one_file_make_a_method(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(METHODS, "toy", TOY)
    assert "toy" in method_names() and bytes_per_sample(TOY) == 0
    run = train(presets.tiny("toy"), tmp_path / "run", quiet=True)
    first, last = run.metrics("probe")[0]["loss"], run.metrics("probe")[-1]["loss"]
    assert last < first - 0.02
    assert run.load_normalizer().seen == 20
    # Taken up in the middle it ends with the same bits.
    half = train(presets.tiny("toy", keep_last=None), tmp_path / "half", quiet=True).folder
    whole = (half / "checkpoints/step_000020/model.safetensors").read_bytes()
    for step in (15, 20):
        for file in sorted((half / f"checkpoints/step_{step:06d}").glob("*")):
            file.unlink()
        (half / f"checkpoints/step_{step:06d}").rmdir()
    train(presets.tiny("toy", keep_last=None), half, quiet=True)
    assert (half / "checkpoints/step_000020/model.safetensors").read_bytes() == whole
    error = evaluate(Run(half), draw=False, quiet=True)["normalizer_error"]["estimators"]
    assert error["toy"]["image"]["correlation"] is None, "a constant estimate has no correlation"
    # It rides along with another method, and stands in the table that people read.
    watched = train(presets.tiny("openclip", shadows=("toy",)), tmp_path / "watched", quiet=True)
    assert watched.load_shadows()["toy"].seen == 20
    command.main([])
    assert "one number for all" in capsys.readouterr().out


def test_the_table_says_of_each_method_what_its_parts_keep(capsys):
    assert command.main(["--json"]) == 0
    import json

    table = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    expected = {"sogclr": 8, "fastclip-v0": 8, "fastclip-v1": 8, "fastclip-v3": 8, "scent": 8}
    expected |= {"isogclr": 32, "fastclip-v2": 32, "fastclip-v2-published": 32, "fastclip-v3-published": 8}
    for name in method_names():
        assert table[name]["bytes/sample"] == expected.get(name, 0), name
        assert (table[name]["index"] == "yes") == (name in expected), name
    assert table["fastclip-v2"]["temperature"] == "one a sample and side"
    assert table["sogclr"]["temperature"] == "fixed or annealed"
