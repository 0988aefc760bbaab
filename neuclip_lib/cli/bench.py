"""``python -m neuclip_lib bench``: print the performance ratios, and write them as JSON."""

from __future__ import annotations

import argparse
import sys

import torch

from neuclip_lib.bench import TABLES, run_tables
from neuclip_lib.files import write_json
from neuclip_lib.progress import track


def main(arguments: list[str]) -> int:
    """Run the chosen tables; ratios below 1 mean that ours is faster than the reference."""
    parser = argparse.ArgumentParser(prog="python -m neuclip_lib bench", description=main.__doc__)
    parser.add_argument("tables", nargs="*", help=f"which of {', '.join(TABLES)}; all by default")
    parser.add_argument("--rounds", type=int, default=9, help="paired rounds a table (9 or more for quoted figures)")
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.tables if name not in TABLES]
    if unknown:
        raise ValueError(f"there is no table {unknown[0]!r}; the tables are {', '.join(TABLES)}")
    if options.rounds < 4:
        raise ValueError(f"--rounds must be at least 4, got {options.rounds}: quartiles need them")
    result = {}
    for name in track(options.tables or list(TABLES), "bench"):
        result.update(run_tables([name], options.rounds))
    print(f"one thread, CPU {torch.backends.cpu.get_cpu_capability()}, {options.rounds} rounds: median (quartiles)")
    if "R1" in result and not torch.cuda.is_available():
        print("R1g, the step on a GPU, needs CUDA and is left out")
    for name, rows in result.items():
        print(f"{name}  {TABLES[name].__doc__}")
        for row in rows:
            target = "" if row["target"] is None else f"   target {row['target']}"
            # What is counted has no spread.
            spread = "" if row["iqr"] is None else "  ({:.2f} to {:.2f})".format(*row["iqr"])
            print(f"  {row['case']:34} {row['variant']:42} {row['ratio']:.2f}{spread}{target}")
    if options.json:
        write_json(options.json, result)
        print(f"written to {options.json}", file=sys.stderr)
    return 0
