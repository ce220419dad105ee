"""Convert a checkpoint, and show that the result computes the same.

    python tools/convert_ckpt/convert.py SOURCE TARGET --to huggingface
    python tools/convert_ckpt/convert.py runs/mine out --to huggingface --family bert --task NAME
    python tools/convert_ckpt/convert.py ernie/params out --to palm_ds --eps 1e-5 --dtype bf16

SOURCE is a run, one of its checkpoints, its weights/; a folder of Hugging Face, Paddle (ERNIE,
PALM, PaddleNLP), or DeepSpeed; a TensorFlow BERT checkpoint. TARGET is a new folder: it is there
complete and checked, or not at all.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from palm_ds.errors import UserError, exit_on_user_error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("target", type=Path, metavar="TARGET", help="a new folder")
    parser.add_argument("--to", default="palm_ds", help="palm_ds (default), huggingface or paddle")
    parser.add_argument("--family", default="", help="ernie, bert or roberta")
    parser.add_argument("--task", default="", help="the task, or its row, that texts are read as")
    parser.add_argument("--head", default="", metavar="NAME", help="write this head over classes")
    parser.add_argument(
        "--head_class", default="", metavar="ForTokenClassification", help="as what"
    )
    parser.add_argument("--words", default="", metavar="NAME", help="which masked-word head")
    parser.add_argument("--dtype", default="float32", help="float32 (default), float16, bfloat16")
    parser.add_argument("--shard_size", default="5GB", help="of a file of weights (5GB)")
    parser.add_argument(
        "--eps",
        type=float,
        help="of LayerNorm, where the source's is wrong, or the target can have no other",
    )
    parser.add_argument("--config", type=Path, help="the encoder's numbers, if not beside SOURCE")
    parser.add_argument("--tokenizer", type=Path, help="where SOURCE has none with it")
    parser.add_argument("--texts", type=Path, help="real texts to check it on, one a line")
    parser.add_argument("--strict", action="store_true", help="nothing may be left behind")
    parser.add_argument("--unchecked", action="store_true", help="do not run the two sides")
    parser.add_argument("--json", action="store_true", help="say it in JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        from palm_ds.convert import Options, convert  # here: --help needs no torch

        same = ("family", "task", "head", "head_class", "words", "dtype", "shard_size", "strict")
        given: dict[str, Any] = {name: getattr(args, name) for name in same}
        if args.texts is not None:
            given["texts"] = read_texts(args.texts)
        options = Options(**given, verify=not args.unchecked)
        opening = {name: getattr(args, name) for name in ("eps", "config", "tokenizer")}
        done = convert(args.source, args.target, args.to, options, **opening)
        if args.json:
            print(json.dumps(done.record(), ensure_ascii=False, default=str))
        else:
            say(done)
    return 0


def read_texts(file: Path) -> list[str]:
    """The lines of a file that are not empty. Raises UserError."""
    try:
        lines = [line.strip() for line in file.read_text("utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--texts {file}: cannot be read: {error}") from None
    if not any(lines):
        raise UserError(f"--texts {file}: there is no text in it")
    return [line for line in lines if line]


def say(done: Any) -> None:
    """The account, the notes, and how far apart the two sides are."""
    from rich.console import Console

    from palm_ds.account import show

    console = Console(soft_wrap=True, highlight=False)
    show(done.account.rows(), console)
    for note in done.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"{done.format} -> {done.to}: {done.target}", markup=False)
    console.print(f"checked: {done.proof or 'not at all'}", markup=False)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    sys.exit(main())
