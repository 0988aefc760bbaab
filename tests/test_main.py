"""``python -m neuclip_lib``: the right command, exit codes, one-line errors."""

import importlib
import subprocess
import sys
import types

import pytest

from neuclip_lib import __main__ as program


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for every command's module; set ``main`` on it."""
    module = types.SimpleNamespace(name=None, main=lambda arguments: 0)

    def import_module(name: str) -> types.SimpleNamespace:
        module.name = name
        return module

    monkeypatch.delenv("NEUCLIP_TRACEBACK", raising=False)
    monkeypatch.setattr(program.importlib, "import_module", import_module)
    return module


@pytest.mark.parametrize("name", sorted(program.COMMANDS))
def test_every_command_that_is_listed_is_there(name: str) -> None:
    assert callable(importlib.import_module(f"neuclip_lib.cli.{name}").main)


def test_the_rest_of_the_line_goes_to_the_command(command: types.SimpleNamespace) -> None:
    given = []
    command.main = lambda arguments: given.append(arguments) or 3
    assert program.main(["train", "--method", "neuclip"]) == 3
    assert command.name == "neuclip_lib.cli.train"
    assert given == [["--method", "neuclip"]]


def test_a_command_that_returns_nothing_has_succeeded(command: types.SimpleNamespace) -> None:
    command.main = lambda arguments: None
    assert program.main(["data"]) == 0


@pytest.mark.parametrize(
    "error",
    [
        ValueError("tau is 3, expected .01 to 1"),
        RuntimeError("cannot write in /x"),
        OSError(28, "No space left on device", "/x/model.safetensors"),
    ],
)
def test_an_expected_error_is_one_line(
    command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    command.main = fail
    assert program.main(["train"]) == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_programmers_error_keeps_its_traceback(command: types.SimpleNamespace) -> None:
    command.main = lambda arguments: {}["missing"]
    with pytest.raises(KeyError):
        program.main(["train"])


def test_a_package_that_is_missing_is_named_with_the_way_to_it(
    command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> types.SimpleNamespace:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(program.importlib, "import_module", fail)
    assert program.main(["train"]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: {sys.executable} has no package 'torch'") and ".venv/bin/activate" in message


def test_a_module_of_our_own_that_is_missing_keeps_its_traceback(
    command: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'neuclip_lib.nothing'", name="neuclip_lib.nothing")

    command.main = fail
    with pytest.raises(ModuleNotFoundError):
        program.main(["train"])


def test_the_traceback_can_be_asked_for(command: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> int:
        raise ValueError("wrong")

    command.main = fail
    monkeypatch.setenv("NEUCLIP_TRACEBACK", "1")
    with pytest.raises(ValueError, match="wrong"):
        program.main(["train"])


def test_control_c_is_no_crash(command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    command.main = stop
    assert program.main(["run"]) == 130
    assert capsys.readouterr().err == "stopped by you; the same command goes on where it was\n"


def test_an_unknown_command_gets_the_closest_one_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["trian"]) == 2
    message = capsys.readouterr().err
    assert "no command 'trian'; did you mean 'train'?" in message
    assert all(name in message for name in program.COMMANDS)


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-h"], 0), (["help"], 0)])
def test_help_lists_every_command(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> None:
    assert program.main(arguments) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(program.COMMANDS)


def test_the_list_of_commands_needs_no_torch() -> None:
    code = "import sys, neuclip_lib.__main__ as m; m.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
