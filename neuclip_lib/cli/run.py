"""``python -m neuclip_lib run``: the main job, from nothing to a table and an executed lesson."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuclip_lib import home
from neuclip_lib.cli import _study, readme
from neuclip_lib.cli._jobs import Job, Stage, run_jobs
from neuclip_lib.cli._machine import usable_cores
from neuclip_lib.cli._table import Result, as_text, notes_of, read_result
from neuclip_lib.files import ensure_writable, read_json
from neuclip_lib.presets import PRESETS, get_preset
from neuclip_lib.training import Run, TrainConfig
from neuclip_lib.training.config import differences
from neuclip_lib.training.evaluate import evaluation_file, pictures_folder

METHODS = ("openclip", "gcl-batch", "neuclip")
# So that one run's embeddings show which estimator is better, not which run.
SHADOWS = {"openclip": ("neuclip",)}
LESSON = "0"
EVALUATE_SECONDS, LESSON_SECONDS = 15.0, 45.0
"""Rough, for the time left only."""


@dataclass(frozen=True)
class Plan:
    """One method's run: where it goes and what it must be."""

    method: str
    folder: Path
    config: TrainConfig

    @property
    def trained(self) -> bool:
        """Whether this very run is finished."""
        return (self.folder / "config.json").exists() and Run(self.folder).finished

    @property
    def evaluated(self) -> bool:
        """Whether its evaluation is there, with the pictures, and newer than the encoders."""
        if not self.trained:
            return False
        run = Run(self.folder)
        written = evaluation_file(run)
        saved = run.checkpoint(run.config.steps).stat().st_mtime
        return written.exists() and written.stat().st_mtime >= saved and pictures_folder(run).is_dir()


def main(arguments: list[str]) -> int:
    """Run the command; 1 when something failed, after all else was done.

    Raises:
        ValueError, RuntimeError: for unknown names or folders that hold other runs, before any work.
    """
    chosen = _parser().parse_args(arguments)
    if chosen.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {chosen.jobs}")
    begun = time.monotonic()
    out = (chosen.out or home.runs_dir() / chosen.preset).resolve()
    plans = make_plans(chosen.methods, chosen.preset, chosen.data, chosen.seed, out)
    ensure_writable(out)
    failed = _train_and_evaluate(plans, out, chosen.jobs)
    good = [plan for plan in plans if plan.method not in failed]
    results = [read_result(plan.folder) for plan in good]
    if chosen.record and not failed:
        _record(chosen.preset, results)  # first: the lesson reads the figures that are kept
    notebook, problem = _lesson(good, out) if chosen.lesson and good else (None, None)
    _print_results(results, good, notebook, out)
    for text in [*failed.values(), *([problem] if problem else [])]:
        print(f"error: {text}", file=sys.stderr)
    print(f"\n{time.monotonic() - begun:.0f} s in all", file=sys.stderr)
    return 1 if failed or problem else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m neuclip_lib run",
        description="Train several methods with one preset, evaluate them, execute lesson 0 on the runs, print one "
        "table. Started again, it goes on where it stopped and does nothing twice.",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", default="laptop", help=f"one of {', '.join(PRESETS)} (default: laptop)")
    parser.add_argument("--data", help="data set (default: the preset's)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help=f"default: {' '.join(METHODS)}")
    parser.add_argument("--seed", type=int, default=0, help="of every run (default: 0)")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: RUNS/PRESET)")
    parser.add_argument("--jobs", type=int, default=min(2, usable_cores()), help="runs at a time, one thread each")
    parser.add_argument("--no-lesson", dest="lesson", action="store_false", help="leave lesson 0 out")
    parser.add_argument("--record", action="store_true", help="keep the figures in results/ and in README.md")
    return parser


def make_plans(methods: Sequence[str], preset: str, data: str | None, seed: int, out: Path) -> list[Plan]:
    """What each method's run must be.

    Raises:
        ValueError: for an unknown preset, method or data set, or a method given twice.
        RuntimeError: when a folder holds a run of another config.
    """
    if len(set(methods)) < len(methods):
        raise ValueError(f"--methods must differ, got {' '.join(methods)}")
    named = {"data": data} if data else {}
    plans = []
    for method in methods:
        config = get_preset(preset)(method=method, seed=seed, shadows=SHADOWS.get(method, ()), **named)
        plan = Plan(method, out / method, config)
        if (plan.folder / "config.json").exists() and (changed := differences(Run(plan.folder).config, config)):
            rows = "".join(f"\n  {name}: {old!r} there, {new!r} asked for" for name, (old, new) in changed.items())
            raise RuntimeError(f"{plan.folder} holds a run of another config:{rows}\nchoose another folder with --out")
        plans.append(plan)
    return plans


def _train_and_evaluate(plans: Sequence[Plan], out: Path, slots: int) -> dict[str, str]:
    """Do what is not done yet; the error of each method that failed."""
    jobs = [job for plan in plans if (job := job_of(plan, out)) is not None]
    if jobs:
        config = plans[0].config
        print(
            f"{', '.join(job.name for job in jobs)} on {config.data}: {config.steps} steps each, "
            f"{min(slots, len(jobs))} at a time, one thread each; what they print: {out}/*.log",
            file=sys.stderr,
            flush=True,
        )
        _build_data(config.data, out)
        run_jobs(jobs, slots)
    return {job.name: f"{job.name}: {job.error}" for job in jobs if job.error is not None}


def _build_data(name: str, out: Path) -> None:
    """Build the set once before several processes want it; one that is never stored needs nothing."""
    from neuclip_lib import data

    if data.card(name).state != "made on the fly":
        data.build(name)


def job_of(plan: Plan, out: Path) -> Job | None:
    """The commands that this run still needs; None when it is trained and evaluated."""
    if plan.evaluated:
        return None
    config = plan.config
    train = ["train", "--preset", config.preset, "--method", plan.method, "--data", config.data]
    train += ["--seed", str(config.seed), "--out", str(plan.folder)]
    train += ["--shadows", *config.shadows] if config.shadows else []
    stages = [] if plan.trained else [Stage("training", train)]
    stages.append(Stage("evaluating", ["evaluate", str(plan.folder)], EVALUATE_SECONDS))
    return Job(plan.method, stages, out / f"{plan.method}.log", config.steps, steps_of(plan.folder))


def steps_of(folder: Path) -> Callable[[], int]:
    """Reads how many steps a run has recorded."""
    from neuclip_lib.training.log import METRICS, read_rows

    def done() -> int:
        try:
            return max((row["step"] for row in read_rows(folder / METRICS)), default=0)
        except (RuntimeError, OSError):
            return 0  # being rewritten just now; the run itself refuses a damaged record

    return done


def _lesson(plans: Sequence[Plan], out: Path) -> tuple[Path | None, str | None]:
    """Execute lesson 0 on the runs unless that is done; its notebook, and what went wrong."""
    from neuclip_lib.course.source import course_root, find_source, read_lesson

    if not _fits_lesson(plans):
        print("lesson 0 is left out: it looks at all three methods of the laptop preset on icons", file=sys.stderr)
        return None, None
    try:
        lesson = read_lesson(find_source(course_root(), LESSON))
    except RuntimeError as error:
        print(f"lesson 0 is left out: {error}", file=sys.stderr)
        return None, None
    notebook = out / f"{lesson.name}.ipynb"
    newest = max(evaluation_file(Run(plan.folder)).stat().st_mtime for plan in plans)
    if not _lesson_is_current(out / f"{lesson.name}.report.json", notebook, lesson.sha256, newest):
        arguments = ["lessons", "run", LESSON, "--out", str(out), "-p", "runs", str(out)]
        job = Job("lesson 0", [Stage("executing", arguments, LESSON_SECONDS)], out / "lesson.log")
        run_jobs([job], 1)
        if job.error is not None:
            return None, f"lesson 0: {job.error}"
    return notebook, None


def _fits_lesson(plans: Sequence[Plan]) -> bool:
    """Whether these are the runs that lesson 0 speaks of."""
    config = plans[0].config
    return config.preset == "laptop" and config.data == "icons" and {plan.method for plan in plans} == set(METHODS)


def _lesson_is_current(report: Path, notebook: Path, sha256: str, newest: float) -> bool:
    if not (report.exists() and notebook.exists() and report.stat().st_mtime >= newest):
        return False
    facts = read_json(report)
    return facts["source_sha256"] == sha256 and facts["error"] is None


def _print_results(results: Sequence[Result], plans: Sequence[Plan], notebook: Path | None, out: Path) -> None:
    if results:
        print("\n" + as_text(results) + "\n")
        print("\n".join(notes_of(results)))
    print(f"\nruns:     {out}")
    for plan in plans:
        print(f"pictures: {pictures_folder(Run(plan.folder))}")
    if notebook is not None:
        print(f"lesson 0: {notebook}  (look at it: {Path(sys.executable).parent / 'jupyter'} lab {notebook})")
    sys.stdout.flush()


def _record(study: str, results: Sequence[Result]) -> None:
    from neuclip_lib.course.source import course_root

    root = course_root()
    command = f"python -m neuclip_lib run --record --preset {study} --seed {results[0]['seed']}"
    folder = _study.record(root, study, command, results)
    print(f"\nkept in {folder}")
    if study == _study.STUDY:
        readme.write(root)
        print(f"and in {root / 'README.md'}")
