"""The table of several runs, and the parts of README.md that are made from stored figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from neuclip_lib.cli import _study, _table, readme
from neuclip_lib.course.studies import config_sha256
from neuclip_lib.course.studies import results as load_study
from neuclip_lib.files import write_json
from neuclip_lib.studies.keep import open_study
from neuclip_lib.studies.known import get_grid
from neuclip_lib.studies.measure import facts_of
from neuclip_lib.training.log import training_seconds

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
MAP = "<!-- map:begin -->\nolder\n<!-- map:end -->"


def result(method: str, first: float, mse: float | None = 0.5, shadows: tuple[str, ...] = ()) -> dict[str, Any]:
    """Figures of one run, as ``read_result`` gives them."""
    way = {"r@1": first, "r@5": 2 * first, "r@10": None, "n": 1040, "chance": {"r@1": 0.1, "r@5": 0.5, "r@10": 1.0}}
    estimators = {method: {"mse": mse}, "batch": {"mse": 0.61}, **{name: {"mse": 0.2512} for name in shadows}}
    return {
        "method": method,
        "title": method.upper(),
        "seed": 3,
        "config": {
            "data": "icons",
            "steps": 700,
            "batch_size": 128,
            "shadows": list(shadows),
        },
        "versions": {"python": "3.11.7", "torch": "2.14.1"},
        "seconds": 87.4,
        "settings": {"tau": 0.05},
        "retrieval": {"image_to_text": way, "chance": way["chance"], "text_to_image": way | {"r@1": first + 1}},
        "normalizer_error": {"mse": mse, "estimators": estimators},
    }


def test_the_text_table_holds_every_figure_in_its_column() -> None:
    lines = _table.as_text([result("openclip", 44.14), result("x", 5.25, None)]).splitlines()
    head, named, first, second, chance = lines
    assert named.split() == ["method", *["r@1", "r@5", "r@10"] * 2, "error", "seconds"]
    assert first.split() == ["OPENCLIP", "44.1", "88.3", "n/a", "45.1", "88.3", "n/a", "0.50", "87"]
    assert second.split() == ["X", "5.2", "10.5", "n/a", "6.2", "10.5", "n/a", "n/a", "87"]
    assert chance.split() == ["chance", "0.1", "0.5", "1.0", "0.1", "0.5", "1.0"]
    # the figures of a column end where its name ends
    for column in ("error", "seconds"):
        end = named.index(column) + len(column)
        assert first[end - 1].strip() and not first[end : end + 2].strip()
    # each title ends above the last column that it names
    assert head.index("image to text") + len("image to text") == named.index("r@10") + len("r@10")
    assert head.index("text to image") + len("text to image") == named.rindex("r@10") + len("r@10")


def test_the_notes_say_n_tau_seed_and_what_rode_along() -> None:
    notes = _table.notes_of([result("openclip", 44.0, shadows=("neuclip",)), result("neuclip", 50.0)])
    assert "on 1040 held-out pairs of icons; 700 steps of 128 pairs, temperature 0.05, seed 3." in notes[0]
    assert len(notes) == 3
    assert notes[2].endswith("error neuclip 0.25, batch 0.61.")
    assert len(_table.notes_of([result("openclip", 44.0)])) == 2
    assert _table.notes_of([]) == []


def test_markdown_has_the_same_cells() -> None:
    results = [result("openclip", 44.14), result("neuclip", 50.0)]
    lines = _table.as_markdown(results).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in cells} == {5}
    split = [[one for cell in row for one in cell.split(" / ")] for row in cells[2:]]
    assert [tuple(row) for row in split] == _table.rows_of(results)[1:]


def test_training_seconds_are_steps_over_speed_also_after_a_restart() -> None:
    rows = [{"step": 10, "samples_per_second": 64.0}, {"step": 20, "samples_per_second": 128.0}]
    rows += [{"step": 25, "samples_per_second": 320.0}]
    assert training_seconds(rows, 64) == pytest.approx(10 + 5 + 1)
    assert training_seconds([], 64) == 0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A page with the marks, and a study in ``results/laptop``."""
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n{MAP}\n")
    _study.record(tmp_path, "laptop", "the command", [result("openclip", 44.14), result("neuclip", 50.0)])
    return tmp_path


def test_a_study_is_stored_as_the_lessons_read_it(checkout: Path) -> None:
    study = load_study("laptop", checkout)
    assert study.values("retrieval.image_to_text.r@1", method="neuclip") == [50.0]
    assert study.about["seeds"] == [3] and study.about["methods"] == ["openclip", "neuclip"]
    assert study.about["command"] == "the command"
    assert sum(file.stat().st_size for file in (checkout / "results" / "laptop").iterdir()) < 200 * 1024


def test_a_study_measured_again_replaces_the_old_one(checkout: Path) -> None:
    _study.record(checkout, "laptop", "the command", [result("neuclip", 51.0)])
    assert sorted(file.name for file in (checkout / "results" / "laptop").iterdir()) == ["neuclip.json", "study.json"]


def test_the_page_follows_the_stored_figures(checkout: Path) -> None:
    assert not readme.is_current(checkout)
    readme.write(checkout)
    page = (checkout / "README.md").read_text()
    assert page.startswith(f"before\n{BEGIN}\n| method |") and f"{END}\nafter\n" in page
    assert "| OPENCLIP | 44.1 / 88.3 / n/a |" in page and "`the command`" in page and "old" not in page
    assert readme.is_current(checkout)
    readme.write(checkout)
    assert (checkout / "README.md").read_text() == page


def test_a_figure_changed_by_hand_is_seen(checkout: Path) -> None:
    readme.write(checkout)
    page = checkout / "README.md"
    page.write_text(page.read_text().replace("44.1", "47.1"))
    assert not readme.is_current(checkout)
    readme.write(checkout)
    stored = checkout / "results" / "laptop" / "neuclip.json"
    write_json(stored, json.loads(stored.read_text()) | {"seconds": 20.0})
    assert not readme.is_current(checkout)


def test_a_page_without_marks_or_a_study_is_refused(checkout: Path) -> None:
    (checkout / "README.md").write_text(f"{BEGIN} and no end")
    with pytest.raises(RuntimeError, match="put both marks back"):
        readme.write(checkout)
    assert (checkout / "README.md").read_text() == f"{BEGIN} and no end"
    (checkout / "README.md").write_text(f"{BEGIN}\n{END}\n{MAP}\n")
    (checkout / "results" / "laptop" / "study.json").unlink()
    with pytest.raises(RuntimeError, match=r"laptop.study\.json is missing"):
        readme.write(checkout)


@pytest.mark.parametrize("again", [f"{BEGIN}\n{END}\n", MAP, BEGIN])
def test_marks_that_are_there_twice_are_refused(checkout: Path, again: str) -> None:
    readme.write(checkout)
    page = checkout / "README.md"
    page.write_text(page.read_text() + again)
    for what in (readme.write, readme.is_current):
        with pytest.raises(RuntimeError, match="once each"):
            what(checkout)


def test_a_page_with_other_line_ends_is_not_current_and_is_mended(checkout: Path) -> None:
    readme.write(checkout)
    page = checkout / "README.md"
    whole = page.read_bytes()
    page.write_bytes(whole.replace(b"\n", b"\r\n"))
    assert not readme.is_current(checkout)
    readme.write(checkout)
    assert page.read_bytes() == whole


def test_a_page_that_is_missing_or_no_text_is_named(checkout: Path) -> None:
    page = checkout / "README.md"
    page.write_bytes(b"\xff\xfe")
    with pytest.raises(RuntimeError, match=r"README.md cannot be read"):
        readme.is_current(checkout)
    page.unlink()
    with pytest.raises(RuntimeError, match=r"README.md cannot be read"):
        readme.write(checkout)


def test_a_map_of_another_definition_is_refused(checkout: Path) -> None:
    measured(checkout, {})
    study = checkout / "results" / "map" / "study.json"
    about = json.loads(study.read_text())
    about["config"]["passes"] = 2
    write_json(study, about | {"config_sha256": config_sha256(about["config"])})
    with pytest.raises(RuntimeError, match=r"another configuration \(passes differ"):
        readme.write(checkout)
    study.unlink()
    write_json(checkout / "results" / "map" / "one.json", {})
    with pytest.raises(RuntimeError, match=r"but no study\.json"):
        readme.write(checkout)


def measured(checkout: Path, scores: dict[tuple[str, str, int], float]) -> None:
    """Write rows of the map by (cell, method, seed)."""
    grid = get_grid("map")
    kept = open_study(checkout / "results" / "map", "compare it", grid.as_json(), grid.seeds)
    for row in grid.rows():
        key = row.cell.name, row.variant.name, row.seed
        if key in scores:
            figures = {"r@1": scores[key], "unseen": {}, "normalizer_error": {}, "probe": []}
            kept.write(row.name, {**facts_of(row), "lr": 2e-3, "error": None, **figures})


def test_the_maps_section_says_who_is_first_where(checkout: Path) -> None:
    grid = get_grid("map")
    names, cells = [variant.name for variant in grid.variants], [cell.name for cell in grid.cells]
    readme.write(checkout)
    page = (checkout / "README.md").read_text()
    assert "Not measured yet" in page and "older" not in page and "Highest mean" not in page

    measured(checkout, {(cells[0], name, 0): 40.0 + k for k, name in enumerate(names[:-1])})
    readme.write(checkout)
    assert "Highest mean" not in (checkout / "README.md").read_text()  # a method is missing in every setting

    # neuclip first in one setting, gcl-batch in the other three; a second seed that changes nothing
    scores = {(cell, name, seed): 40.0 for cell in cells for name in names for seed in (0, 1)}
    for cell in cells:
        for seed in (0, 1):
            scores[cell, "neuclip" if cell == cells[1] else "gcl-batch", seed] = 41.5 + seed
    measured(checkout, scores)
    readme.write(checkout)
    page = (checkout / "README.md").read_text()
    others = ", ".join(cell for cell in cells if cell != cells[1])
    told = f"Highest mean R@1: gcl-batch in 3 of 4 settings ({others}); neuclip in 1 of 4 settings ({cells[1]})."
    first, below = page.split(END)
    # openclip and the others - gcl-batch: -1.5 and -2.5 three times, and 0 twice: mean -1.3, worse
    over_all = "Against gcl-batch, over all settings: neuclip not told apart; "
    rest = ", ".join(name for name in names[1:] if name != "neuclip")
    assert f"for each method. {told} {over_all}{rest} worse.\n" in first and f"\n{told}\n" in below
    assert "| gcl-batch | **42.0 ± 0.7** | 40.0 ± 0.0 | **42.0 ± 0.7** | **42.0 ± 0.7** |" in below
    assert "48 of 48 runs, 0 of them failed" in below and "`compare it`" in below
    # neuclip - gcl-batch: -1.5, -2.5, +1.5, +2.5, and twice -1.5 and -2.5: mean -1, so not told apart
    assert "| neuclip | -1.0 (" in below and "not told apart | " + others.split(", ")[0] in below
    assert readme.is_current(checkout)


def test_a_run_that_failed_does_not_flatter_its_method(checkout: Path) -> None:
    """gcl-batch is better with the seed that both have; its other one was a bad seed, on which neuclip failed."""
    grid = get_grid("map")
    cell, *others = [cell.name for cell in grid.cells]
    scores = {(cell, variant.name, seed): 20.0 for variant in grid.variants for seed in (0, 1)}
    scores |= {(cell, "gcl-batch", 0): 60.0, (cell, "gcl-batch", 1): 10.0, (cell, "neuclip", 0): 50.0}
    measured(checkout, scores)
    row = next(row for row in grid.rows() if (row.cell.name, row.variant.name, row.seed) == (cell, "neuclip", 1))
    open_study(checkout / "results" / "map", "", grid.as_json(), grid.seeds).write(
        row.name, {**facts_of(row), "error": "not finite"}
    )
    readme.write(checkout)
    page = (checkout / "README.md").read_text()
    assert f"Highest mean R@1: gcl-batch in 1 of 4 settings ({cell})." in page
    assert "| gcl-batch | **35.0 ± 35.4** | - |" in page and "| neuclip | 50.0 (1 failed) | - |" in page
    assert "12 of 48 runs, 1 of them failed" in page

    measured(checkout, {(others[0], variant.name, 0): 30.0 for variant in grid.variants})
    readme.write(checkout)
    every = " and ".join(variant.name for variant in grid.variants)
    assert f"; {every} in 1 of 4 settings ({others[0]})." in (checkout / "README.md").read_text()


def test_the_curves_keep_steps_and_figures_alone() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 10, "kind": "train", "loss": 3.0},
        {"step": 50, "kind": "probe", "loss": 1.5, "n": 512, "tau": 0.05},
        {
            "step": 100,
            "kind": "normalizer_error",
            "estimators": {"batch": {"mse": 0.6, "n": 9}, "x": {"mse": None, "n": 9}},
        },
    ]
    assert _table._curves(rows) == {
        "probe": [{"step": 50, "loss": 1.5}],
        "normalizer_error": [{"step": 100, "mse": {"batch": 0.6, "x": None}}],
    }
