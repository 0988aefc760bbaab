import json
import re

import pytest

from neuclip_lib.course import results
from neuclip_lib.course.studies import config_sha256

CONFIG = {"batch": 64, "methods": ["openclip", "neuclip"]}
ABOUT = {
    "command": "python -m neuclip_lib compare --seeds 2",
    "date": "2026-03-01",
    "config": CONFIG,
    "versions": {"torch": "2.14.1"},
    "machine": {"cores": 2},
    "seeds": [0, 1],
}


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "results" / "fair"
    folder.mkdir(parents=True)
    write(tmp_path, config_sha256=config_sha256(CONFIG))
    for method, seed, recall in (("openclip", 0, 40.0), ("neuclip", 0, 50.0), ("neuclip", 1, 53.0)):
        run = {"method": method, "seed": seed, "retrieval": {"image_to_text": {"r@1": recall}}}
        (folder / f"{method}-{seed}.json").write_text(json.dumps(run))
    return tmp_path


def write(root, **changes):
    (root / "results" / "fair" / "study.json").write_text(json.dumps({**ABOUT, **changes}))


def test_a_study_is_loaded_and_says_where_it_comes_from(root, capsys):
    study = results("fair", root)
    out = capsys.readouterr().out
    assert out == "Study fair, measured on 2026-03-01 by: python -m neuclip_lib compare --seeds 2\n"
    assert [run["seed"] for run in study.runs] == [0, 1, 0]
    assert study.about["config"] == CONFIG


def test_values_and_spread(root):
    study = results("fair", root)
    assert study.values("retrieval.image_to_text.r@1", method="neuclip") == [50.0, 53.0]
    assert study.spread("retrieval.image_to_text.r@1", method="neuclip") == (50.0, 51.5, 53.0)
    assert study.values("seed") == [0, 1, 0]
    with pytest.raises(ValueError, match=r"no run with \{'method': 'siglip'\}"):
        study.values("seed", method="siglip")
    with pytest.raises(ValueError, match=r"no entry 'retrieval.text_to_image.r@1' \(no 'text_to_image'\)"):
        study.values("retrieval.text_to_image.r@1")


def test_the_hash_does_not_depend_on_the_order_of_keys():
    assert config_sha256({"a": 1, "b": [2]}) == config_sha256({"b": [2], "a": 1})
    assert config_sha256({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_a_missing_study_is_named_with_those_there_are(root):
    with pytest.raises(ValueError, match="no study 'unfair' in results/; there are fair"):
        results("unfair", root)
    with pytest.raises(ValueError, match="there are none"):
        results("fair", root / "results")


def test_a_configuration_changed_by_hand_is_refused(root):
    write(root, config={**CONFIG, "batch": 128}, config_sha256=config_sha256(CONFIG))
    with pytest.raises(RuntimeError, match="not the one it was measured with"):
        results("fair", root)


def test_an_incomplete_or_damaged_study_is_refused(root):
    (root / "results" / "fair" / "study.json").write_text(json.dumps({"command": "x", "config": {}}))
    with pytest.raises(RuntimeError, match=re.escape("lacks date, config_sha256, versions, machine, seeds; run")):
        results("fair", root)
    (root / "results" / "fair" / "study.json").write_text("{")
    with pytest.raises(RuntimeError, match="is damaged"):
        results("fair", root)
    write(root, config_sha256=config_sha256(CONFIG))
    for run in (root / "results" / "fair").glob("*-*.json"):
        run.unlink()
    with pytest.raises(RuntimeError, match="holds no run; run its command again: python -m"):
        results("fair", root)
