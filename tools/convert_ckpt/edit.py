"""Change the tables of a checkpoint: more tokens, a word table of another size, longer texts.

    python tools/convert_ckpt/edit.py WEIGHTS OUT --add_tokens FILE --multiple 64
    python tools/convert_ckpt/edit.py WEIGHTS OUT --positions 1024 --how tile

WEIGHTS is a run, its weights/, a Hugging Face folder, or another checkpoint; a Hugging Face folder
becomes one, everything else a weights/ folder. FILE has a token a line and, after a tab, words
whose mean it begins as (by default: the pieces that it was until now).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from palm_ds.errors import exit_on_user_error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path, metavar="WEIGHTS")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--add_tokens", type=Path, metavar="FILE", help="a token a line")
    parser.add_argument(
        "--reuse_unused", action="store_true", help="new tokens take [unused1] ... first"
    )
    parser.add_argument(
        "--multiple", type=int, metavar="N", help="grow or trim the word table to a multiple of N"
    )
    parser.add_argument("--positions", type=int, metavar="N", help="tokens of the longest text")
    parser.add_argument("--how", default="tile", help="tile (default) or interpolate positions")
    parser.add_argument("--tokenizer", type=Path, help="where WEIGHTS has none with it")
    parser.add_argument("--seed", type=int, default=0, help="of rows that are drawn (0)")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        from palm_ds.edit import Edit, edit  # here: --help needs no torch

        wanted = Edit(
            tokens=args.add_tokens,
            reuse_unused=args.reuse_unused,
            multiple=args.multiple,
            positions=args.positions,
            how=args.how,
            tokenizer=args.tokenizer,
            seed=args.seed,
        )
        print("\n".join(edit(args.weights, args.out, wanted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
