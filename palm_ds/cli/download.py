"""`palm-ds download`"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from palm_ds.cli.command import CONTINUES, Command
from palm_ds.cli.options import local_path
from palm_ds.cli.output import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "names",
        nargs="+",
        metavar="NAME",
        help="a model's name, or org/name of the hub; `ls` lists models",
    )
    add(
        "--path",
        type=local_path,
        default=Path(),
        metavar="DIR",
        help="models go to DIR/pretrain/NAME, data sets to DIR/data (.)",
    )
    add("--mirror", metavar="M", help="a base URL or a folder (PALM_MIRROR)")
    add("--revision", metavar="R", help="branch, tag or commit of a repository on the hub")
    add("--again", action="store_true", help="download again even if the folder exists")


def run(args: argparse.Namespace) -> int:
    from palm_ds.weights.download import downloader

    if args.names == ["ls"]:
        if args.json:
            show(args, downloader.listed())
        else:
            downloader.ls()
        return 0
    places = downloader.places_from_environment()
    if args.mirror is not None:
        places = replace(places, mirror=args.mirror)
    for name in args.names:
        folder = downloader.download(
            name, path=args.path, places=places, again=args.again, revision=args.revision
        )
        show(args, {"name": name, "folder": folder}, str(folder))
    return 0


COMMAND = Command(
    name="download",
    summary="Download pretrained models by PaddlePALM's names, or from the Hugging Face hub.",
    usage="NAME [NAME ...] [options]",
    examples="""
palm-ds download ls
palm-ds download ERNIE-v2-en-base BERT-zh-base --path models
palm-ds download org/name --revision main
palm-ds download task_data_zh                                    # ERNIE's Chinese data sets
""",
    notes="PALM_MIRROR names a mirror of the archives: a base URL, or a folder.",
    interrupted=CONTINUES,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
