"""Child processes: so many at a time, errors reported, one line of progress, stopped together."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from neuclip_lib.cli import _jobs
from neuclip_lib.cli._jobs import Job, Stage, run_jobs, seconds_left

CHILD = """
import json, os, pathlib, signal, sys, time
what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
if what == "work":
    begun = time.time()
    time.sleep(float(sys.argv[3]))
    (folder / f"{os.getpid()}.times").write_text(f"{begun} {time.time()}")
elif what == "touch":
    (folder / sys.argv[3]).write_text(str(len(list(folder.glob("stage*")))))
elif what == "fail":
    print("a line before")
    print("error: tau is 3, expected .01 to 1\\nsee the guide")
    sys.exit(3)
elif what == "mute":
    sys.exit(4)
elif what == "die":
    print("step 10: loss 3.2", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "tell":
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    print(json.dumps([*map(os.environ.get, names), sys.stdin.read(), os.getsid(0) == os.getpid()]))
elif what == "save":
    def save(*_):
        (folder / f"{sys.argv[3]}.saved").write_text("")
        sys.exit(130)
    signal.signal(signal.SIGINT, save)
    (folder / f"{sys.argv[3]}.ready").write_text(str(os.getpid()))
    time.sleep(60)
elif what == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / f"{sys.argv[3]}.ready").write_text(str(os.getpid()))
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for this library's commands."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(_jobs, "PROGRAM", [sys.executable, str(child)])
    monkeypatch.setattr(_jobs, "POLL", 0.02)
    return child


def job(tmp_path: Path, name: str, *commands: tuple[str, ...]) -> Job:
    stages = [Stage(command[0], [command[0], str(tmp_path), *command[1:]], 1.0) for command in commands]
    return Job(name, stages, tmp_path / "logs" / f"{name}.log")


def test_no_more_than_the_slots_run_at_once(tmp_path: Path) -> None:
    jobs = [job(tmp_path, f"j{k}", ("work", "0.4")) for k in range(5)]
    run_jobs(jobs, 2, io.StringIO())
    assert [one.error for one in jobs] == [None] * 5
    spans = [tuple(map(float, file.read_text().split())) for file in tmp_path.glob("*.times")]
    assert len(spans) == 5
    at_once = [sum(begun <= moment < ended for begun, ended in spans) for moment, _ in spans]
    assert max(at_once) == 2


def test_stages_follow_each_other_and_stop_at_a_failure(tmp_path: Path) -> None:
    good = job(tmp_path, "good", ("touch", "stage1"), ("touch", "stage2"))
    bad = job(tmp_path, "bad", ("fail",), ("touch", "never"))
    run_jobs([bad, good], 1, io.StringIO())
    assert good.error is None
    assert [(tmp_path / name).read_text() for name in ("stage1", "stage2")] == ["0", "1"]
    assert not (tmp_path / "never").exists()
    assert bad.error is not None
    assert bad.error.startswith("fail failed: error: tau is 3, expected .01 to 1\n    see the guide\n    (exit code 3;")
    assert str(bad.log) in bad.error and "a line before" not in bad.error


def test_the_error_is_that_of_this_time(tmp_path: Path) -> None:
    bad = job(tmp_path, "bad", ("die",))
    bad.log.parent.mkdir()
    bad.log.write_text("error: an old one\n")
    run_jobs([bad], 1, io.StringIO())
    assert bad.error is not None and "an old one" not in bad.error
    assert "often for want of memory" in bad.error and "(ended by SIGKILL;" in bad.error
    assert "loss 3.2" not in bad.error
    mute = job(tmp_path, "mute", ("mute",))
    run_jobs([mute], 1, io.StringIO())
    assert mute.error is not None and "it printed nothing\n    (exit code 4;" in mute.error
    assert bad.log.read_text().startswith("error: an old one\n"), "what was printed before is kept"


def test_children_have_one_sleeping_thread_no_input_and_a_session_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    one = job(tmp_path, "one", ("tell",))
    run_jobs([one], 1, io.StringIO())
    assert one.log.read_text().strip() == '["1", "PASSIVE", "", true]'
    assert os.environ["OMP_NUM_THREADS"] == "8"


def at_step(name: str, steps: int, done: int, since: float | None, tmp_path: Path, evaluate: float = 15.0) -> Job:
    """A job that has trained ``done`` steps in ``since`` seconds; None: it waits."""
    stages = [Stage("training", ["x"]), Stage("evaluating", ["x"], evaluate)]
    one = Job(name, stages, tmp_path / "log", steps, lambda: done)
    if since is not None:
        one.begun, one.process = 1000.0 - since, subprocess.Popen.__new__(subprocess.Popen)
        one.process.returncode, one.process._child_created = None, False  # type: ignore[attr-defined]
    return one


def test_time_left_is_that_of_the_slots(tmp_path: Path) -> None:
    # both run 10 steps a second and have 5 s to go; the third takes 10 s at their mean pace; each then 15 s to evaluate
    jobs = [
        at_step("a", 100, 50, 5.0, tmp_path),
        at_step("b", 100, 50, 5.0, tmp_path),
        at_step("c", 100, 0, None, tmp_path),
    ]
    assert seconds_left(jobs, 2, 1000.0) == pytest.approx(5 + 15 + 10 + 15)
    assert seconds_left(jobs, 3, 1000.0) == pytest.approx(25)
    assert seconds_left(jobs, 1, 1000.0) == pytest.approx(20 + 20 + 25)


def test_each_has_its_own_pace_and_a_waiting_one_the_mean(tmp_path: Path) -> None:
    jobs = [
        at_step("a", 100, 50, 5.0, tmp_path, 0),
        at_step("b", 100, 30, 1.0, tmp_path, 0),
        at_step("c", 100, 0, None, tmp_path, 0),
    ]
    # a: 50/10 = 5 s; b: 70/30; c: 100/20 = 5 s on the slot of b
    assert seconds_left(jobs, 2, 1000.0) == pytest.approx(70 / 30 + 5)


def test_a_stage_that_takes_longer_than_thought_promises_nothing(tmp_path: Path) -> None:
    one = at_step("a", 100, 100, 14.0, tmp_path)
    one.place = 1
    assert seconds_left([one], 1, 1000.0) == pytest.approx(1)
    assert seconds_left([one], 1, 1002.0) is None


def teststeps_of_an_earlier_process_are_no_sign_of_pace(tmp_path: Path) -> None:
    one = at_step("a", 100, 90, 5.0, tmp_path)
    one._from = 80
    assert one.rate(1000.0) == pytest.approx(10 / 5)
    one._from = 90
    assert one.rate(1000.0) is None
    assert seconds_left([one], 1, 1000.0) is None, "nobody knows before a step was seen"


def test_a_resumed_stage_counts_from_the_steps_it_found(tmp_path: Path) -> None:
    one = job(tmp_path, "one", ("tell",))
    one.done = lambda: 7
    run_jobs([one], 1, io.StringIO())
    assert one._from == 7


def test_the_line_says_where_each_is_and_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jobs.time, "monotonic", lambda: 1000.0)
    done, failed = at_step("d", 1, 1, None, tmp_path), at_step("f", 1, 1, None, tmp_path)
    done.place, failed.error = 2, "broken"
    jobs = [at_step("a", 100, 50, 5.0, tmp_path), at_step("c", 100, 0, None, tmp_path), done, failed]
    assert _jobs.describe(jobs, 2) == "a 50/100, c waiting, d done, f failed; about 25 s left"


def test_a_log_gets_lines_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jobs, "LINES_APART", 0.2)
    stream = io.StringIO()
    run_jobs([job(tmp_path, "one", ("work", "0.7"))], 1, stream)
    lines = stream.getvalue().splitlines()
    assert 2 <= len(lines) <= 5
    assert all(line == "one work; about 1 s left" for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (89, "89 s"), (91, "2 min"), (200, "3 min"), (2000, "33 min")]
)
def test_durations_are_short_words(seconds: float, text: str) -> None:
    assert _jobs._duration(seconds) == text


PARENT = """
import pathlib, sys
from neuclip_lib.cli import _jobs
from neuclip_lib.cli._jobs import Job, Stage, run_jobs
folder, what, grace = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
_jobs.PROGRAM, _jobs.GRACE = [sys.executable, str(folder / "child.py")], grace
run_jobs([Job(n, [Stage(what, [what, str(folder), n], 1.0)], folder / f"{n}.log") for n in "abc"], 2)
"""


def stopped(
    tmp_path: Path, number: int, what: str, grace: float, ignored: bool = False
) -> subprocess.CompletedProcess[str]:
    """Start two of three children, send the parent a signal, and wait for its end."""
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path), what, str(grace)]
    if ignored:  # as a shell starts what it runs in the background
        command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=30)
    return subprocess.CompletedProcess(command, parent.returncode, "", errors)


def until(true: object) -> None:
    deadline = time.monotonic() + 20
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def children(tmp_path: Path) -> list[int]:
    return [int(file.read_text()) for file in tmp_path.glob("*.ready")]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2] if Path("/proc").is_dir() else True


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_lets_the_children_save_and_leaves_none_behind(tmp_path: Path, number: int, code: int) -> None:
    done = stopped(tmp_path, number, "save", 30)
    assert done.returncode == code
    assert sorted(file.name for file in tmp_path.glob("*.saved")) == ["a.saved", "b.saved"]
    assert "stopping a, b: saving" in done.stderr
    assert not any(map(is_alive, children(tmp_path)))


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_background_command_can_be_interrupted_too(tmp_path: Path) -> None:
    done = stopped(tmp_path, signal.SIGINT, "save", 30, ignored=True)
    assert done.returncode != 0
    assert sorted(file.name for file in tmp_path.glob("*.saved")) == ["a.saved", "b.saved"]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_children_that_do_not_listen_are_ended(tmp_path: Path) -> None:
    done = stopped(tmp_path, signal.SIGTERM, "stubborn", 0.5)
    assert done.returncode == 143
    assert "a is ended without saving" in done.stderr
    assert not any(map(is_alive, children(tmp_path)))
