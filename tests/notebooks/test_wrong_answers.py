"""Every check recognises the mistakes it names, written as a reader writes them, and passes other right answers."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from neuclip_lib.course import check
from neuclip_lib.course.checks import exercise
from neuclip_lib.course.exercise import judge

HERE = Path(__file__).parent
SOLUTIONS = HERE.parents[1] / "solutions"
ENOUGH_RIGHT, ENOUGH_WRONG = 2, 3


@cache
def answers(number):
    """The table of one lesson: {exercise: {"right": [function], "wrong": [(function, name of the mistake)]}}."""
    spec = importlib.util.spec_from_file_location(f"answers_{number}", HERE / "wrong_answers" / f"{number}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EXERCISES


NUMBERS = sorted(path.stem for path in (HERE / "wrong_answers").glob("[0-9][0-9].py"))
TASKS = [(number, name) for number in NUMBERS for name in answers(number)]
RIGHT = [(name, function) for number, name in TASKS for function in answers(number)[name]["right"]]
WRONG = [(name, *pair) for number, name in TASKS for pair in answers(number)[name]["wrong"]]


@pytest.fixture(autouse=True)
def unwatched(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.delenv("NEUCLIP_PROGRESS_FILE", raising=False)


@pytest.mark.parametrize(("name", "function"), RIGHT, ids=lambda one: getattr(one, "__name__", one))
def test_a_right_answer_passes_and_is_used(name, function, capsys):
    assert getattr(check, name)(function) is function
    assert capsys.readouterr().out.startswith(f"{name}: passed.\n")


@pytest.mark.parametrize(("name", "function", "mistake"), WRONG, ids=lambda one: getattr(one, "__name__", one))
def test_a_wrong_answer_gets_exactly_its_message(name, function, mistake, capsys):
    assert getattr(check, name)(function) is exercise(name).reference
    expected = f"{name}: not right yet: {exercise(name).wrong[mistake].message}\n"
    assert capsys.readouterr().out == expected + "The cells below use the reference version.\n"


@pytest.mark.parametrize(("number", "name"), TASKS)
def test_every_named_mistake_is_tried_and_there_are_enough(number, name):
    table = answers(number)[name]
    assert {mistake for _, mistake in table["wrong"]} == set(exercise(name).wrong)
    assert len(exercise(name).wrong) >= ENOUGH_WRONG
    assert len(table["right"]) >= ENOUGH_RIGHT


@pytest.mark.parametrize(("number", "name"), TASKS)
def test_the_reference_passes_and_each_mistake_made_by_the_check_itself_is_told_apart(number, name):
    task = exercise(name)
    assert task.name == name
    assert judge(task, task.reference).state == "passed"
    found = {mistake: judge(task, wrong.function).wrong for mistake, wrong in task.wrong.items()}
    assert found == {mistake: mistake for mistake in task.wrong}


def test_every_exercise_is_in_the_table_of_a_lesson():
    assert {name for _, name in TASKS} == set(dir(check))


@pytest.mark.parametrize("source", sorted(SOLUTIONS.glob("[0-9][0-9]_*.py")), ids=lambda path: path.stem)
def test_every_check_of_a_lesson_is_in_its_table(source):
    used = set(re.findall(r"\bcheck\.(\w+)\(", source.read_text(encoding="utf-8")))
    assert not used or used <= set(answers(source.name[:2]))
