"""Predict masked words with a run, a folder of weights, or a Hugging Face folder.

    python launch/fill_mask.py runs/mine "The capital of [MASK] is Paris."
    python launch/fill_mask.py runs/mine/hf --hide Paris "The capital of France is Paris."
    python launch/fill_mask.py runs/mine --json < texts.txt

Without texts, every line of the input is one. Each [MASK] is guessed by itself.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator

from palm_ds.errors import UserError, exit_on_user_error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a --run_dir, its weights/, or a Hugging Face folder")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="with one [MASK] or more")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="guesses to show (5)")
    parser.add_argument("--task", default="", help="read texts as this task does (its embedding)")
    parser.add_argument("--hide", default="", metavar="WORD", help="mask this word of the texts")
    parser.add_argument("--json", action="store_true", help="one JSON object a text")
    return parser.parse_intermixed_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        if args.top < 1:
            raise UserError(f"--top {args.top}: at least 1 guess")
        from rich.console import Console

        from palm_ds.fill_mask import as_record, as_text, open_filler

        filler = open_filler(args.model, task=args.task)
        console = Console(soft_wrap=True, highlight=False)
        for text in args.texts or lines():
            filled = filler.fill(text, top=args.top, hide=args.hide)
            if args.json:
                print(json.dumps(as_record(filler, text, filled), ensure_ascii=False), flush=True)
            else:
                console.print(as_text(filler, filled))
    return 0


def lines() -> Iterator[str]:
    """The lines of the input that are not empty."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError:
            raise UserError(f"line {number} of the input is not UTF-8 text") from None
        if text:
            yield text


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    sys.exit(main())
