"""The layers of the library, read from its imports: a folder imports only lower ones."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "neuclip_lib"
LAYERS = [  # low to high; a part is a module or a folder directly under neuclip_lib
    {"files", "home", "progress", "devices", "ranks", "block_sums"},
    {"contrast", "conjugate", "tables"},
    {"losses", "normalizers", "temperature", "per_sample_temperature", "rho"},
    {"methods", "parts", "models", "data"},
    {"evaluation"},
    {"theory"},
    {"training", "presets"},
    {"bench", "course"},
    {"studies"},
    {"cli", "__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
# Two parts of one layer that build on each other, in this direction only.
WITHIN_A_LAYER = {("presets", "training"), ("methods", "parts"), ("per_sample_temperature", "temperature")}


def part_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def imports(tree: ast.AST, module: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything imported anywhere in the file, relative names made absolute."""
    package = ("neuclip_lib", *module.parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)


def wrong_imports(text: str, module: Path) -> list[str]:
    """Imports of this file that go sideways or up."""
    own, wrong = part_of(module), []
    for name, line in imports(ast.parse(text), module):
        pieces = name.split(".")
        if pieces[0] != "neuclip_lib" or len(pieces) == 1 or pieces[1] == own:
            continue
        other = pieces[1]
        if other.startswith("__version") or (own, other) in WITHIN_A_LAYER:
            continue
        if other not in LEVEL:
            wrong.append(f"{module}:{line} imports {name}, and {other} has no layer")
        elif LEVEL[other] >= LEVEL[own]:
            wrong.append(f"{module}:{line} imports {name}, which is not below {own}")
    return wrong


def test_every_part_has_a_layer() -> None:
    assert {part_of(module) for module in MODULES} - set(LEVEL) == set()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.as_posix())
def test_a_module_imports_only_lower_layers(module: Path) -> None:
    assert wrong_imports((PACKAGE / module).read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("contrast.py", "from neuclip_lib.losses import global_contrastive"),
        ("losses/siglip.py", "def f():\n    import neuclip_lib.normalizers.batch"),
        ("losses/siglip.py", "from ..methods import get_method"),
        ("methods.py", "from neuclip_lib import data"),
        ("data/sets/icons.py", "from ...models import build_model"),
        ("training/trainer.py", "from neuclip_lib.presets import laptop"),
        ("files.py", "import neuclip_lib.somewhere"),
    ],
)
def test_a_wrong_import_is_seen(module: str, text: str) -> None:
    assert len(wrong_imports(text, Path(module))) == 1


def test_right_imports_are_let_through() -> None:
    text = "import torch\nfrom neuclip_lib import __version__\nfrom ..contrast import GlobalBatch\nfrom . import sets"
    assert wrong_imports(text, Path("losses/siglip.py")) == []


def declared(extras: bool) -> set[str]:
    """Distributions that pyproject.toml names, with or without those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"].values() if extras else [])]
    return {canonicalize_name(Requirement(line).name) for lines in lists for line in lines}


def third_party(tree: ast.AST, module: Path) -> set[str]:
    names = {name.split(".")[0] for name, _ in imports(tree, module)}
    return {name for name in names if name not in sys.stdlib_module_names and name != "neuclip_lib"}


@cache
def owners_of_packages() -> dict[str, list[str]]:
    """Importable name -> distributions that own it."""
    return dict(packages_distributions())


def undeclared(names: set[str]) -> set[str]:
    owners, allowed = owners_of_packages(), declared(extras=True)
    return {name for name in names if not allowed & {canonicalize_name(owner) for owner in owners.get(name, [name])}}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.as_posix())
def test_every_package_that_is_used_is_declared(module: Path) -> None:
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    assert undeclared(third_party(tree, module)) == set()


def compared_constants(tree: ast.AST) -> Iterator[tuple[object, int]]:
    """(value, line) of what is compared with: == "x", in ("x", "y"), case "x"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                parts = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
                yield from ((part.value, part.lineno) for part in parts if isinstance(part, ast.Constant))
        elif isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant):
            yield node.value.value, node.value.lineno


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.as_posix())
def test_no_branch_on_a_methods_name_outside_the_table(module: Path) -> None:
    from neuclip_lib.methods import method_names

    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    found = [f"{module}:{line}" for value, line in compared_constants(tree) if value in method_names()]
    assert part_of(module) == "methods" or found == []


@pytest.mark.parametrize(
    "text", ["if name == 'a': pass", "x = 'a' != name", "y = name in ('a', 'b')", "match name:\n    case 'a': pass"]
)
def test_such_a_branch_is_seen(text: str) -> None:
    assert "a" in [value for value, _ in compared_constants(ast.parse(text))]


def in_a_new_process(code: str, **environment: str) -> str:
    variables = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables | environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wait_policy_stands_before_torch_is_loaded() -> None:
    code = "import os, sys, neuclip_lib; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    assert in_a_new_process(code) == "False PASSIVE"
    assert in_a_new_process(code, OMP_WAIT_POLICY="ACTIVE") == "False ACTIVE", "a reader's own choice is kept"


def test_importing_a_part_sets_the_wait_policy_too() -> None:
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': print(os.environ.get('OMP_WAIT_POLICY'))\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import neuclip_lib.contrast"
    )
    assert in_a_new_process(code).splitlines()[0] == "PASSIVE"


# Imported by its one user, when that one is asked for something that needs the package.
NEEDS_AN_OPTIONAL_PACKAGE = {"neuclip_lib.course.explorer_view"}


def test_modules_import_without_the_optional_packages() -> None:
    """Every module is imported in a process where the packages of the extras cannot be found."""
    optional = declared(extras=True) - declared(extras=False)
    owned = {name for name, owners in owners_of_packages().items() if optional & set(map(canonicalize_name, owners))}
    assert {"pandas", "IPython", "ipywidgets", "sklearn", "emoji"} <= owned
    names = [".".join(("neuclip_lib", *module.with_suffix("").parts)) for module in MODULES]
    code = (
        "import importlib, sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {owned!r} and 'neuclip_lib' in importer(): raise ImportError(name)\n"
        "def importer():\n"
        "    frame = sys._getframe(2)\n"
        "    while 'importlib' in frame.f_code.co_filename: frame = frame.f_back\n"
        "    return frame.f_globals.get('__name__', '')\n"
        "sys.meta_path.insert(0, Block())\n"
        f"for name in {names!r}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError as error: print(name, error)\n"
    )
    failed = {line.split()[0] for line in in_a_new_process(code).splitlines()}
    assert failed == NEEDS_AN_OPTIONAL_PACKAGE


def test_importing_the_library_touches_no_random_state_and_prints_nothing() -> None:
    code = (
        "import random, numpy, torch\n"
        "before = random.getstate(), numpy.random.get_state()[1].sum(), torch.get_rng_state().sum()\n"
        "import neuclip_lib.methods, neuclip_lib.models, neuclip_lib.data\n"
        "import neuclip_lib.evaluation, neuclip_lib.training\n"
        "after = random.getstate(), numpy.random.get_state()[1].sum(), torch.get_rng_state().sum()\n"
        "assert before == after"
    )
    assert in_a_new_process(code) == ""
