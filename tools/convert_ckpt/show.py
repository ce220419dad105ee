"""What is in a checkpoint of any format, without converting it.

python tools/convert_ckpt/show.py somebodys/weights
python tools/convert_ckpt/show.py runs/mine/checkpoints/step_00001000 --json
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from palm_ds.errors import exit_on_user_error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--eps", type=float, help="of LayerNorm, where it is wrong about it")
    parser.add_argument("--config", type=Path, help="the encoder's numbers, if not beside it")
    parser.add_argument("--json", action="store_true", help="say it in JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        from palm_ds.formats.open import open_checkpoint  # here: --help needs no torch

        contents = open_checkpoint(args.path, eps=args.eps, config=args.config)
        if args.json:
            print(json.dumps(record(contents), ensure_ascii=False, default=str))
        else:
            say(contents)
    return 0


def record(contents: Any) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "path": str(contents.path),
        "format": contents.format,
        "config": asdict(contents.config),
        "heads": {name: asdict(head) for name, head in contents.heads.items()},
        "task_ids": dict(contents.task_ids),
        "tensors": {
            name: {"shape": list(entry.shape), "theirs": list(entry.theirs), "how": entry.how}
            for name, entry in contents.entries.items()
        },
        "left": dict(contents.left),
        "tokenizer": str(contents.tokenizer) if contents.tokenizer else None,
        "notes": list(contents.notes),
    }


def say(contents: Any) -> None:
    """For a person."""
    from rich.console import Console

    from palm_ds.account import of_contents, show

    console = Console(soft_wrap=True, highlight=False)
    show(of_contents(contents).rows(), console)
    count = sum(math.prod(entry.shape) for entry in contents.entries.values())
    heads = [f"{name} ({about(head)})" for name, head in contents.heads.items()]
    numbers = {k: v for k, v in asdict(contents.config).items() if v not in ("", {})}
    lines = [
        f"{contents.format}: {len(contents.entries)} parameters, {count / 1e6:,.1f} M numbers",
        f"encoder: {', '.join(f'{k} {v}' for k, v in numbers.items())}",
        f"heads: {', '.join(heads) or 'none'}",
        f"tasks: {dict(contents.task_ids) or 'none named'}",
        f"tokenizer: {contents.tokenizer or 'none'}",
        *(f"note: {note}" for note in contents.notes),
    ]
    for line in lines:
        console.print(line, markup=False)


def about(head: Any) -> str:
    """What a head does, in a few words."""
    if head.kind == "masked_words":
        return "masked words"
    return f"{head.classes} classes of {'whole texts' if head.pooled else 'tokens'}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    sys.exit(main())
