"""``python -m neuclip_lib evaluate``: what it prints, its options both ways, and its errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neuclip_lib import presets
from neuclip_lib.__main__ import main
from neuclip_lib.cli.evaluate import report
from neuclip_lib.training import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(presets.tiny("neuclip", data_options={"n": 120}, steps=4, warmup=1), folder, quiet=True)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_it_prints_what_it_writes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(folder)]) == 0
    printed = capsys.readouterr().out
    written = json.loads((folder / "evaluation.json").read_text())
    assert "\n".join(report(written)) in printed
    assert f"written: {folder / 'evaluation.json'}" in printed
    assert f"pictures: {folder / 'pictures'}" in printed
    assert len(list((folder / "pictures").iterdir())) == 3
    figures = written["retrieval"]["image_to_text"]
    assert f"R@1 {figures['r@1']:.1f}, R@5 {figures['r@5']:.1f}" in printed
    assert f"mse {written['normalizer_error']['mse']:.3f}" in printed


def test_every_option_has_an_effect_both_ways(folder: Path) -> None:
    assert main(["evaluate", str(folder), "--no-pictures", "--split", "validation", "--anchors", "7"]) == 0
    written = json.loads((folder / "evaluation-validation.json").read_text())
    assert (written["settings"]["split"], written["normalizer_error"]["n"]) == ("validation", 7)
    assert not (folder / "pictures-validation").exists()
    options = ["--pictures", "--batch-size", "5", "--device", "cpu", "--split", "validation"]
    assert main(["evaluate", str(folder), *options]) == 0
    written = json.loads((folder / "evaluation-validation.json").read_text())
    assert (written["settings"]["embed_batch_size"], written["settings"]["device"]) == (5, "cpu")
    assert (folder / "pictures-validation").is_dir()


def test_unknown_options_end_with_code_two(folder: Path) -> None:
    for wrong in (["--splt", "test"], ["--anchors", "many"], []):
        with pytest.raises(SystemExit) as stopped:
            main(["evaluate", *([str(folder), *wrong] if wrong else [])])
        assert stopped.value.code == 2
    assert not (folder / "evaluation.json").exists()


def test_errors_are_one_line_and_code_one(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "neuclip_lib", "evaluate"]
    missing = subprocess.run([*command, str(tmp_path / "nowhere")], capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: ") and "does not exist" in missing.stderr
    assert "Traceback" not in missing.stderr
    assert main(["evaluate", str(folder), "--split", "tset"]) == 1
    assert main(["evaluate", str(folder), "--device", "cuda:77"]) == 1
    shutil.rmtree(folder / "checkpoints")
    assert main(["evaluate", str(folder)]) == 1


def figures(**changes: Any) -> dict[str, Any]:
    direction = {"r@1": 43.2692, "r@5": None, "median_rank": 2.5, "n": 1040, "candidates": 1040, "nan": 0}
    direction["chance"] = {"r@1": 100 / 1040, "r@5": None}
    return {
        "run": {"method": "m", "data": "d", "steps": 7, "batch_size": 3},
        "settings": {"split": "test", "pairs": 1040, "tau": 0.05},
        "retrieval": {"image_to_text": direction, "text_to_image": {**direction, "nan": 2}},
        "zero_shot": {
            "t": {"top1": 50.0, "top5": None, "chance": 25.0, "majority": 40.0, "num_classes": 4, "n": 8, "nan": 0}
        },
        "normalizer_error": {"n": 9, "estimators": {"m": {"mse": 0.00021, "bias": -0.1234, "correlation": None}}},
        "geometry": {
            "alignment": 0.5,
            "modality_gap": 0.25,
            "uniformity": {"image": -2.345, "text": None},
            "effective_rank": {"image": 31.416, "text": 2.0},
            "nan": 0,
        },
        **changes,
    }


def test_the_report_rounds_for_people_and_hides_nothing() -> None:
    text = "\n".join(report(figures()))
    assert "image to text: R@1 43.3, R@5 n/a (chance 0.1/n/a), median rank 2.5 of 1040, n 1040" in text
    assert "n 1040, 2 WITH NaN" in text
    assert "top-1 50.0, top-5 n/a" in text
    assert "chance 25.0, largest class 40.0, 4 classes, n 8" in text
    assert "mse 0.0002, bias -0.123, correlation n/a" in text
    assert "uniformity -2.35 images, n/a texts; effective rank 31.42 images, 2.00 texts" in text
    assert "not measured: reason" in "\n".join(
        report(figures(normalizer_error={"n": 0, "estimators": {}, "why": "reason"}))
    )
