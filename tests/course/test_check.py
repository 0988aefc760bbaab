import json
import math
import time

import numpy as np
import pytest
import torch

from neuclip_lib.course import check, checks, solved
from neuclip_lib.course.answers import same, shown
from neuclip_lib.course.exercise import Case, Exercise, Wrong, judge
from neuclip_lib.course.guarded import call
from neuclip_lib.course.replay import replaying

RIGHT = "passed"


def mean(x):
    return x.mean()


def cases():
    return [Case("x = 1, 2, 6", (torch.tensor([1.0, 2.0, 6.0]),)), Case("x = 2, -4", (torch.tensor([2.0, -4.0]),))]


EXERCISE = Exercise(
    name="mean",
    reference=mean,
    cases=cases,
    wrong={
        "sum": Wrong(lambda x: x.sum(), "this is the sum."),
        "log": Wrong(lambda x: x.mean().log(), "there is no log."),
    },
)


def verdict(function):
    return judge(EXERCISE, function)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(solved, "_memory", {})
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.delenv("NEUCLIP_PROGRESS_FILE", raising=False)
    monkeypatch.setattr(checks, "exercise", lambda name: EXERCISE)


def run(function):
    return check.log_normalizer(function)  # the table is replaced by the exercise above


# What the reader sees.


def test_a_right_answer_is_returned_and_named(capsys):
    def mine(x):
        return sum(x.tolist()) / len(x) * torch.ones(())

    assert run(mine) is mine
    assert capsys.readouterr().out == "log_normalizer: passed.\nThe cells below use your function.\n"


def test_a_stub_is_not_done_and_gives_the_reference(capsys):
    def mine(x): ...

    assert run(mine) is mean
    assert capsys.readouterr().out == "log_normalizer: not done yet.\nThe cells below use the reference version.\n"


def test_a_named_wrong_answer_gets_its_message(capsys):
    assert run(lambda x: torch.sum(x)) is mean
    expected = "log_normalizer: not right yet: this is the sum.\nThe cells below use the reference version.\n"
    assert capsys.readouterr().out == expected


def test_another_wrong_answer_gets_the_first_case_that_fails(capsys):
    run(lambda x: x.median())
    assert "not right yet: x = 1, 2, 6: expected 3, got 2\n" in capsys.readouterr().out
    run(lambda x: x.mean().abs())
    assert "not right yet: x = 2, -4: expected -1, got 1\n" in capsys.readouterr().out


def test_what_the_function_prints_is_shown_shortly(capsys):
    def mine(x):
        for line in range(100):
            print("line", line)
        return x.mean()

    run(mine)
    out = capsys.readouterr().out
    assert "    line 7\n" in out and "line 8" not in out


# Stubs and half-done functions.


def _stub(x):
    # Your code, about 3 lines
    ...


def _stub_then_return(x):
    total = ...
    return total  # noqa: RET504


def _stub_used(x):
    total = ...
    return total / 2


def _stub_name(x):
    ...
    return total  # noqa: F821


def _not_implemented(x):
    raise NotImplementedError


@pytest.mark.parametrize("function", [_stub, _stub_then_return, _stub_used, _stub_name, _not_implemented])
def test_stubs_are_not_done(function):
    assert verdict(function).state == "not done"


def test_a_stub_whose_source_cannot_be_read_is_not_done():
    namespace = {}
    exec("def mine(x):\n    ...", namespace)
    assert verdict(namespace["mine"]).state == "not done"


def test_a_forgotten_return_is_said():
    def mine(x):
        x.mean()

    assert verdict(mine).message == "it returns nothing; does it end with a return?"


def test_a_right_function_in_which_the_dots_still_stand_passes():
    def mine(x):
        ...
        return x.mean()

    assert verdict(mine).state == RIGHT


# Whatever the function does.


def _exits(x):
    raise SystemExit(3)


class _Odd(BaseException):
    def __str__(self):
        raise ValueError("no words")


def _odd(x):
    raise _Odd


class _Hostile:
    def __eq__(self, other):
        raise RuntimeError("do not compare")

    __hash__ = None

    def __repr__(self):
        raise RuntimeError("do not show")


def _recursion(x):
    return _recursion(x)


def _generator(x):
    yield x.mean()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: 1 / 0, "x = 1, 2, 6: it raised ZeroDivisionError: division by zero"),
        (lambda: 1, "it raised TypeError"),
        (_exits, "it raised SystemExit: 3"),
        (_odd, "it raised _Odd"),
        (_recursion, "it raised RecursionError"),
        (lambda x: x, "expected a tensor of shape (), got a tensor of shape (3,)"),
        (lambda x: x.mean()[None], "expected a tensor of shape (), got a tensor of shape (1,)"),
        (lambda x: [x.mean()], "expected a tensor of shape (), got a list of 1"),
        (lambda x: x.mean().item(), "expected a tensor of shape (), got a float"),
        (lambda x: x.numpy().mean(keepdims=True), "got a numpy array of shape (1,)"),
        (lambda x: "3", "expected a tensor of shape (), got a str"),
        (lambda x: x.mean() * math.nan, "expected 3, got nan"),
        (lambda x: x.mean() / 0, "expected 3, got inf"),
        (lambda x: _Hostile(), "expected a tensor of shape (), got a _Hostile"),
        (_generator, "got a generator"),
        (3, "expected a function, got int"),
        (None, "expected a function, got NoneType"),
    ],
)
def test_nothing_stops_the_notebook(function, message, capsys):
    assert run(function) is mean
    assert message in capsys.readouterr().out


def test_a_result_that_cannot_even_be_compared_is_said():
    exercise = Exercise("x", lambda x: _Hostile(), cases, {})
    assert "could not be compared (RuntimeError)" in judge(exercise, lambda x: _Hostile()).message


def test_an_endless_function_is_given_up_once(monkeypatch):
    monkeypatch.setattr("neuclip_lib.course.guarded.SECONDS_ALLOWED", 0.2)
    calls = []

    def endless(x):
        calls.append(1)
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                print("swallowed")

    begun = time.monotonic()
    outcome = call(endless, 1, seconds=0.2)
    assert outcome.error == "took more than 0.2 s"
    assert time.monotonic() - begun < 2
    found = Exercise("x", mean, cases, {}, run=lambda f, x: call(f, x, seconds=0.1)).outcomes(lambda x: x)
    assert len(found) == 2
    assert len(calls) == 1


def test_cases_after_one_that_took_too_long_are_not_tried(monkeypatch):
    from neuclip_lib.course import exercise as module

    calls = []

    def slow(run, function, *inputs):
        calls.append(function)
        return module.Outcome(error="took more than 10 s", kind="_TooSlow")

    monkeypatch.setattr(module, "call", slow)
    assert [one.kind for one in EXERCISE.outcomes(mean)] == ["_TooSlow", "_TooSlow"]
    assert len(calls) == 1


def test_endless_output_is_kept_short():
    def chatty(x):
        while True:
            print("x" * 1000)

    outcome = call(chatty, 1, seconds=0.3)
    assert outcome.error == "took more than 0.3 s"
    assert len(outcome.printed) <= 2000


def test_the_timer_is_off_and_its_handler_restored_afterwards():
    import signal

    before = signal.getsignal(signal.SIGALRM)
    call(lambda: 1, seconds=0.2)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) == before


def test_the_readers_own_interrupt_goes_through():
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)


def test_a_function_that_changes_its_input_is_told_even_when_right():
    def mine(x):
        x -= 1
        return x.mean() + 1

    found = verdict(mine)
    assert found.state == "wrong"
    assert found.message == "the result is right, but it changes its argument 1 in place; work on a copy"


def test_a_wrong_answer_is_recognised_where_a_second_mistake_spoils_one_case():
    exercise = Exercise("x", mean, cases, {"square": Wrong(lambda x: x.square().mean(), "no square.")})
    partly = judge(exercise, lambda x: x.square().mean() / (x.sum() > 0))  # infinite on the second case
    assert partly.wrong == "square"
    # Agreeing with the reference wherever it is finite is not enough to be taken for a mistake.
    right_where_finite = judge(exercise, lambda x: x.mean() / (x.sum() > 0))
    assert right_where_finite.wrong == ""
    assert right_where_finite.message == "x = 2, -4: expected -1, got -inf"


def test_an_exercise_can_compare_gradients():
    def slope(function, x):
        x = x.clone().requires_grad_()
        value = function(x)
        return value, torch.autograd.grad(value, x, allow_unused=True)[0] if value.requires_grad else 0 * x

    exercise = Exercise(
        "x", mean, cases, {"detached": Wrong(lambda x: x.mean().detach(), "the gradient is lost.")}, run=slope
    )
    assert judge(exercise, lambda x: x.detach().mean()).wrong == "detached"
    assert judge(exercise, lambda x: x.sum() / len(x)).state == RIGHT


# The record.


def test_in_batch_the_record_stays_in_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("NEUCLIP_HOME", str(tmp_path))
    run(mean)
    assert solved.solved() == {"log_normalizer": {"state": "passed", "passed": True, "wrong": ""}}
    assert list(tmp_path.iterdir()) == []


def test_a_watching_person_gets_a_file_beside_the_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("NEUCLIP_HOME", str(tmp_path))
    monkeypatch.setenv("JPY_SESSION_NAME", "x.ipynb")
    run(mean)
    file = tmp_path / "runs" / "exercises.json"
    assert json.loads(file.read_text())["log_normalizer"]["passed"] is True


def test_a_solved_exercise_stays_solved_and_the_last_state_is_kept(monkeypatch, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"other": {"state": "passed", "passed": true, "wrong": ""}}')
    monkeypatch.setenv("NEUCLIP_PROGRESS_FILE", str(file))
    run(mean)
    run(lambda x: x.sum())
    kept = json.loads(file.read_text())
    assert kept["log_normalizer"] == {"state": "wrong", "passed": True, "wrong": "sum"}
    assert kept["other"]["passed"] is True


def test_a_record_that_cannot_be_kept_is_said_and_stops_nothing(monkeypatch, tmp_path, capsys):
    file = tmp_path / "damaged.json"
    file.write_text("{")
    monkeypatch.setenv("NEUCLIP_PROGRESS_FILE", str(file))
    assert run(mean) is mean
    assert "(not recorded: " in (out := capsys.readouterr().out) and "is damaged" in out
    assert file.read_text() == "{"
    monkeypatch.setenv("NEUCLIP_PROGRESS_FILE", str(file / "under"))
    assert run(mean) is mean
    assert "(not recorded: " in capsys.readouterr().out


def test_cells_run_for_the_reader_earn_nothing():
    with replaying():
        run(mean)
    assert solved.solved() == {}


# Names.


def test_unknown_checks_name_the_closest():
    with pytest.raises(AttributeError, match=r"no check 'recall_at_one'; did you mean check.recall_at_1\? there are "):
        _ = check.recall_at_one
    assert {"log_normalizer", "recall_at_1"} <= set(dir(check))
    assert not hasattr(check, "__wrapped__")


# Comparison.


@pytest.mark.parametrize(
    ("expected", "got", "equal"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0 + 5e-6]), True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 5e-5]), False),
        (torch.tensor([1000.0]), torch.tensor([1000.005]), True),
        (torch.tensor([1e-6]), torch.tensor([2e-6]), True),  # absolute below 1
        (torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf]), True),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), False),
        (torch.tensor([math.inf]), torch.tensor([1.0]), False),
        (torch.tensor([1]), torch.tensor([1.0]), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64, requires_grad=True), True),
        (2.0, 2, True),
        (2.0, torch.tensor(2.0), True),
        (2.0, np.float32(2), True),
        (2.0, True, False),
        (2.0, [2.0], False),
        (2.0, "2.0", False),
        (True, True, True),
        (True, 1, False),
        ((1.0, torch.zeros(2)), [1.0, torch.zeros(2)], True),
        ((1.0, 2.0), (1.0,), False),
        ({"a": 1.0}, {"a": 1.0}, True),
        ({"a": 1.0}, {"a": [1.0]}, False),
        ({"a": 1.0}, {"b": 1.0}, False),
        ("text", "text", True),
        (np.zeros(2), np.zeros(2), True),
        (np.zeros(2), torch.zeros(2), False),
    ],
)
def test_same(expected, got, equal):
    assert same(expected, got, 1e-5) is equal


def test_shown():
    assert shown(torch.arange(8) / 3) == "[0, 0.3333, 0.6667, 1, 1.333, 1.667, ...] of shape (8,)"
    assert shown(torch.eye(2)) == "[[1, 0], [0, 1]]"
    assert shown({"a": (1.23456, "x")}) == "{a: (1.235, 'x')}"
