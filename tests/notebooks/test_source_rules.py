"""Each rule for a source, broken once: the message names the place and what is wrong."""

import pytest

from neuclip_lib.course.declared import choose, parameters, trial_of_the_day
from neuclip_lib.course.shape import shape_problems, size
from neuclip_lib.course.source import find_source, generate, read_lesson
from neuclip_lib.course.source_rules import source_problems

CODE = "record(n=n)\n"
TEXT = "Nothing; 1 minute to read"
SEED = "seed: int = 0  # seed of every draw [try 1: mean, spread]\n"
PRESET = 'preset: str = "quick"  # quick or full [try "full": n]\n'


def test_the_tiny_lesson_keeps_every_rule(make_course):
    lesson = read_lesson(make_course())
    assert source_problems(lesson) == [] and shape_problems(lesson) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('# %% tags=["parameters"]', "# %%", "0 cells are tagged 'parameters'"),
        ("# %%\nimport numpy", '# %% tags=["parameters"]\nimport numpy', "2 cells are tagged 'parameters'"),
        ('# %% tags=["parameters"]', '# %%\nprint(1)\n\n# %% tags=["parameters"]', "is not the first code cell"),
        (SEED, "seed = 0\n", "'seed = 0' is no parameter"),
        (SEED, "seed: int | None = 0  # seed [try 1: mean]\n", "is no parameter"),
        (SEED, "seed: int = 0  # seed of every draw\n", "neither [try value: recorded_name] nor [not tried: reason]"),
        (SEED, "seed: int = 0  # [try 1: mean]\n", "has no help text"),
        (SEED, "seed: int = 0.5  # seed [try 1: mean]\n", "0.5 is no int"),
        (SEED, "seed: int = 0  # seed [try one: mean]\n", "one is no plain value"),
        (SEED, "seed: int = 0  # seed [try 0: mean]\n", "trial value 0 is the default"),
        (PRESET, "", "the parameters cell has no line like: preset"),
        (PRESET, 'preset: str = "quick"  # quick or full [not tried: long]\n', 'the preset has no [try "full": NAME]'),
        ("validate(globals(), preset=", "print(preset=", "does not call validate"),
        (CODE, "print(n);\n", "line 3 of the cell ends with ';'"),
        (CODE, "print(n);  # quiet\n", "ends with ';'"),
        (CODE, "# !ls\n", "no plain Python"),
        (CODE, "# %pip install torch\n", "no plain Python"),
        (CODE, "from tqdm.auto import tqdm\n", "tqdm is refused"),
        (CODE, "import sys; sys.path.append('..')\n", "sys.path is refused"),
        (CODE, "# NBVAL_SKIP\n", "NBVAL_ is refused"),
        (CODE, 'open("/home/someone/x")\n', "absolute path '/home/someone'"),
        (CODE, 'open("C:\\\\Users\\\\x")\n', "absolute path"),
        (TEXT, "See /usr/share/x", "absolute path '/usr/share'"),
        (TEXT, "[next](91_more.ipynb)", "the link to 91_more.ipynb leads nowhere"),
        (TEXT, "![plot](https://example.org/a.png)", "picture from the network"),
        ('# %% id="tiny-average"', '# %% tags=["raises-exception"]', "tags ['raises-exception'] are refused"),
        ('# %% id="tiny-average"', '# %% tags=["nbval-skip"]', "tags ['nbval-skip'] are refused"),
        ("average = check.average(average)", "average(x)", "an exercise without its check"),
        ("    ### END SOLUTION", "    ### END SOLUTION\n    print(total)", "follows the solution region"),
        ("    ### END SOLUTION", "", "BEGIN SOLUTION without END SOLUTION"),
        ("    ### END SOLUTION", "    ### END OF SOLUTION", "write '### BEGIN SOLUTION: hint'"),
        (
            "    total = values.sum()\n    return total / len(values)\n",
            "    # nothing\n",
            "the solution region is empty",
        ),
    ],
)
def test_rule_is_kept(make_course, old, new, message):
    problems = source_problems(read_lesson(make_course((old, new))))
    assert any(message in line for line in problems), problems
    assert all("90_tiny.py" in line for line in problems)


def test_harmless_code_and_text_pass(make_course):
    code = 'print(";")  # a;\nx = {"a": "and/or"}; y = 1\nprint(1 / 2 / 3, "https://arxiv.org/abs/1706.03762")\n' + CODE
    text = "See [CLIP](https://arxiv.org/abs/2103.00020), `a/b/c`, <b>x</b>, [here](90_tiny.ipynb#Draws)"
    assert source_problems(read_lesson(make_course((CODE, code), (TEXT, text)))) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# # A tiny lesson", "# A tiny lesson", "the first cell is not the title"),
        ("You will be able to", "Goals", "no heading for objectives"),
        ("## References", "## More", "no heading for references"),
        ("explore(lambda", "print(lambda", "no explorer"),
        ("# Difficulty: easy, 1 minute.", "# Easy, 1 minute.", "does not say its difficulty"),
        ("# Difficulty: easy, 1 minute.", "# Difficulty: easy.", "how many minutes"),
        ("# <details><summary>Hint 2</summary>Divide.</details>\n", "", "has 1 folded hints"),
        ("short: true", "short: false", "words; expected 2000 to 4500"),
        ("short: true", "short: false", "12 cells; expected 30 to 60"),
        ("short: true", "short: false", "1 exercises; expected 3 to 5"),
        ("short: true", "short: false", "4 numbers in prose come from results; expected at least 8"),
        ("short: true", "short: false", "the longest exercise needs 2 lines; one must need 5"),
    ],
)
def test_lesson_has_its_parts(make_course, old, new, message):
    problems = shape_problems(read_lesson(make_course((old, new))))
    assert any(message in line for line in problems), problems


def test_last_text_links_to_the_next_lesson(make_course):
    make_course(name="91_more.py")
    assert "does not link to the next lesson" in shape_problems(read_lesson(make_course()))[0]
    linked = read_lesson(make_course(("# None.", "# None. [Next](91_more.ipynb)")))
    assert shape_problems(linked) == [] and source_problems(linked) == []


def test_words_are_those_of_the_prose(make_course):
    before = size(read_lesson(make_course())).words
    text = r"two words, $\alpha_x$ [link here](a/b.html) `code` {value:mean} <b>bold</b>"
    lesson = read_lesson(make_course((TEXT, TEXT + " " + text)))
    assert size(lesson).words == before + len(["two", "words", "link", "here", "code", "bold"])


def test_ids_stay_when_a_cell_is_inserted_or_a_body_changes(make_course):
    old = [cell.id for cell in read_lesson(make_course()).cells]
    inserted = (
        "# %% [markdown]\n# ## Draws",
        "# %% [markdown]\n# New.\n\n# %%\nimport math\n\n# %% [markdown]\n# ## Draws",
    )
    new = [cell.id for cell in read_lesson(make_course(inserted, (CODE, "record(n=int(n))\n"))).cells]
    assert new[:3] == old[:3] and new[5:] == old[3:] and len(set(new)) == 14


def test_cells_that_begin_alike_have_different_ids(make_course):
    twins = '# %%\nprint("a")\nprint(1)\n\n# %%\nprint("a")\nprint(2)\n\n# %%\nprint("a")\nprint(2)\n\n'
    ids = [
        cell.id
        for cell in read_lesson(
            make_course(("# %% [markdown]\n# ## Draws", twins + "# %% [markdown]\n# ## Draws"))
        ).cells
    ]
    assert len(set(ids)) == len(ids) == 15


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("short: true", "long: true", r"unknown header key \['long'\]"),
        ('# %% id="tiny-average"', "# %% The exercise", r"unknown cell key \['title'\]"),
        ('# %% id="tiny-average"', '# %% id="two words"', "the id 'two words' is taken or has other signs"),
        ("# %%\nrecord(average", "# %% [raw]\n# text\n\n# %%\nrecord(average", "a raw cell"),
        ("# %%\nrecord(average", "# %%\n\n# %%\nrecord(average", "the cell is empty"),
    ],
)
def test_unreadable_source_is_refused(make_course, old, new, message):
    with pytest.raises(ValueError, match=message):
        read_lesson(make_course((old, new)))


def test_source_name_and_number(make_course):
    source = make_course()
    root = source.parent.parent
    assert find_source(root, "90") == find_source(root, "90_tiny") == source
    with pytest.raises(ValueError, match="no lesson '7'; lessons: 90_tiny"):
        find_source(root, "7")
    with pytest.raises(ValueError, match=r"named NN_name\.py"):
        read_lesson(make_course(name="9_tiny.py"))
    make_course(name="90_again.py")
    with pytest.raises(ValueError, match="two lessons have the number 90"):
        find_source(root, "90")


def test_parameters_and_command_line_values(make_course):
    flag = "flag: bool = True  # a switch [try False: n]\nsizes: list = [1]  # sizes [try [2, 3]: n]\n"
    lesson = read_lesson(make_course((SEED, SEED + flag)))
    declared = parameters(lesson)
    assert list(declared) == ["preset", "seed", "flag", "sizes", "scale"]
    assert declared["seed"].trial.value == 1 and declared["seed"].trial.changes == ("mean", "spread")
    assert declared["sizes"].trial.value == [2, 3] and declared["scale"].help == "width of the draws"
    given = {"seed": "007", "flag": "false", "scale": "-1e-3", "sizes": "[1, 2]", "preset": "full"}
    assert choose(lesson, given) == {"seed": 7, "flag": False, "scale": -0.001, "sizes": [1, 2], "preset": "full"}
    for name, value, message in [
        ("sead", "1", "no parameter 'sead', did you mean 'seed'"),
        ("seed", "1.5", "seed got '1.5'; expected a int"),
        ("flag", "0", "flag got '0'; expected true or false"),
        ("sizes", "1", "sizes got '1'; expected a list"),
        ("preset", "fast", "no preset 'fast'; presets: quick, full"),
    ]:
        with pytest.raises(ValueError, match=message):
            choose(lesson, {name: value})


def test_the_parameter_of_the_day_rotates_with_the_source(make_course):
    chosen = {
        trial_of_the_day(read_lesson(make_course(("A tiny lesson", f"A tiny lesson {number}")))).name
        for number in range(20)
    }
    assert chosen == {"seed", "scale"}


def test_generated_lesson_differs_from_the_solution_in_the_region_only(make_course):
    lesson = read_lesson(make_course())
    solution, stubbed = generate(lesson, "solution"), generate(lesson, "lesson")
    different = [a.id for a, b in zip(solution.cells, stubbed.cells, strict=True) if a.source != b.source]
    assert different == ["tiny-average"]
