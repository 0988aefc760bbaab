"""The doctor finds what is broken, says what to do, and leaves nothing behind."""

import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from neuclip_lib.cli import _machine, _packages, _selftest, doctor

QUICK = ["--no-self-test"]


@pytest.fixture(autouse=True)
def a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder that does not exist yet, and a plain environment."""
    monkeypatch.setenv("NEUCLIP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def report(capsys: pytest.CaptureFixture[str], arguments: list[str] = QUICK) -> tuple[int, dict[str, str]]:
    """Exit code, and sign with text of every line by name."""
    code = doctor.main(arguments)
    lines = {}
    for line in capsys.readouterr().out.splitlines():
        if line[1:4] == "   " and line[4:24].strip():
            lines[line[4:24].strip()] = f"{line[0]} {line[25:]}"
        elif line.startswith(" " * 25):
            lines[next(reversed(lines))] += f"\n{line.strip()}"
    return code, lines


def test_this_machine_is_well_and_every_required_package_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = report(capsys)
    assert code == 0, lines
    names = [Requirement(line).name for line in importlib.metadata.requires("neuclip-course") or [] if ";" not in line]
    assert len(names) >= 10
    for name in names:
        assert lines[name] == f"  {importlib.metadata.version(name)}"
    assert {"device", "memory", "threads", "OMP_WAIT_POLICY", "data", "runs"} <= set(lines)


def test_asking_creates_nothing(capsys: pytest.CaptureFixture[str], a_home: Path) -> None:
    report(capsys)
    assert not a_home.exists()
    assert list(a_home.parent.iterdir()) == []


def test_the_self_test_passes_and_measures(capsys: pytest.CaptureFixture[str], a_home: Path) -> None:
    code, lines = report(capsys, [])
    assert code == 0, lines
    assert lines["loss"].startswith("  relative difference")
    assert "20 steps" in lines["training"]
    assert not a_home.exists()


def test_a_required_package_that_is_missing_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "tqdm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, lines = report(capsys)
    assert code == 1
    assert lines["tqdm"].startswith("X missing; missing, >=4")


def test_a_required_package_that_is_too_old_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["tqdm>=999"])
    code, lines = report(capsys)
    assert code == 1
    assert (
        lines["tqdm"] == f"X {importlib.metadata.version('tqdm')}; >=999 is needed, {_installed('tqdm')} is installed"
    )


def _installed(name: str) -> str:
    return importlib.metadata.version(name)


def test_a_torchvision_of_another_torch_is_broken_and_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def import_module(name: str) -> object:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name)

    monkeypatch.setattr(_packages.importlib, "import_module", import_module)
    code, lines = report(capsys)
    assert code == 1
    assert lines["torchvision"].startswith("X")
    assert "nms does not exist" in lines["torchvision"]
    assert "install both from requirements.txt" in lines["torchvision"]


def test_an_old_python_is_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    code, lines = report(capsys)
    assert code == 1
    assert lines["Python"].startswith("X") and "3.11, 3.12 or 3.13 is needed" in lines["Python"]


def test_a_missing_optional_package_is_a_note_with_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda _: ["tqdm", 'no-such-thing>=2; extra == "data"', 'tyro; extra == "data"']
    )
    code, lines = report(capsys)
    assert code == 0
    assert lines["[data]"].startswith("! no-such-thing: missing, >=2 is needed\nget them: ")
    assert lines["[data]"].endswith('-m pip install ".[data]"')
    assert "no-such-thing" not in lines


def test_a_folder_that_cannot_be_written_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEUCLIP_HOME", str(tmp_path / "file"))
    code, lines = report(capsys)
    assert code == 1
    for name in ("data", "runs"):
        assert lines[name].startswith("X") and "set NEUCLIP_HOME" in lines[name]


def test_little_disk_is_a_note(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "free_disk", lambda folder: 2**30)
    code, lines = report(capsys)
    assert code == 0
    assert lines["free there"] == "! 1.0 GiB; less than 2 GiB may not do"


def test_spinning_threads_and_a_launchers_leftovers_are_notes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("RANK", "3")
    code, lines = report(capsys)
    assert code == 0
    assert lines["OMP_WAIT_POLICY"].startswith("! ACTIVE; PASSIVE keeps")
    assert lines["launcher"].startswith("! RANK=3 set")


def test_a_look_that_fails_does_not_end_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[str]:
        raise OSError("no such device")

    monkeypatch.setattr(_machine, "devices", fail)
    code, lines = report(capsys)
    assert code == 1
    assert lines["failed"].startswith("X OSError: no such device")
    assert "data" in lines, "the sections after it are still printed"


def test_a_wrong_loss_is_seen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from neuclip_lib import losses

    right = losses.info_nce
    monkeypatch.setattr(losses, "info_nce", lambda e1, e2, tau: right(e1, e2, tau) * 1.001)
    outcome = _selftest.loss_equals_open_clips()
    assert not outcome.passed
    assert "1e-03 on cpu" in outcome.text
    monkeypatch.setattr(_selftest, "TESTS", {"loss": _selftest.loss_equals_open_clips})
    code, lines = report(capsys, [])
    assert code == 1 and lines["loss"].startswith("X")


def test_a_run_that_does_not_learn_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from neuclip_lib import presets

    tiny = presets.tiny
    monkeypatch.setattr(presets, "tiny", lambda: tiny(**{"optim.lr": 5.0}))
    assert not _selftest.training_works().passed


def test_memory_is_what_the_system_says() -> None:
    facts = Path("/proc/meminfo")
    if not facts.exists():
        pytest.skip("needs /proc/meminfo")
    in_all = int(facts.read_text().split()[1]) * 1024
    for total, free in (_machine.memory(), _machine._memory_of_posix()):
        assert total == pytest.approx(in_all, rel=0.01)
        assert free is not None and 0 < free < in_all
