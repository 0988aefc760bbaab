"""``python -m neuclip_lib data``: list, build and show the data sets, and write their cards."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from neuclip_lib import data, home
from neuclip_lib.data.cards import readme, total
from neuclip_lib.data.montage import draw_montage
from neuclip_lib.data.registry import spec_of
from neuclip_lib.data.spec import Card
from neuclip_lib.data.splits import SPLITS
from neuclip_lib.files import write_text

README = Path("datasets") / "README.md"


def main(arguments: list[str]) -> int:
    """Run one of list, build, show and card; return the exit code."""
    chosen = _parser().parse_args(arguments)
    return int(chosen.run(chosen))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m neuclip_lib data", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("list", help="all sets: pairs, splits, licence, built or not, missing packages")
    command.set_defaults(run=_list)

    command = commands.add_parser("build", help="build one set, or all")
    command.add_argument("name", metavar="NAME", help="a set's name, or all")
    command.add_argument("--force", action="store_true", help="build again even if the built set is good")
    command.set_defaults(run=_build)

    command = commands.add_parser("show", help="draw pictures with their captions")
    command.add_argument("name", metavar="NAME")
    command.add_argument("--out", type=Path, required=True, metavar="PICTURE.png")
    command.add_argument("--split", default="test", help=f"one of {', '.join(SPLITS)} (default: test)")
    command.add_argument("--n", type=int, default=24, help="how many pairs (default: 24)")
    command.add_argument("--seed", type=int, default=0, help="chooses the pairs (default: 0)")
    command.set_defaults(run=_show)

    command = commands.add_parser("card", help=f"write {README}")
    command.add_argument("--out", type=Path, default=README)
    command.add_argument("--check", action="store_true", help="write nothing; fail when the file is out of date")
    command.set_defaults(run=_card)
    return parser


def _list(_: argparse.Namespace) -> int:
    cards = [data.card(name) for name in data.names()]
    width = max(len(card.name) for card in cards)
    print(f"built sets: {home.data_dir()}\n")
    for card in cards:
        print(f"{card.name:<{width}}  {total(card.counts):>5} pairs  {card.state:<15}  {card.title}")
        for line in _details(card):
            print(f"{'':<{width}}  {line}")
    return 0


def _details(card: Card) -> list[str]:
    splits = ", ".join(f"{part} {n}" for part, n in card.counts.items()) or "any number in every split"
    lines = [splits, f"licence: {card.licence}", f"used for: {card.task}"]
    return lines + ([f"missing: {card.lacking}"] if card.lacking else []) + [""]


def _build(chosen: argparse.Namespace) -> int:
    if chosen.name == "all":
        return _build_all(chosen.force)
    print(f"{chosen.name}: {data.build(chosen.name, force=chosen.force)}")
    return 0


def _build_all(force: bool) -> int:
    """Build what can be built; an optional set whose source is missing is no failure."""
    failed = []
    for name in data.names():
        card = data.card(name)
        if card.state == "made on the fly":
            print(f"{name}: made on the fly, nothing to build")
        elif card.optional and card.lacking and card.state != "ready":
            print(f"{name}: left out (optional). {card.lacking}")
        else:
            try:
                print(f"{name}: {data.build(name, force=force)}")
            except RuntimeError as error:
                failed.append(name)
                print(f"error: {error}", file=sys.stderr)
    if failed:
        raise RuntimeError(f"not built: {', '.join(failed)} (see above)")
    return 0


def _show(chosen: argparse.Namespace) -> int:
    attribution = data.card(chosen.name).attribution
    pairs = data.load(chosen.name, chosen.split)
    draw_montage(pairs, chosen.n, chosen.seed, chosen.out, attribution)
    print(f"{chosen.out}: {chosen.n} of {len(pairs)} pairs of {chosen.name}, split {chosen.split}")
    if attribution:
        print(attribution)
    return 0


def _card(chosen: argparse.Namespace) -> int:
    text = readme(spec_of(name) for name in data.names())
    if not chosen.check:
        write_text(chosen.out, text)
        print(chosen.out)
        return 0
    if not chosen.out.is_file() or chosen.out.read_text(encoding="utf-8") != text:
        raise RuntimeError(f"{chosen.out} is out of date; run: python -m neuclip_lib data card")
    return 0
