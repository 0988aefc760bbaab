"""Commands of this program as child processes: a few at a time, one line of progress for all, stopped together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

PROGRAM = [sys.executable, "-m", "neuclip_lib"]
POLL = 0.2
"""Seconds between two looks at the children."""
LINES_APART = 10.0
"""Seconds between two lines of progress where nobody watches a terminal."""
SHOWN = 6
"""More jobs than that are counted and not listed."""
GRACE = 60.0
"""Seconds that children get to save their state."""


@dataclass(frozen=True)
class Stage:
    """One command.

    Args:
        name: what is being done, for the progress line.
        arguments: of ``python -m neuclip_lib``.
        seconds: how long it takes, roughly; None for a stage that counts steps.
    """

    name: str
    arguments: list[str]
    seconds: float | None = None


@dataclass
class Job:
    """Commands to run one after the other.

    Args:
        name: for the progress line and messages.
        stages: the commands.
        log: what they print goes there.
        steps: of the stage that counts them.
        done: says how many are done.
    """

    name: str
    stages: Sequence[Stage]
    log: Path
    steps: int = 0
    done: Callable[[], int] = lambda: 0
    error: str | None = None
    place: int = 0
    process: subprocess.Popen[bytes] | None = None
    begun: float = 0.0
    _from: int = 0
    _offset: int = 0
    _file: IO[bytes] | None = field(default=None, repr=False)

    @property
    def stage(self) -> Stage | None:
        """The stage that runs or comes next; None at the end."""
        return self.stages[self.place] if self.place < len(self.stages) and self.error is None else None

    def start(self) -> None:
        """Start the next stage."""
        stage = self.stages[self.place]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.log.open("ab")
        self._offset = self._file.tell()
        self.begun, self._from = time.monotonic(), self.done()
        self.process = subprocess.Popen(
            [*PROGRAM, *stage.arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=one_thread(os.environ.copy()),
            # Control-C reaches this process alone, which tells its children once.
            start_new_session=os.name == "posix",
        )

    def look(self) -> bool:
        """Whether the job has ended, well or not; starts its next stage when one has ended well."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            return False
        self.close()
        if code != 0:
            self.error = f"{self.stages[self.place].name} failed: {self._reason(code)}"
            return True
        self.place += 1
        if self.place == len(self.stages):
            return True
        self.start()
        return False

    def close(self) -> None:
        """Forget the process that has ended."""
        if self._file is not None:
            self._file.close()
        self._file = self.process = None

    def seconds_left(self, now: float, rate: float | None) -> float | None:
        """Rough seconds that the job still takes, None when unknown.

        Args:
            rate: steps a second, for a job that cannot tell its own yet.
        """
        if self.stage is None:
            return 0.0
        left = 0.0
        for place in range(self.place, len(self.stages)):
            stage, runs = self.stages[place], place == self.place and self.process is not None
            if stage.seconds is not None:
                spent = now - self.begun if runs else 0.0
                if spent > stage.seconds:
                    return None  # it takes longer than thought, and nobody knows how long
                left += stage.seconds - spent
                continue
            own = self.rate(now) or rate
            if own is None:
                return None
            left += (self.steps - self.done()) / own
        return left

    def rate(self, now: float) -> float | None:
        """Steps a second since this process started them; None before the first is seen."""
        stage = self.stage
        if stage is None or stage.seconds is not None or self.process is None:
            return None
        done = self.done() - self._from
        return done / (now - self.begun) if done > 0 else None

    def status(self) -> str:
        """A few words for the progress line."""
        if self.error is not None:
            return f"{self.name} failed"
        stage = self.stage
        if stage is None:
            return f"{self.name} done"
        if self.process is None:
            return f"{self.name} waiting"
        return f"{self.name} {stage.name}" if stage.seconds is not None else f"{self.name} {self.done()}/{self.steps}"

    def _reason(self, code: int) -> str:
        """The last error line that the command printed, else its last line, else how it ended."""
        with self.log.open("rb") as file:
            file.seek(self._offset)
            lines = [line.rstrip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        ended = f"exit code {code}" if code > 0 else f"ended by {_signal_name(-code)}"
        if ended == "ended by SIGKILL":  # its last line says nothing about why
            lines = ["the system ended it, often for want of memory; try fewer at a time"]
        begins = max((i for i, line in enumerate(lines) if line.startswith("error:")), default=len(lines) - 1)
        said = "\n    ".join(lines[begins:][:12]) if lines else "it printed nothing"
        return f"{said}\n    ({ended}; all that it printed: {self.log})"


def one_thread(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a child that shares the machine with others: one thread, which sleeps when idle."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return environment | threads | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}


def run_jobs(jobs: Sequence[Job], slots: int, stream: TextIO | None = None) -> None:
    """Run all jobs, ``slots`` at a time; one that fails is marked with its ``error`` and the others go on.

    Raises:
        KeyboardInterrupt, SystemExit: after SIGINT, SIGTERM or SIGHUP, once the children have saved and ended.
    """
    waiting, running = deque(jobs), list[Job]()
    line = _Line(stream or sys.stderr)
    with _signals_raise():
        try:
            while waiting or running:
                while waiting and len(running) < slots:
                    running.append(waiting.popleft())
                    running[-1].start()
                time.sleep(POLL)
                running = [job for job in running if not job.look()]
                line.show(lambda: describe(jobs, slots))
        except BaseException:
            line.end()
            stop(running, line.stream)
            raise
    line.end()


def describe(jobs: Sequence[Job], slots: int) -> str:
    """The progress of all jobs and the time left, in one line."""
    left = seconds_left(jobs, slots, time.monotonic())
    time_left = "" if left is None else f"; about {_duration(left)} left"
    if len(jobs) <= SHOWN:
        return ", ".join(job.status() for job in jobs) + time_left
    # Of many, only those that run are named.
    ended = [job for job in jobs if job.error is not None or job.stage is None]
    running = [job for job in jobs if job.process is not None]
    failed = sum(job.error is not None for job in jobs)
    counts = f"{len(ended)} of {len(jobs)} done" + (f" ({failed} failed)" if failed else "")
    return ", ".join([counts, *(job.status() for job in running)]) + time_left


def seconds_left(jobs: Sequence[Job], slots: int, now: float) -> float | None:
    """Rough seconds until all jobs have ended, ``slots`` at a time and each at its own pace; None when unknown."""
    rates = [rate for job in jobs if (rate := job.rate(now)) is not None]
    mean = sum(rates) / len(rates) if rates else None
    free_at = [0.0] * slots
    for job in sorted(jobs, key=lambda job: job.process is None):  # those that run are first
        left = job.seconds_left(now, mean)
        if left is None:
            return None
        free_at[free_at.index(min(free_at))] += left
    return max(free_at)


def stop(running: Sequence[Job], stream: TextIO) -> None:
    """Ask the children to save and end; end those that do not, also when asked a second time."""
    processes = [(job, job.process) for job in running if job.process is not None and job.process.poll() is None]
    if processes:
        print(f"stopping {', '.join(job.name for job, _ in processes)}: saving", file=stream, flush=True)
    for _, process in processes:
        if os.name == "posix":
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE
    try:
        for _, process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
        for job, process in processes:
            if process.poll() is None:
                print(f"{job.name} is ended without saving", file=stream, flush=True)
                process.kill()
                process.wait()
    for job in running:
        job.close()


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, unwind this process as Control-C does.

    A shell starts background commands with SIGINT ignored; our own handler makes it count for us and the children.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Line:
    """One line that is rewritten on a terminal; a new one now and then elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self._shown, self._last = stream, time.monotonic(), ""

    def show(self, text: Callable[[], str]) -> None:
        now = time.monotonic()
        if self.stream.isatty():
            if now - self._shown >= 1:
                self._shown = now
                self._write("\r" + text())
        elif now - self._shown >= LINES_APART:
            self._shown = now
            print(text(), file=self.stream, flush=True)

    def end(self) -> None:
        """Leave the terminal's line."""
        if self._last:
            self._last = ""
            print(file=self.stream, flush=True)

    def _write(self, text: str) -> None:
        padding = " " * max(0, len(self._last) - len(text))
        self._last = text
        self.stream.write(text + padding)
        self.stream.flush()


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
