"""``python -m neuclip_lib COMMAND ...``: find the command's module and run it."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

COMMANDS = {
    "run": "build icons, train openclip, gcl-batch and neuclip, evaluate, execute lesson 0, print the table",
    "train": "train one method on one data set",
    "evaluate": "measure a finished run: retrieval, zero-shot, normalizer error, geometry",
    "compare": "train methods in the same settings on the same budget; means, spreads, paired differences",
    "methods": "list the methods: normalizer, temperature, index, bytes per sample, source",
    "data": "list, build or show the data sets",
    "lessons": "build or check the notebooks",
    "readme": "make README.md's tables from results/ anew, or check them",
    "bench": "print the performance ratios",
    "doctor": "check this machine: versions, memory, optional packages, a five-second self-test",
}


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: python -m neuclip_lib COMMAND [options]   (COMMAND --help for its options)", "", *rows])


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code (2: wrong use, 1: it failed with a message)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        print(f"error: there is no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(f"neuclip_lib.cli.{name}")
        return int(command.main(rest) or 0)
    except (ValueError, RuntimeError, OSError, OverflowError, MemoryError) as error:
        # An OSError (no space left, no permission) names its file; a traceback would only hide it.
        if os.environ.get("NEUCLIP_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("neuclip_lib") or os.environ.get("NEUCLIP_TRACEBACK"):
            raise
        print(
            f"error: {sys.executable} has no package {error.name!r}; if `make` has set up .venv, activate it first "
            "(source .venv/bin/activate), else see README.md",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("stopped by you; the same command goes on where it was", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
