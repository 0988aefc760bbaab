import pytest

from neuclip_lib.course import expect_error


def test_the_message_is_printed_and_the_cell_goes_on(capsys):
    with expect_error(ValueError, match="low is"):
        raise ValueError("low is above high")
    assert capsys.readouterr().out == "ValueError: low is above high\n"


def test_no_error_is_an_error():
    with pytest.raises(AssertionError, match="expected ValueError, but nothing was raised"), expect_error(ValueError):
        pass


def test_another_message_is_an_error_that_keeps_its_cause():
    with pytest.raises(AssertionError, match=r"'tau'.*ValueError: seed") as caught, expect_error(ValueError, "tau"):
        raise ValueError("seed")
    assert isinstance(caught.value.__cause__, ValueError)


def test_another_exception_passes_through(capsys):
    with pytest.raises(KeyError), expect_error(ValueError):
        raise KeyError("x")
    assert capsys.readouterr().out == ""


def test_a_subclass_is_named_as_what_it_is(capsys):
    with expect_error(ArithmeticError):
        1 / 0  # noqa: B018
    assert capsys.readouterr().out == "ZeroDivisionError: division by zero\n"
