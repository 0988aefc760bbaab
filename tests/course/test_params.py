import math

import pytest

from neuclip_lib.course import a_device, at_least, between, validate
from neuclip_lib.course.params import assigned_names, were_validated
from neuclip_lib.course.replay import replaying

SCHEMA = {
    "preset": ("quick", "full"),
    "seed": at_least(0),
    "device": a_device,
    "tau": between(0.01, 1.0),
    "verbose": bool,
    "widths": list,
    "lr": float,
}
GOOD = {"preset": "quick", "seed": 3, "device": "cpu", "tau": 0.07, "verbose": False, "widths": [1], "lr": 1}


def message(**changes):
    with pytest.raises(ValueError) as caught:
        validate({**GOOD, **changes}, **SCHEMA)
    lines = str(caught.value).splitlines()
    assert lines[0] == "this notebook cannot run with these parameters:"
    return "\n".join(lines[1:])


def test_good_values_come_back_unchanged():
    parameters = validate(GOOD, **SCHEMA)
    assert dict(parameters) == GOOD
    assert parameters.lr == 1 and type(parameters.lr) is int
    assert list(parameters) == list(SCHEMA)
    assert repr(validate({"seed": 3}, seed=int)) == "seed 3"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"verbose": "false"},
            "verbose: got the text 'false', expected True or False; "
            "with papermill: -p verbose False, or -y 'verbose: false'",
        ),
        (
            {"seed": "007"},
            "seed: got the text '007', expected a whole number of at least 0; "
            "with papermill: -p seed 0, or -y 'seed: 0'",
        ),
        (
            {"widths": "[1, 2]"},
            "widths: got the text '[1, 2]', expected a list; with papermill: -y 'widths: [1, 2]'",
        ),
        (
            {"preset": "fast"},
            "preset: got the text 'fast', expected one of 'quick', 'full'; "
            "with papermill: -p preset full, or -y 'preset: full'",
        ),
        (
            {"tau": 2.0},
            "tau: got 2.0 (float), expected a number from 0.01 to 1.0; with papermill: -p tau 0.01, or -y 'tau: 0.01'",
        ),
    ],
)
def test_what_was_given_what_was_expected_and_how_to_pass_it(changes, expected):
    assert message(**changes) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 1.0),
        ("seed", True),
        ("seed", None),
        ("seed", math.inf),
        ("tau", "0.07"),
        ("tau", math.nan),
        ("tau", 0),
        ("lr", "1e-3"),
        ("lr", math.nan),
        ("lr", True),
        ("verbose", 1),
        ("verbose", None),
        ("preset", None),
        ("widths", (1, 2)),
        ("device", "gpu"),
        ("device", "cuda:99"),
        ("device", 0),
    ],
)
def test_each_wrong_value_is_named(name, value):
    assert message(**{name: value}).startswith(f"{name}: got ")


def test_one_is_not_true_and_true_is_not_one():
    with pytest.raises(ValueError, match=r"flag: got 1 \(int\), expected one of True"):
        validate({"flag": 1}, flag=(True, None))
    with pytest.raises(ValueError, match=r"size: got True \(bool\), expected one of 1, 2"):
        validate({"size": True}, size=(1, 2))


def test_all_problems_come_at_once():
    text = message(seed=-1, tau="x", sed=4)
    assert [line.split(" ")[0] for line in text.splitlines()] == ["sed", "seed:", "tau:"]


def test_an_unknown_name_is_refused_with_the_closest_one():
    assert message(sed=4).startswith("sed is not a parameter of this lesson; did you mean seed? (they are preset, seed")


def test_a_missing_name_is_refused():
    with pytest.raises(ValueError, match="seed is missing: expected a whole number of at least 0"):
        validate({}, seed=at_least(0))


def test_a_schema_that_says_nothing_is_refused():
    with pytest.raises(ValueError, match="declared by a type, its choices or a kind, got 3"):
        validate({}, seed=3)
    with pytest.raises(ValueError, match="cannot be a set"):
        validate({}, seed=set)


def test_parameters_are_read_only_and_pick_by_preset():
    parameters = validate({"preset": "full", "seed": 1}, preset=("quick", "full"), seed=int)
    assert parameters.pick(quick=120, full=2000) == 2000
    with pytest.raises(ValueError, match="no value for preset 'full', only for quick"):
        parameters.pick(quick=1)
    with pytest.raises(AttributeError, match="read only; change seed in the first cell"):
        parameters.seed = 2
    with pytest.raises(AttributeError, match="no parameter 'sed'; there are preset, seed"):
        _ = parameters.sed


# In a notebook: cells are run in one namespace, which IPython gives their sources as In.

SECOND = "import math\nfrom math import pi\nP = validate(preset=('quick', 'full'), seed=at_least(0))"


class Notebook:
    def __init__(self, **bound):
        self.namespace = {"In": [""], "Out": {}, "validate": validate, "at_least": at_least, "_i": "x", **bound}

    def run(self, source):
        self.namespace["In"].append(source)
        exec(source, self.namespace)


def test_papermill_cells_are_read_from_the_notebook():
    notebook = Notebook()
    notebook.run("preset: str = 'quick'\nseed: int = 0")
    notebook.run("# Parameters\nseed = 5\n")
    assert not were_validated(notebook.namespace)
    notebook.run(SECOND)
    assert notebook.namespace["P"].seed == 5
    assert were_validated(notebook.namespace)


def test_an_injected_name_that_the_lesson_does_not_know_is_refused_and_removed():
    notebook = Notebook()
    notebook.run("preset = 'quick'\nseed = 0")
    notebook.run("# Parameters\nsed = 5\n")
    with pytest.raises(ValueError, match="sed is not a parameter of this lesson; did you mean seed"):
        notebook.run(SECOND)
    assert not were_validated(notebook.namespace)
    notebook.run(SECOND)  # corrected
    assert were_validated(notebook.namespace)


def test_an_injected_name_that_an_import_replaces_is_still_refused():
    notebook = Notebook()
    notebook.run("preset = 'quick'\nseed = 0")
    notebook.run("# Parameters\npi = 3\n")
    with pytest.raises(ValueError, match="pi is not a parameter"):
        notebook.run(SECOND)


def test_the_cell_can_run_again_after_the_lesson_has_bound_names():
    notebook = Notebook()
    notebook.run("preset = 'quick'\nseed = 0")
    notebook.run(SECOND)
    notebook.run("loss = 3.0\nlabel = 'x'")
    notebook.run("preset = 'full'\nseed = 1")
    notebook.run(SECOND)
    assert dict(notebook.namespace["P"]) == {"preset": "full", "seed": 1}
    notebook.run("preset = 'full'\nseed = 1\nsteps = 5")
    with pytest.raises(ValueError, match="steps is not a parameter"):
        notebook.run(SECOND)


def test_cells_run_by_start_at_do_not_count_the_readers_own_names_as_parameters():
    notebook = Notebook(mine=3)
    notebook.run("preset = 'quick'\nseed = 0")
    with replaying():
        notebook.run(SECOND)
    assert notebook.namespace["P"].seed == 0 and notebook.namespace["mine"] == 3


def test_assigned_names():
    source = "import a.b, c as d\nfrom e import f\nx, (y, z) = 1, (2, 3)\nw: int = 1\nfor i in []:\n    q = 1\n"
    source += "def g():\n    inner = 1\nclass H: ...\nwith open(x) as k: pass\n"
    assert assigned_names(source) == {"a", "d", "f", "x", "y", "z", "w", "i", "q", "g", "H", "k"}
    assert assigned_names(source, imports=False) == {"x", "y", "z", "w", "i", "q", "g", "H", "k"}
    assert assigned_names("%matplotlib inline") == set()
