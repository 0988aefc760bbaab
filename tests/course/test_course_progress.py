import json

import pytest

from neuclip_lib.course import progress, progressing
from neuclip_lib.course.watched import is_watched


@pytest.fixture(autouse=True)
def batch(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.delenv("NEUCLIP_PROGRESS", raising=False)


def test_batch_prints_one_line_at_the_end_and_nothing_on_stderr(capsys):
    assert list(progress(range(5), "train neuclip")) == [0, 1, 2, 3, 4]
    captured = capsys.readouterr()
    assert captured.out == "train neuclip: 5 of 5\n"
    assert captured.err == ""


def test_a_loop_that_ends_early_prints_nothing_and_leaves_stopped(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NEUCLIP_PROGRESS", str(tmp_path))
    steps = progress(range(5), "train")
    next(steps), next(steps), next(steps)
    steps.close()
    assert capsys.readouterr().out == ""
    kept = json.loads((tmp_path / "progress.json").read_text())
    assert (kept["done"], kept["total"], kept["state"]) == (2, 5, "stopped")


def test_the_file_follows_and_ends_done(monkeypatch, tmp_path):
    monkeypatch.setenv("NEUCLIP_PROGRESS", str(tmp_path / "run"))
    monkeypatch.setattr(progressing, "SECONDS_BETWEEN_FILES", 0.0)
    file, seen = tmp_path / "run" / "progress.json", []
    for _ in progress(range(3), "train"):
        seen.append(json.loads(file.read_text())["done"])
    assert seen == [0, 1, 2]
    last = json.loads(file.read_text())
    assert (last["label"], last["done"], last["total"], last["state"]) == ("train", 3, 3, "done")
    assert last["seconds_left"] == 0
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"]


def test_the_file_is_written_at_most_once_a_second(monkeypatch, tmp_path):
    monkeypatch.setenv("NEUCLIP_PROGRESS", str(tmp_path))
    written = []
    monkeypatch.setattr(progressing, "write_json", lambda path, value: written.append(value))
    clock = iter(x / 10 for x in range(10_000))
    monkeypatch.setattr(progressing.time, "monotonic", lambda: next(clock))
    list(progress(range(100), "train"))
    # Each item reads the clock twice, here and for the terminal: 100 items take 20 s on it.
    assert len(written) in (20, 21, 22)
    assert written[-1]["state"] == "done"


def test_a_folder_that_cannot_be_written_stops_before_the_work(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEUCLIP_PROGRESS", str(tmp_path / "file" / "under"))
    with pytest.raises(RuntimeError, match="cannot write in"):
        progress(range(3), "train")


def test_items_without_a_length_need_a_total(capsys):
    with pytest.raises(ValueError, match="pass total="):
        progress((x for x in range(3)), "train")
    assert list(progress((x for x in range(3)), "read", total=3)) == [0, 1, 2]
    assert capsys.readouterr().out == "read: 3 of 3\n"
    assert list(progress((x for x in range(3)), "read", total=4)) == [0, 1, 2]
    assert capsys.readouterr().out == "read: 3 of 4\n"


@pytest.fixture
def watched(monkeypatch):
    """What JupyterLab would show: the options of the bar, and what its display is replaced with."""
    seen = []

    class Bar:
        container = "the bar"

        def __init__(self, items, **options):
            self.items = items
            seen.append(options)

        def __iter__(self):
            return iter(self.items)

        def set_postfix_str(self, text, refresh):
            seen.append(text)

        def close(self):
            seen.append("closed")

    class Handle:
        def update(self, data, raw):
            seen.append((data, raw))

    def display(shown, display_id):
        seen.append((shown, display_id))
        return Handle()

    monkeypatch.setenv("JPY_SESSION_NAME", "00_start_here.ipynb")
    monkeypatch.setattr("tqdm.notebook.tqdm", Bar)
    monkeypatch.setattr("IPython.display.display", display)
    return seen


def test_a_watching_person_gets_a_bar_that_ends_as_text(watched, capsys):
    assert is_watched()
    assert list(progress(range(2), "train", describe=lambda: "loss 1")) == [0, 1]
    assert watched == [
        {"desc": "train", "total": 2, "display": False},
        ("the bar", True),
        "loss 1",
        "loss 1",
        "closed",
        ({"text/plain": "train: 2 of 2"}, True),
    ]
    assert capsys.readouterr().out == ""


def test_a_bar_left_early_says_how_far_it_came(watched):
    for step in progress(range(5), "train"):
        if step == 2:
            break
    assert watched[-1] == ({"text/plain": "train: 2 of 5"}, True)


def test_without_ipywidgets_a_watching_person_gets_the_plain_bar(watched, monkeypatch, capsys):
    def missing(*_, **__):
        raise ImportError("IProgress not found")

    monkeypatch.setattr("tqdm.notebook.tqdm", missing)
    assert list(progress(range(2), "train")) == [0, 1]
    assert watched == []
