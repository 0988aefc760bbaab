"""Results of long studies: kept part by part, and never mixed with those of another configuration."""

import pytest

from neuclip_lib.course.studies import results
from neuclip_lib.studies.keep import open_study


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
    assert study.about["seeds"] == [0, 1, 2]
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
