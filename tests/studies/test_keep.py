"""Results of long studies: kept part by part, and never mixed with those of another configuration."""

import json
import threading

import pytest

from neuclip_lib.course.studies import results
from neuclip_lib.studies.keep import find_study, open_study


def test_a_study_goes_on_where_it_stopped_and_can_be_read(tmp_path):
    folder = tmp_path / "results" / "shape"
    kept = open_study(folder, "python -m neuclip_lib compare shape", {"n": [1, 2]}, [1, 0])
    kept.write("first", {"n": 1, "error": 0.5})
    again = open_study(folder, "another way to call it", {"n": [1, 2]}, [0, 2])
    assert again.has("first")
    assert not again.has("second")
    assert again.read("first")["error"] == 0.5
    again.write("second", {"n": 2, "error": 0.25})
    study = results("shape", tmp_path)
    assert study.values("error", n=2) == [0.25]
    assert study.about["command"] == "python -m neuclip_lib compare shape"
    assert study.about["seeds"] == [1, 0, 2]  # in the order in which they came
    again.forget("second")
    assert not kept.has("second")


def test_parts_with_a_name_may_come_and_none_may_change_or_go(tmp_path):
    folder = tmp_path / "results" / "shape"
    one, two = {"name": "one", "size": 1}, {"name": "two", "size": 2}
    open_study(folder, "command", {"n": 1, "parts": [one]}, [0], growing=["parts"]).write("first", {"n": 1})
    open_study(folder, "command", {"n": 1, "parts": [two, one]}, [0], growing=["parts"])
    assert results("shape", tmp_path).about["config"]["parts"] == [two, one]
    open_study(folder, "command", {"n": 1, "parts": [two, one]}, [0])
    for parts in ([two], [two, {"name": "one", "size": 3}], [two, one, {"name": "one", "size": 3}]):
        with pytest.raises(RuntimeError, match="another configuration"):
            open_study(folder, "command", {"n": 1, "parts": parts}, [0], growing=["parts"])
    with pytest.raises(RuntimeError, match="another configuration"):
        open_study(folder, "command", {"n": 2, "parts": [two, one]}, [0], growing=["parts"])


def test_another_configuration_is_refused(tmp_path):
    open_study(tmp_path / "shape", "command", {"n": 1}, [0])
    with pytest.raises(RuntimeError, match="another configuration"):
        open_study(tmp_path / "shape", "command", {"n": 2}, [0])
    with pytest.raises(RuntimeError, match=r"\(m, n differ\)"):
        find_study(tmp_path / "shape", {"m": 1, "n": 2})


def test_figures_without_their_configuration_are_nobodys(tmp_path):
    folder = tmp_path / "shape"
    assert find_study(folder, {"n": 1}) is None
    assert not folder.exists()
    open_study(folder, "command", {"n": 1}, [0]).write("first", {"n": 1})
    (folder / "study.json").unlink()
    for what in (lambda: find_study(folder, {"n": 1}), lambda: open_study(folder, "command", {"n": 2}, [0])):
        with pytest.raises(RuntimeError, match=r"holds figures \(first\) but no study.json"):
            what()
    assert [path.name for path in folder.glob("*.json")] == ["first.json"]


@pytest.mark.parametrize("text", ["[]", "{}", "nothing", '{"command": "x"}'])
def test_a_damaged_description_is_refused(tmp_path, text):
    open_study(tmp_path / "shape", "command", {"n": 1}, [0])
    (tmp_path / "shape" / "study.json").write_text(text)
    with pytest.raises(RuntimeError, match=r"study\.json"):
        open_study(tmp_path / "shape", "command", {"n": 1}, [0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "no figures by name"),
        ('{"n": NaN}', "NaN is not a finite number"),
        ('{"n": 1e999}', "1e999 is not a finite number"),
        ('{"n": 1' + "0" * 5000 + "}", "cannot be read"),
        ('{"m": 1}', "it lacks n"),
    ],
)
def test_a_damaged_part_is_refused(tmp_path, text, words):
    kept = open_study(tmp_path / "shape", "command", {"n": 1}, [0])
    (kept.folder / "first.json").write_text(text)
    with pytest.raises(RuntimeError, match=words):
        kept.read("first", ["n"])


def test_a_folder_in_the_place_of_a_part_is_refused_before_anything_is_measured(tmp_path):
    kept = open_study(tmp_path / "shape", "command", {"n": 1}, [0])
    (kept.folder / "first.json").mkdir()
    with pytest.raises(RuntimeError, match="is no file"):
        kept.has("first")


def test_seeds_that_several_processes_bring_at_once_are_all_there(tmp_path):
    folder = tmp_path / "shape"
    open_study(folder, "command", {"n": 1}, [0])
    threads = [threading.Thread(target=open_study, args=(folder, "", {"n": 1}, [seed])) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(json.loads((folder / "study.json").read_text())["seeds"]) == list(range(9))
