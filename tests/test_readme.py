"""What README.md tells people to type is there."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import neuclip_lib
from neuclip_lib.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


def test_every_target_that_is_named_is_in_the_makefile() -> None:
    named = set(re.findall(r"make (?:TORCH=installed )?([a-z-]+)", re.sub(r"#.*", "", PAGE)))
    assert {"run", "test", "quick", "lab", "bench", "lessons", "check"} <= named
    assert named <= TARGETS


def test_every_target_of_the_specification_is_there_and_in_the_help() -> None:
    wanted = {"run", "test", "quick", "test-full", "lab", "lessons", "bench", "check", "data"}
    assert wanted <= TARGETS
    helped = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, flags=re.MULTILINE))
    assert helped == TARGETS - {"help"}


def test_every_command_that_is_named_is_there() -> None:
    named = set(re.findall(r"python -m neuclip_lib ([a-z]+)", PAGE))
    assert {"run", "train", "evaluate", "data", "lessons", "doctor"} <= named <= set(COMMANDS)


def test_the_settings_in_the_training_example_exist() -> None:
    from neuclip_lib.cli.train import parse

    (line,) = re.findall(r"^    python -m neuclip_lib train (.*)$", PAGE, flags=re.MULTILINE)
    (more,) = re.findall(r"for instance `(--[^`]*)`", PAGE)
    chosen = parse(shlex.split(line) + shlex.split(more))
    assert (chosen.config.method, chosen.config.steps, chosen.config.prototypes.m) == ("neuclip", 1400, 1024)


def test_the_python_example_uses_public_names() -> None:
    (block,) = re.findall(r"^    import neuclip_lib as nc\n(?:(?:    .*)?\n)*", PAGE, flags=re.MULTILINE)
    tree = ast.parse(re.sub(r"^    ", "", block, flags=re.MULTILINE))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "nc"}
    assert used == {"method_names", "train", "presets", "evaluate"}
    assert used <= set(neuclip_lib.__all__)


def test_every_file_and_folder_that_is_named_is_there() -> None:
    named = set(re.findall(r"`([a-zA-Z_]+/|[A-Za-z-]+(?:\.md|\.txt)?)`", PAGE))
    files = {name for name in named if name.endswith(("/", ".md", ".txt")) or name.startswith("LICENSE")}
    made_by_commands = {"my_lessons/", "runs/"}
    assert files >= {"lessons/", "solutions/", "neuclip_lib/", "results/", "LICENSE", "LICENSE-text"}
    for name in files - made_by_commands:
        assert (ROOT / name).exists(), name


def test_the_pins_are_those_of_the_project() -> None:
    done = subprocess.run([sys.executable, str(ROOT / ".ci" / "pins.py"), "--check"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("script", ["run", "setup"])
def test_the_shell_scripts_are_well_formed(script: str) -> None:
    done = subprocess.run(["bash", "-n", str(ROOT / ".ci" / script)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
