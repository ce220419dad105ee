"""Do two checkpoints compute the same? Exit code 0: yes; 1: no; 2: they cannot be compared.

    python tools/convert_ckpt/verify.py A B
    python tools/convert_ckpt/verify.py ernie/params somebodys/hf --eps 1e-5

A and B are checkpoints of any format that convert.py reads. Heads are compared where both have one
of that name, or both have one of that kind alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from palm_ds.errors import UserError, exit_on_user_error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--eps", type=float, help="of LayerNorm, where A is wrong about it")
    parser.add_argument("--config", type=Path, help="the encoder's numbers, if not beside A")
    parser.add_argument("--tokenizer", type=Path, help="where A has none with it")
    parser.add_argument("--tolerance", type=float, help="as part of the largest number (1e-5)")
    parser.add_argument("--json", action="store_true", help="say it in JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        from palm_ds.convert import verify_only  # here: --help needs no torch

        if args.tolerance is not None and not args.tolerance >= 0:
            raise UserError(f"--tolerance {args.tolerance}: at least 0")
        opening = {name: getattr(args, name) for name in ("eps", "config", "tokenizer")}
        proof = verify_only(args.a, args.b, tolerance=args.tolerance, **opening)
        if args.json:
            print(json.dumps(proof.record(), ensure_ascii=False))
        else:
            for each in proof.differences:
                print(f"{each.kind}\t{each.name}\t{each.largest:.1e}\tof {each.scale:.3g}")
            print(f"{'the same' if proof.holds else 'NOT the same'}: {proof}")
        return 0 if proof.holds else 1
    return 2


if __name__ == "__main__":
    sys.exit(main())
