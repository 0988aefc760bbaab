"""Several processes at one set, and processes that are killed: what is on disk is whole or absent."""

import subprocess
import sys
import time

import numpy as np
import pytest

from neuclip_lib.data import cache
from neuclip_lib.data.building import build_set, ready
from neuclip_lib.data.cache import inspect_cache
from neuclip_lib.data.spec import RawSet, SetSpec

TOY = """
import pathlib, sys, time
import numpy as np
from neuclip_lib.data import building, cache
from neuclip_lib.data.spec import RawSet, SetSpec

def produce():
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    print("building", flush=True)
    wait()
    names, value = [f"name {i}" for i in range(8)], int(sys.argv[2])
    captions = [f"{value} {name}" for name in names]
    return RawSet(np.full((8, 3, 4, 4), value, np.uint8), captions, names, names, names)

def wait():
    deadline = time.monotonic() + 60
    while not pathlib.Path(sys.argv[1] + ".go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)

texts = dict.fromkeys(("title", "origin", "licence", "attribution", "task"), "")
SPEC = SetSpec(name="toy", image_size=4, produce=produce, **texts)
cache.builder_hash = lambda spec: "one builder for all"
"""
BUILD = f"""{TOY}
print("asking", flush=True)
assert (building.ready(SPEC).images == int(sys.argv[2])).all()
"""
# Stops after the pictures are written and before the manifest is.
HANG = f"""{TOY}
wait = lambda: None
cache.write_json = lambda *_: (print("writing", flush=True), time.sleep(60))
building.ready(SPEC, force=True)
"""
AGAIN = f"""{TOY}
wait = lambda: None
turn, deadline = 0, time.monotonic() + 40
while not pathlib.Path(sys.argv[1] + ".stop").exists() and time.monotonic() < deadline:
    sys.argv[2] = str(1 + turn % 2)
    building.ready(SPEC, force=True, quiet=True)
    turn += 1
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_HOME", str(tmp_path))
    script, started = tmp_path / "toy.py", []

    def start(source, value):
        script.write_text(source)
        command = [sys.executable, str(script), str(tmp_path / "log"), str(value)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def constant(value):
    """A set of one grey, whose captions say it."""
    names = [f"name {i}" for i in range(8)]
    captions = [f"{value} {name}" for name in names]
    return RawSet(np.full((8, 3, 4, 4), value, np.uint8), captions, names, names, names)


def specification(produce):
    return SetSpec(
        name="toy",
        image_size=4,
        produce=produce,
        **dict.fromkeys(("title", "origin", "licence", "attribution", "task"), ""),
    )


def test_two_processes_build_a_set_once(launch, tmp_path):
    first, second = launch(BUILD, 7), launch(BUILD, 7)
    assert [process.stdout.readline() for process in (first, second)] == ["asking\n", "asking\n"]
    time.sleep(0.5)  # time enough for both to start building, if nothing held one back
    (tmp_path / "log.go").touch()
    errors = [process.communicate(timeout=60)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], errors
    assert (tmp_path / "log").read_text() == "built\n"
    assert sum("building once" in text for text in errors) == 1
    assert [path.name for path in (tmp_path / "datasets" / "built").iterdir() if path.is_dir()] == ["toy"]


def test_a_build_killed_while_writing_leaves_the_old_set(launch, tmp_path):
    spec = specification(lambda: constant(3))
    folder = build_set(spec, quiet=True)
    process = launch(HANG, 9)
    assert [process.stdout.readline() for _ in range(2)] == ["building\n", "writing\n"]
    process.kill()
    process.wait(timeout=20)
    leftovers = [path for path in folder.parent.iterdir() if path.name.endswith(".tmp")]
    assert len(leftovers) == 1
    assert (leftovers[0] / "images.npy").is_file()
    status = inspect_cache(spec)
    assert status.state == "ready"
    assert (status.cached.images == 3).all()
    build_set(spec, force=True, quiet=True)  # the lock went with the process; what it left is removed
    assert not leftovers[0].exists()


def test_readers_beside_a_builder_never_see_parts_of_two_sets(launch, tmp_path, monkeypatch):
    """One process replaces the set again and again, with 1 and 2 in turn; this one reads and never builds."""
    monkeypatch.setattr(cache, "builder_hash", lambda spec: "one builder for all")
    spec = specification(lambda: pytest.fail("a reader built the set"))
    process = launch(AGAIN, 1)
    while not (tmp_path / "datasets" / "built" / "toy").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    seen = []
    # As long as it takes on a busy machine; the builder gives up by itself after 40 s.
    while process.poll() is None:
        if len(seen) >= 60 and set(seen) == {1, 2}:
            (tmp_path / "log.stop").touch()
        cached = ready(spec, quiet=True)
        value = int(cached.images[0, 0, 0, 0])
        assert (cached.images == value).all()
        assert all(caption.startswith(f"{value} ") for caption in cached.columns["captions"])
        seen.append(value)
    assert process.returncode == 0, process.communicate()[1]
    assert set(seen) == {1, 2}
