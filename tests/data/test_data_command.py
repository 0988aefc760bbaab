import numpy as np
import pytest
from PIL import Image

from neuclip_lib import data
from neuclip_lib.__main__ import main
from neuclip_lib.data import cache


def test_list_shows_every_set_with_its_splits_licence_and_state(capsys):
    data.build("digits", quiet=True)
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    for name in data.names():
        assert data.card(name).licence in out
    (line,) = [line for line in out.splitlines() if line.startswith("digits")]
    assert "1797 pairs" in line
    assert "ready" in line
    assert "train 1272, validation 279, test 246" in out


def test_list_names_missing_packages(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "_version", lambda package: None)
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert "missing: data set 'digits' needs the package scikit-learn, not installed here" in out


def test_build_says_where_and_missing_packages_end_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_HOME", str(tmp_path))
    assert main(["data", "build", "digits"]) == 0
    out = capsys.readouterr().out
    assert out == f"digits: {tmp_path / 'datasets' / 'built' / 'digits'}\n"
    monkeypatch.setattr(cache, "_version", lambda package: None)
    assert main(["data", "build", "icons"]) == 1
    assert "pip install 'neuclip-course[data]'" in capsys.readouterr().err


@pytest.mark.parametrize(("split", "n", "rows"), [("test", 8, 2), ("validation", 3, 1)])
def test_show_draws_pairs_with_their_attribution(capsys, tmp_path, split, n, rows):
    picture = tmp_path / "new" / "digits.png"
    assert main(["data", "show", "digits", "--out", str(picture), "--split", split, "--n", str(n)]) == 0
    out = capsys.readouterr().out
    assert f"{n} of {len(data.load('digits', split))} pairs" in out
    assert data.card("digits").attribution in out
    ink = np.asarray(Image.open(picture).convert("L")) < 100
    across = min(6, n)
    for place in range(n):  # every cell holds ink
        height, width = ink.shape[0] // rows, ink.shape[1] // across
        row, column = divmod(place, 6)
        cell = ink[row * height : (row + 1) * height, column * width : (column + 1) * width]
        assert cell.mean() > 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "digit"], "no data set 'digit' (did you mean 'digits'?)"),
        (["show", "digit", "--out", "x.png"], "no data set 'digit'"),
        (["show", "digits", "--out", "x.png", "--split", "tset"], "no split 'tset' (did you mean 'test'?)"),
        (["show", "digits", "--out", "x.png", "--n", "0"], "n must lie in 1..246"),
        (["show", "digits", "--out", "x.png", "--n", "247"], "n must lie in 1..246"),
        (["show", "digits", "--out", "x.what"], "what"),
    ],
)
def test_wrong_use_is_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    data.build("digits", quiet=True)
    home = cache.home.data_dir().parents[1]
    monkeypatch.setenv("NEUCLIP_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["what"], ["build"], ["show", "digits"], ["list", "--what"]])
def test_unknown_commands_and_options_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["data", *arguments])
    assert stopped.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_cards_are_written_and_checked(capsys, tmp_path):
    target = tmp_path / "README.md"
    assert main(["data", "card", "--check", "--out", str(target)]) == 1
    assert "out of date" in capsys.readouterr().err
    assert main(["data", "card", "--out", str(target)]) == 0
    assert main(["data", "card", "--check", "--out", str(target)]) == 0
    target.write_text(target.read_text() + "x")
    assert main(["data", "card", "--check", "--out", str(target)]) == 1


def test_build_all_goes_on_after_a_failure_and_leaves_out_optional_sets(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_HOME", str(tmp_path))
    installed = cache._version
    monkeypatch.setattr(cache, "_version", lambda package: installed(package) if package == "scikit-learn" else None)
    monkeypatch.setattr(data, "names", lambda: ["icons", "digits"])
    assert main(["data", "build", "all"]) == 1
    said = capsys.readouterr()
    assert f"digits: {tmp_path / 'datasets' / 'built' / 'digits'}" in said.out
    assert "needs the packages material-design-icons-pack, resvg-py" in said.err
    assert "error: not built: icons (see above)" in said.err
