"""The built wheel, in an environment that holds the required packages and nothing else."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "LICENSE-text")
OPTIONAL = ("pandas", "IPython", "ipywidgets", "papermill", "sklearn", "emoji", "pytest", "hypothesis")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the environment is made of symbolic links")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that nothing is left in the tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "neuclip_lib", copy / "neuclip_lib", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "datasets"):  # must not come along
        (copy / name).mkdir()
        (copy / name / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    return built


def metadata_of(wheel: Path) -> importlib.metadata.PathDistribution:
    (folder,) = [path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info")]
    return importlib.metadata.PathDistribution(folder)  # type: ignore[arg-type]


def closure(needs: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions that these requirements need, themselves included, without extras of their own."""
    todo, seen = [(Requirement(need), "") for need in needs], set()
    while todo:
        need, extra = todo.pop()
        if need.marker and not need.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *need.extras):
            if (key := (canonicalize_name(need.name), wanted)) in seen:
                continue
            seen.add(key)
            found = importlib.metadata.distribution(need.name)
            if wanted == "":
                yield found
            todo += [(Requirement(line), wanted) for line in found.requires or []]


def link_packages(distributions: Iterator[importlib.metadata.Distribution], folder: Path) -> None:
    """Make a folder that shows the top-level files of these distributions alone."""
    folder.mkdir()
    for distribution in distributions:
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True)
    needs = metadata_of(wheel).requires or []
    link_packages(closure([need for need in needs if "extra ==" not in need]), folder / "packages")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "required.pth").write_text(f"{folder / 'packages'}\n")
    return python


def call(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the clean interpreter in another folder, where no checkout is near."""
    plain = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "NEUCLIP"))
    }
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env=plain | {"NEUCLIP_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_holds_the_library_and_nothing_beside_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "neuclip_lib").rglob("*.py")}
    assert modules <= names
    assert "neuclip_lib/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"neuclip_lib", metadata_of(wheel)._path.name}  # type: ignore[attr-defined]
    licences = {Path(name).name for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "LICENSE-text"}


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = metadata_of(wheel)
    required = {canonicalize_name(Requirement(line).name) for line in metadata.requires or [] if "extra ==" not in line}
    assert required == {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    assert set(metadata.metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert metadata.metadata["License-Expression"] == "Apache-2.0"


def test_the_environment_is_clean(python: Path, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print([name for name in {OPTIONAL!r} if u.find_spec(name)])"
    assert call(python, tmp_path / "elsewhere", "-c", code).stdout.strip() == "[]"
    code = "import neuclip_lib; print(neuclip_lib.__file__)"
    assert str(python.parent.parent) in call(python, tmp_path / "elsewhere", "-c", code).stdout


def test_ten_steps_of_training_and_an_evaluation(python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    train = ["train", "--preset", "tiny", "--data", "captions", "--steps", "10", "--out", str(folder / "run")]
    done = call(python, folder, "-m", "neuclip_lib", *train)
    assert done.returncode == 0, done.stderr
    code = (
        "from neuclip_lib.training import Run\n"
        "run = Run('run')\n"
        "weights = run.load_model().parameters()\n"
        "print(run.step, run.finished, len(run.metrics('train')), sum(w.numel() for w in weights))"
    )
    step, finished, rows, parameters = call(python, folder, "-c", code).stdout.split()
    assert (step, finished, rows) == ("10", "True", "2")
    assert int(parameters) > 10_000
    done = call(python, folder, "-m", "neuclip_lib", "evaluate", str(folder / "run"))
    assert done.returncode == 0, done.stderr
    assert (folder / "run" / "evaluation.json").exists()


def test_the_doctor_finds_all_that_is_required_and_notes_the_rest(python: Path, tmp_path: Path) -> None:
    done = call(python, tmp_path / "elsewhere", "-m", "neuclip_lib", "doctor", "--no-self-test")
    assert done.returncode == 0, done.stdout
    assert "Everything that is required works." in done.stdout
    for extra in ("data", "course", "dev"):
        assert f'pip install "neuclip-course[{extra}]"' in done.stdout


def test_a_data_set_whose_package_is_missing_says_how_to_get_it(python: Path, tmp_path: Path) -> None:
    done = call(python, tmp_path / "elsewhere", "-m", "neuclip_lib", "train", "--preset", "tiny", "--data", "digits")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "scikit-learn" in done.stderr and "pip install" in done.stderr
