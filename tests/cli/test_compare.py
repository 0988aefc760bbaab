"""``compare`` from the command line: whole, resumed, with a run that fails, and one run again."""

import json
from pathlib import Path

import pytest

from neuclip_lib.cli.compare import _naming, main

ROOT = Path(__file__).resolve().parents[2]

METHODS = ["--preset", "tiny", "--data", "captions", "--methods", "gcl-batch", "neuclip", "--seeds", "0"]


def test_a_comparison_is_resumed_and_a_run_can_be_measured_again_with_the_same_result(tmp_path, capfd):
    out, runs = tmp_path / "results", tmp_path / "runs"
    arguments = [*METHODS, "--rates", "1e-3", "2e-3", "--out", str(out), "--runs", str(runs)]
    assert main([*arguments, "--jobs", "2"]) == 0
    page = capfd.readouterr().out
    assert "2 of 2 runs, 0 of them failed" in page
    assert (out / "report.md").read_text(encoding="utf-8") in page
    for picture in ("scores.png", "curves.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    kept = json.loads((out / "preset_neuclip_s0.json").read_text())
    chosen = {
        rate: json.loads((out / f"preset_neuclip_lr{rate}.json").read_text())["r@1"] for rate in ("0.001", "0.002")
    }
    assert kept["lr"] == float(max(chosen, key=chosen.get))
    assert kept["split"] == "final"

    # What is kept is not written over by a run that is trained anew.
    whole = (out / "preset_neuclip_s0.json").read_text()
    (out / "preset_neuclip_s0.json").write_text(json.dumps({**kept, "r@1": 99.0}))
    assert main([*arguments, "--only", "preset_neuclip_s0", "--again"]) == 0
    told = capfd.readouterr().out
    assert f"R@1 {kept['r@1']:.2f} (mean" in told
    assert "kept, and left as it is: R@1 99.00" in told
    assert json.loads((out / "preset_neuclip_s0.json").read_text())["r@1"] == 99.0
    (out / "preset_neuclip_s0.json").write_text(whole)

    before = {file: file.read_bytes() for file in out.glob("*.json")}
    (out / "preset_gcl-batch_s0.json").unlink()
    assert main(arguments) == 0  # the training is still there, so only its evaluation is done again
    assert {file: file.read_bytes() for file in out.glob("*.json")} == before

    capfd.readouterr()
    # A seed that comes later: the first one still chooses, and the table has both.
    later = [word if word != "0" else "7" for word in arguments]
    assert main([*later, "--", "--jobs", "2"]) == 0
    assert "4 of 4 runs, 0 of them failed" in (page := capfd.readouterr().out)
    assert "over the seeds 0, 7;" in page
    assert len(list(out.glob("*_lr*.json"))) == 4
    assert main([*later, "--table"]) == 0
    assert "over the seeds 0, 7;" in capfd.readouterr().out


def test_a_run_that_fails_is_reported_and_the_others_are_there(tmp_path, capfd):
    out = tmp_path / "results"
    arguments = ["--preset", "tiny", "--data", "captions", "--methods", "gcl-batch", "--seeds", "0", "--rates", "2e-3"]
    arguments += ["1e30", "--taus", "0.05", "--out", str(out), "--runs", str(tmp_path / "runs")]
    assert main(arguments) == 0
    failed = json.loads((out / "tau0.05_gcl-batch_lr1e+30.json").read_text())
    assert "finite" in failed["error"]
    good = json.loads((out / "tau0.05_gcl-batch_s0.json").read_text())
    assert (good["lr"], good["error"]) == (2e-3, None)

    for rate in ("0.002", "1e+30"):
        (out / f"tau0.05_gcl-batch_lr{rate}.json").write_text(json.dumps(failed))
    (out / "tau0.05_gcl-batch_s0.json").unlink()
    capfd.readouterr()
    assert main(arguments) == 1
    page = capfd.readouterr().out
    assert "1 of 1 runs, 1 of them failed" in page
    assert "- tau0.05_gcl-batch_s0: every learning rate has failed for gcl-batch" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a comparison's name"),
        (["mapp"], "did you mean 'map'"),
        (["map", "--methods", "neuclip"], "has its own methods"),
        (
            ["map", "--passes", "1", "--rates", "1e-3"],
            "map has its own methods and settings; leave --passes, --rates out",
        ),
        (["map", "--data", "digits"], "leave --data out"),
        (["map", "--passes", "0"], "leave --passes out"),
        (["map", "--only", "nope"], "there is no run 'nope'"),
        (["map", "--only", "B128-tau0.05_gcl-batch_s0", "--table"], "leave --table out"),
        (["map", "--only", "B128-tau0.05_gcl-batch_s0", "--retry"], "leave --retry out"),
        (["map", "--again"], "--again belongs to --only"),
        (["map", "--table", "--retry"], "--table measures nothing"),
        (["map", "--table"], "nothing is measured in"),
        (["map", "--seeds", "1", "1"], "seeds of a comparison must differ"),
        (["tracking", "--methods", "neuclip"], "has its own methods"),
        (["tracking", "--jobs", "3"], "is measured as it is"),
        (["--methods", "neuclip", "--name", "../up"], "is that of a folder"),
        (["--methods", "neuclip", "--name", ""], "is that of a folder"),
        (["--methods", "neuclip", "--name", "map"], "give yours another --name"),
        (["--methods", "neuclip", "--rates", "0"], "optim.lr must be above 0"),
        ([*METHODS, "--batch-sizes", "512"], "a batch of 512 is more than the"),
        (["--methods", "neuclip", "--jobs", "0"], "--jobs must be at least 1"),
        (["--methods", "neuclip", "neuclip"], "must differ"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        main([*arguments, "--out", str(tmp_path / "results")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("study", "word"), [("tracking", "prototype network"), ("frozen", "bias after the best scale")]
)
def test_the_tables_of_the_kept_studies_are_printed_without_measuring(study, word, capsys):
    folder = ROOT / "results" / study
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert main([study, "--table", "--out", str(folder)]) == 0
    assert word in capsys.readouterr().out
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_the_printed_command_names_the_comparison_and_not_what_was_done_with_it():
    words = ["map", "--only=one", "--out", "x", "--again", "--only", "two", "--jobs=3", "--table", "--jobs", "1"]
    assert _naming(words) == ["map", "--out", "x"]
