"""metrics.jsonl and TensorBoard: one curve after a resume, whatever a killed process left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from neuclip_lib.training.log import METRICS, TENSORBOARD, MetricsLog, read_rows, scalars


def _row(step: int, value: float, kind: str = "train") -> dict:
    return {"step": step, "kind": kind, "loss": value}


def _events(folder: Path, name: str) -> list[tuple[int, float]]:
    board = EventAccumulator(str(folder / TENSORBOARD))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def test_rows_come_back_and_stand_on_tensorboard_under_the_same_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(_row(10, 0.5))
    log.write({"step": 10, "kind": "normalizer_error", "tau": 0.05, "estimators": {"batch": {"mse": 2.0, "n": 3}}})
    log.close()
    assert [row["kind"] for row in read_rows(tmp_path / METRICS)] == ["train", "normalizer_error"]
    assert _events(tmp_path, "train/loss") == [(10, 0.5)]
    assert _events(tmp_path, "normalizer_error/batch/mse") == [(10, 2.0)]
    assert _events(tmp_path, "normalizer_error/tau") == [(10, pytest.approx(0.05))]


def test_after_a_resume_rows_behind_the_checkpoint_are_gone_and_none_before_it(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in range(1, 13):
        log.write(_row(step, float(step)))
    log.close()
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 13, "kind": "tr')  # the line that a kill -9 cut
    log = MetricsLog(tmp_path, step=10)
    log.write(_row(11, 110.0))
    log.close()
    expected = [(step, float(step)) for step in range(1, 11)] + [(11, 110.0)]
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path / METRICS)] == expected
    assert _events(tmp_path, "train/loss") == expected


def test_a_fresh_start_drops_everything(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        log = MetricsLog(tmp_path)
        log.write(_row(1, value))
        log.close()
    assert [row["loss"] for row in read_rows(tmp_path / METRICS)] == [2.0]
    assert _events(tmp_path, "train/loss") == [(1, 2.0)]


def test_numbers_that_are_not_finite_are_null_and_floats_survive_to_the_bit(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "kind": "train", "loss": float("nan"), "tau": 0.1 + 0.2})
    log.write({"step": 1, "kind": "normalizer_error", "estimators": {"a": {"mse": float("inf")}}})
    log.close()
    first, second = read_rows(tmp_path / METRICS)
    assert first["loss"] is None
    assert first["tau"] == 0.1 + 0.2
    assert second["estimators"] == {"a": {"mse": None}}
    json.loads((tmp_path / METRICS).read_text().splitlines()[0], parse_constant=pytest.fail)


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text('{"step": 1, "kind": "train"}\n{"step": 2, "ki\n{"step": 3, "kind": "train"}\n')
    with pytest.raises(RuntimeError, match=r"metrics.jsonl, line 2 is damaged"):
        read_rows(path)
    assert read_rows(tmp_path / "absent.jsonl") == []


def test_scalars_leaves_out_text_and_groups() -> None:
    row = {"step": 2, "kind": "probe", "loss": 1.5, "name": "x", "flag": True, "estimators": {"a": {"image": {}}}}
    assert list(scalars(row)) == [("probe/loss", 1.5)]
