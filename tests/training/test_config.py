"""Bad configs have a clear error before any work; presets are what the text says; JSON keeps everything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from neuclip_lib import presets
from neuclip_lib.normalizers import PrototypeOptions
from neuclip_lib.temperature import TemperatureOptions
from neuclip_lib.training import OptimOptions, TrainConfig
from neuclip_lib.training.config import differences, from_json, read_config, to_json


def test_the_laptop_preset_is_the_written_one_for_every_method() -> None:
    for method in ("openclip", "gcl-batch", "neuclip"):
        config = presets.laptop(method)
        assert (config.method, config.data, config.model, config.seed) == (method, "icons", "small", 0)
        assert (config.batch_size, config.steps, config.augment_shift, config.threads) == (128, 700, 2, 1)
        assert (config.optim.lr, config.optim.warmup, config.optim.weight_decay) == (2e-3, 50, 0.1)
        assert (config.temperature.init, config.temperature.learned) == (0.05, False)
        assert config.prototypes == PrototypeOptions(
            m=512, updates=10, restart_every=200, lr=1e-2, eps=1e-6, weight_cap=5.0, detach_alpha=False
        )
        assert (config.split, config.train_split, config.eval_split) == ("final", "train+validation", "test")


def test_a_run_that_tunes_trains_without_validation_and_reads_it() -> None:
    config = presets.laptop(split="tune")
    assert (config.train_split, config.eval_split) == ("train", "validation")


def test_json_there_and_back_keeps_every_field() -> None:
    config = presets.tiny(
        "openclip",
        shadows=["neuclip", "gcl-batch"],
        data_options={"n": 1000, "seed": 3},
        learned=True,
        weight_cap=None,
        clip_norm=0.1 + 0.2,
    )
    again = from_json(json.loads(json.dumps(to_json(config), allow_nan=False)))
    assert again == config
    assert repr(again) == repr(config)
    assert set(to_json(config)) == {field.name for field in dataclasses.fields(TrainConfig)}


def test_overrides_by_full_and_by_short_name() -> None:
    config = presets.laptop(m=256, learned=True, steps=10, warmup=5, **{"optim.lr": 1, "prototypes.lr": 0.5})
    assert (config.prototypes.m, config.temperature.learned, config.steps) == (256, True, 10)
    assert (config.optim.lr, config.prototypes.lr, config.optim.warmup) == (1.0, 0.5, 5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"method": "neuclp"}, r"no method 'neuclp'.*did you mean 'neuclip'"),
        ({"data": "icon"}, r"no data set 'icon'.*did you mean 'icons'"),
        ({"model": "smal"}, "'smal'.*closest names: small"),
        ({"stepz": 3}, r"no option 'stepz'; did you mean 'steps'"),
        ({"lr": 1e-3}, r"'lr' may mean optim.lr or temperature.lr or prototypes.lr"),
        ({"batch_size": 1}, "batch_size must be at least 2, got 1"),
        ({"batch_size": 2.5}, "batch_size must be int, got 2.5"),
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"augment_shift": -2}, "augment_shift must be at least 0"),
        ({"log_every": 0}, "log_every must be at least 1"),
        ({"keep_last": 0}, "keep_last must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"split": "tset"}, "split must be 'final' or 'tune', got 'tset'"),
        ({"optim.lr": 0.0}, "optim.lr must be above 0"),
        ({"init": 0.001}, r"init=0.001 is outside its bounds \[0.01, 1.0\]"),
        ({"low": 0.5, "high": 0.1}, "0 < low < high"),
        ({"m": 0}, "prototypes.m must be at least 1"),
        ({"shadows": ("neuclp",)}, r"no method 'neuclp'.*did you mean 'neuclip'"),
        ({"shadows": ("neuclip",)}, "shadows must be different methods other than 'neuclip'"),
        ({"shadows": ("openclip", "openclip")}, "shadows must be different methods"),
        ({"shadows": ("siglip", "openclip", "kcl")}, "siglip, kcl has none; leave it out"),
        ({"temperature.low": 1e-300}, r"temperature bounds must lie in 1e-06..1e\+06.*got low=1e-300"),
        ({"temperature.high": 1e300}, r"temperature bounds must lie in"),
        ({"device": "cuda:77"}, "no device 'cuda:77' on this machine; choose auto or one of cpu"),
        ({"device": "gpu"}, "no device 'gpu' on this machine"),
        ({"precision": "float64"}, "precision must be 'float32' or 'bfloat16' or 'float16', got 'float64'"),
    ],
)
def test_a_bad_value_is_refused_by_name_before_any_work(overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        presets.laptop(**overrides)


def test_an_unknown_preset_is_refused_with_the_closest() -> None:
    with pytest.raises(ValueError, match=r"no preset 'labtop'; did you mean 'laptop'\?; the presets are laptop, tiny"):
        presets.get_preset("labtop")


def test_a_warm_up_longer_than_the_run_is_doubted_and_a_shorter_one_is_not() -> None:
    assert "warm-up of 50 steps is longer than the run of 20" in presets.laptop(steps=20).doubts()[0]
    assert presets.laptop(steps=50).doubts() == []
    assert presets.laptop(steps=0).doubts() == []


@pytest.mark.parametrize(
    ("method", "overrides", "doubted"),
    [
        ("neuclip", {"temperature.learned": True}, True),
        ("neuclip", {"temperature.learned": True, "temperature.rho": 2.0}, False),
        ("neuclip", {}, False),
        ("gcl-batch", {"temperature.learned": True}, True),
        ("openclip", {"temperature.learned": True}, False),
        ("amorlip", {"temperature.learned": True}, False),
        ("siglip", {}, False),
        ("fastclip-v0", {"temperature.learned": True}, False),
        ("fastclip-v2", {}, True),
        ("isogclr", {"temperature.rho": 2.0}, False),
    ],
)
def test_a_learned_temperature_that_nothing_holds_is_doubted(method: str, overrides: dict, doubted: bool) -> None:
    doubts = presets.laptop(method, **overrides).doubts()
    assert len(doubts) == doubted
    assert all("temperature.rho 0: nothing holds it, and it rises to temperature.high 1.0" in text for text in doubts)


def test_differences_leave_out_where_the_values_came_from() -> None:
    config = presets.tiny()
    assert differences(config, dataclasses.replace(config, preset="other")) == {}
    changed = dataclasses.replace(config, seed=1, optim=dataclasses.replace(config.optim, lr=0.5))
    assert differences(config, changed) == {"optim.lr": (2e-3, 0.5), "seed": (0, 1)}


def test_a_config_file_that_is_damaged_or_unknown_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, message in (
        ("{", "is damaged"),
        ('{"methud": "x"}', "no option 'methud'; did you mean 'method'"),
        ("[1]", "is no training config"),
    ):
        path.write_text(text)
        with pytest.raises(RuntimeError, match=message) as error:
            read_config(path)
        assert str(path) in str(error.value)


def test_the_defaults_of_the_library_are_a_valid_config() -> None:
    TrainConfig().check()
    with pytest.raises(ValueError, match="optim must be OptimOptions"):
        TrainConfig(optim=3).check()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps must be int, got '3'"):
        TrainConfig(steps="3").check()  # type: ignore[arg-type]
    TrainConfig(optim=OptimOptions(warmup=3), temperature=TemperatureOptions(learned=True)).check()
