"""`palm-ds push`"""

from __future__ import annotations

import argparse
from pathlib import Path

from palm_ds.cli.command import Command
from palm_ds.cli.output import show
from palm_ds.common.errors import UserError
from palm_ds.common.messages import byte_size, counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="RUN_OR_FOLDER", help="a finished run, or its hf/")
    add("name", metavar="ORG/NAME", help="the repository on the hub; created if there is none")
    add("--private", action="store_true", help="create it as a private repository")
    add("--revision", default="", metavar="R", help="push to this branch (main)")
    add("--message", default="", metavar="TEXT", help="message of the commit")
    add("--token_file", type=Path, metavar="FILE", help="a file with the hub's token")
    add("--dry_run", action="store_true", help="only list the files")


def run(args: argparse.Namespace) -> int:
    from palm_ds.weights.hub import check_repository, files_to_push, push_folder

    check_repository(args.name)
    files = files_to_push(args.source)
    count = f"{counted(len(files.pushed), 'file')}, {byte_size(files.size)}"
    record = {"files": files.pushed, "not_pushed": files.left, "bytes": files.size}
    notes = [f"note: not pushed: {', '.join(files.left)}"] if files.left and not args.quiet else []
    if args.dry_run:
        show(args, record, *files.pushed, *notes, f"{count}; nothing was pushed")
        return 0
    url = push_folder(
        args.source,
        args.name,
        private=args.private,
        token=_token(args.token_file) if args.token_file else None,
        revision=args.revision,
        message=args.message,
    )
    show(args, record | {"url": url}, *notes, f"{count}: {url}")
    return 0


def _token(file: Path) -> str:
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token_file {file}: cannot be read: {error}") from None
    if not token or not token.isascii() or len(token.split()) != 1:
        raise UserError(f"--token_file {file}: expected one line, a token")
    return token


COMMAND = Command(
    name="push",
    summary="Push the Hugging Face folder of a run to the hub.",
    usage="RUN_OR_FOLDER ORG/NAME [options]",
    examples="""
palm-ds push runs/mine my-team/news-encoder --private
palm-ds push runs/mine my-team/news-encoder --revision stage-2
palm-ds push exported my-team/topics --token_file ~/.hub_token
""",
    notes="""
Only files of a model are pushed, in one commit: weights, tokenizer, pooling, README.md, license,
onnx/. Checkpoints, optimizer state and logs stay here. The token is that of `hf auth login` or
HF_TOKEN, unless --token_file is given; HF_ENDPOINT names another hub.""",
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
