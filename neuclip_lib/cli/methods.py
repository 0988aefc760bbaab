"""``python -m neuclip_lib methods``: the table of methods, as the code has it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from neuclip_lib.methods import METHODS, bytes_per_sample

TEMPERATURES = {
    "free": "fixed, annealed or learned",
    "fixed": "fixed or annealed",
    "per sample": "one a sample and side",
    "unused": "not used",
}
HEADS = ("method", "normalizer", "temperature", "index", "bytes/sample", "source")


def main(arguments: list[str]) -> int:
    """Print the table, or with ``--json`` the same as a list."""
    parser = argparse.ArgumentParser(prog="python -m neuclip_lib methods", description="List the methods.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    found = rows()
    if parser.parse_args(arguments).json:
        print(json.dumps([dict(zip(HEADS, row, strict=True)) for row in found], indent=2))
        return 0
    table = [HEADS, *[tuple(map(str, row)) for row in found]]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADS))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(
        "\nindex: every sample needs a stable number. bytes/sample: state that grows with the data, over all processes."
    )
    return 0


def rows() -> list[tuple[Any, ...]]:
    """One row a method, in the order of the table."""
    return [
        (
            method.name,
            method.normalizer,
            TEMPERATURES[method.tau],
            "yes" if method.needs_index else "no",
            bytes_per_sample(method),
            method.source,
        )
        for method in METHODS.values()
    ]
