"""What is refused before work starts, and files of a run that are not what they should be."""

import pickle
import shutil

import pytest
import torch

from neuclip_lib import data, presets
from neuclip_lib.files import read_json, write_json
from neuclip_lib.losses import Objective
from neuclip_lib.training import checkpoint, train
from neuclip_lib.training.evaluate import evaluate


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals") / "run"
    return train(presets.tiny("openclip", steps=2, warmup=1, error_every=0, checkpoint_every=1), folder, quiet=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threads": 1_000_000}, "threads must be at most"),
        ({"seed": 2**70}, r"seed must be below 2\*\*63"),
        ({"preset": "../elsewhere"}, "preset must be a plain name"),
    ],
)
def test_options_out_of_bounds_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        presets.tiny(**change)


def test_nothing_is_written_when_the_data_do_not_allow_an_option(tmp_path):
    for change, words in (
        ({"augment_shift": 40}, "must be below the 32 pixels"),
        ({"data_options": {"q": 3}}, "has no option 'q'; its options: n, seed, size"),
    ):
        with pytest.raises(ValueError, match=words):
            train(presets.tiny(**change), tmp_path / "x", quiet=True)
    assert not [entry for entry in (tmp_path / "x").iterdir() if entry.name[0] != "."]


def test_a_folder_with_other_files_is_never_made_a_run(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RuntimeError, match=r"holds other files \(thesis.txt\)"):
        train(presets.tiny(steps=1, warmup=1), tmp_path, quiet=True)


@pytest.mark.parametrize("text", ["[]", "null", '{"data": {}}', "", "[" * 100_000])
@pytest.mark.parametrize("name", ["versions.json", "config.json"])
def test_damaged_identity_names_the_file_and_says_what_to_do(run, tmp_path, name, text):
    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    (folder / name).write_text(text)
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    with pytest.raises(RuntimeError, match=rf"{name}.*(another folder|choose another)"):
        train(run.config, folder, quiet=True)


def test_a_manifest_that_leaves_a_file_out_is_refused_and_the_one_before_is_used(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    last = folder / "checkpoints" / "step_000002"
    manifest = read_json(last / "manifest.json")
    del manifest["files"]["state.pt"]
    write_json(last / "manifest.json", manifest)
    (last / "state.pt").write_bytes(b"cut")
    with pytest.raises(RuntimeError, match=r"does not list state.pt"):
        evaluate(folder, draw=False, quiet=True)
    again = train(run.config, folder, quiet=True)
    for a, b in zip(again.load_model().parameters(), run.load_model().parameters(), strict=True):
        assert torch.equal(a, b)


class Evil:
    """Would create a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_foreign_state_is_not_executed_and_named(tmp_path):
    for content in (pickle.dumps(Evil(tmp_path / "owned"), protocol=2), b""):
        (tmp_path / "state.pt").write_bytes(content)
        with pytest.raises(RuntimeError, match=r"state\.pt was not written by this trainer"):
            checkpoint.load_state(tmp_path)
    torch.save([1, 2], tmp_path / "state.pt")
    with pytest.raises(RuntimeError, match="it holds a list"):
        checkpoint.load_state(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_an_objective_with_no_logarithm_is_refused():
    for eps in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="eps must be finite"):
            Objective(eps, "tau")


def test_a_picture_without_an_ending_is_refused_before_it_is_drawn(tmp_path):
    from neuclip_lib.data.montage import draw_montage

    with pytest.raises(ValueError, match=r"pairs\.png"):
        draw_montage(data.load("captions", "test", n=200), 4, 0, tmp_path / "pairs")


def test_a_record_that_was_cut_is_said_when_the_run_goes_on(run, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    rows = run.metrics()
    up_to_1 = sum(row["step"] <= 1 for row in rows)
    (folder / "metrics.jsonl").unlink()
    train(run.config, folder, quiet=True)
    assert f"metrics.jsonl lacks {up_to_1} of {up_to_1} rows up to step 1" in capsys.readouterr().err
