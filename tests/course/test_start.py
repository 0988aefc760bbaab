import inspect
from collections import deque

import pytest

from neuclip_lib.course import solved, start
from neuclip_lib.course.source import read_lesson
from neuclip_lib.course.start import cells_before, not_run, start_at

SOURCE = """
# %% [markdown]
# # A lesson

# %% tags=["parameters"]
preset: str = "quick"  # quick or full
seed: int = 0  # seed

# %%
from neuclip_lib.course import at_least, check, start_at, validate

P = validate(preset=("quick", "full"), seed=at_least(0))
n = P.pick(quick=10, full=1000)

# %%
start_at("1")
loss = 1.0

# %%
def recall_at_1(s):
    ### BEGIN SOLUTION
    own = s.diagonal()[:, None]
    return 100 * ((own > s).sum(1) == len(s) - 1).double().mean()
    ### END SOLUTION


recall_at_1 = check.recall_at_1(recall_at_1)

# %%
print("a picture of", loss)

# %%
from neuclip_lib.course import start_at

start_at("2")
loss = loss + seed

# %%
log.append(loss)

# %%
start_at("3")
"""
STUB = "def recall_at_1(s):\n    # Your code, about 2 lines\n    ...\n\n\nrecall_at_1 = check.recall_at_1(recall_at_1)"


@pytest.fixture(autouse=True)
def course(tmp_path, monkeypatch):
    (tmp_path / "solutions").mkdir()
    (tmp_path / "neuclip_lib" / "course").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "solutions" / "07_part.py").write_text(SOURCE.lstrip(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setattr(solved, "_memory", {})
    return read_lesson(tmp_path / "solutions" / "07_part.py")


class Notebook:
    """One kernel's namespace, with its history as IPython keeps it."""

    def __init__(self, **bound):
        self.namespace = {"In": [""], "Out": {}, "start_at": start_at, **bound}

    def run(self, source):
        self.namespace["In"].append(source)
        exec(compile(source, "<cell>", "exec"), self.namespace)


def texts(lesson):
    return [cell.source for cell in lesson.code]


def test_a_fresh_notebook_runs_all_cells_before_the_section_and_lists_them(capsys, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/07_part.ipynb")
    notebook = Notebook(mine=5)
    notebook.run('start_at("2")')
    assert capsys.readouterr().out == (
        "Section 2 of 07_part: running the 5 cells before it, solved and at quick size.\n"
        '  preset: str = "quick"  # quick or full\n'
        "  from neuclip_lib.course import at_least, check, start_at, validate\n"
        '  start_at("1")\n'
        "  def recall_at_1(s):\n"
        '  print("a picture of", loss)\n'
    )
    namespace = notebook.namespace
    assert (namespace["n"], namespace["loss"], namespace["mine"]) == (10, 1.0, 5)
    assert "own = s.diagonal()" in inspect.getsource(namespace["recall_at_1"])
    assert solved.solved() == {}  # not the reader's work


def test_calling_again_and_the_next_section_run_only_what_is_new(capsys):
    notebook = Notebook(log=deque())
    notebook.run('start_at("2", lesson="07")')
    notebook.run('start_at("2", lesson="07")')
    capsys.readouterr()
    notebook.run("loss = loss + seed")  # the reader's edit of the first cell of section 2
    notebook.run('start_at("3", lesson="07_part")')
    # Appending binds no name: it counts as run because nothing before it has to be.
    assert capsys.readouterr().out == ""
    assert not notebook.namespace["log"]


def test_a_run_from_the_top_prints_nothing(course, capsys):
    notebook = Notebook(log=deque())
    for text in texts(course)[:-1]:
        notebook.run(STUB if text.startswith("def ") else text)
    capsys.readouterr()
    notebook.run('start_at("3", lesson="07_part")')
    assert capsys.readouterr().out == ""
    assert notebook.namespace["recall_at_1"].__module__.endswith("recall_at_1")  # the reference, for the stub


def test_a_run_from_the_top_needs_no_source_and_no_name(course, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path.parent)
    notebook = Notebook(log=deque())
    for text in texts(course):
        notebook.run(text)
    assert capsys.readouterr().out == "recall_at_1: passed.\nThe cells below use your function.\na picture of 1.0\n"


def test_edited_cells_count_as_run(course):
    cells = cells_before(course, "2")
    history = [
        'preset = "full"\nseed = 7\n',
        texts(course)[1].replace("10", "20"),
        "loss = 2.0",
        "def recall_at_1(s):\n    return 3\nrecall_at_1 = check.recall_at_1(recall_at_1)",
    ]
    assert not_run(cells, history) == []
    assert [cell.source.splitlines()[0] for cell in not_run(cells, history[:2] + history[3:])] == [
        'start_at("1")',
        'print("a picture of", loss)',
    ]


def test_one_cell_run_twice_does_not_stand_for_another_that_binds_the_same_name(course):
    cells = cells_before(course, "3")
    ran = [*texts(course)[:5], texts(course)[2]]
    missing = [cell.source for cell in not_run(cells, ran)]
    assert missing == texts(course)[5:7]
    # An edited form stands for one cell only.
    assert not_run(cells, [*ran, "loss = 9\nstart_at = start_at"]) == []
    assert len(not_run(cells[2:6], ["loss = 9", texts(course)[3]])) == 1


def test_only_missing_cells_run_and_keep_the_readers_function(course, capsys):
    notebook = Notebook()
    for text in texts(course)[:2]:
        notebook.run(text)
    notebook.run("def recall_at_1(s):\n    return 3")
    mine = notebook.namespace["recall_at_1"]
    capsys.readouterr()
    notebook.run('start_at("2", lesson="07_part")')
    assert capsys.readouterr().out.splitlines() == [
        "Section 2 of 07_part: running 2 of the 5 cells before it, solved and at quick size.",
        '  start_at("1")',
        '  print("a picture of", loss)',
    ]
    assert notebook.namespace["recall_at_1"] is mine
    assert notebook.namespace["loss"] == 1.0


def test_the_size_is_quick_whatever_the_source_says(course, tmp_path):
    path = tmp_path / "solutions" / "07_part.py"
    path.write_text(path.read_text().replace('preset: str = "quick"', 'preset: str = "full"'))
    notebook = Notebook()
    notebook.run('start_at("1", lesson="07_part")')
    assert notebook.namespace["n"] == 10


def test_a_copy_of_the_notebook_is_the_same_lesson(monkeypatch, capsys):
    monkeypatch.setenv("JPY_SESSION_NAME", "work/07_part-Copy1.ipynb")
    Notebook().run('start_at("1")')
    assert capsys.readouterr().out.startswith("Section 1 of 07_part: running the 2 cells before it")


def test_vs_code_tells_the_name_too(capsys):
    Notebook(__vsc_ipynb_file__="/x/07_part.ipynb").run('start_at("1")')
    assert capsys.readouterr().out.startswith("Section 1 of 07_part")


def test_an_unknown_section_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"07_part has no cell with start_at\('4'\); it has 1, 2, 3"):
        Notebook().run('start_at("4", lesson="07_part")')


def test_a_fresh_notebook_whose_lesson_is_not_found_says_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match=r"name is not known here\); run the cells above first, or name the lesson"):
        Notebook().run('start_at("2")')
    with pytest.raises(RuntimeError, match="no lesson '08_other'; lessons: 07_part"):
        Notebook().run('start_at("2", lesson="08_other")')
    monkeypatch.setattr(start, "course_root", lambda: (_ for _ in ()).throw(RuntimeError("no checkout here")))
    with pytest.raises(RuntimeError, match="no checkout here"):
        Notebook().run('start_at("2", lesson="07_part")')


def test_a_cell_that_fails_is_named():
    notebook = Notebook()
    with pytest.raises(RuntimeError, match=r"the cell at 07_part.py:\d+ failed with NameError: name 'log'"):
        notebook.run('start_at("3", lesson="07_part")')


def test_a_plain_script_does_nothing():
    exec('start_at("2")', {"start_at": start_at})


def test_cells_that_are_run_do_not_start_sections_themselves(monkeypatch):
    read = []
    monkeypatch.setattr(start, "read_lesson", lambda path: read.append(path) or read_lesson(path))
    monkeypatch.setenv("JPY_SESSION_NAME", "07_part.ipynb")
    Notebook().run('start_at("2")')  # the cells before it hold start_at("1")
    assert len(read) == 1
