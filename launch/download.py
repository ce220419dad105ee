"""Download pretrained models by PaddlePALM's names, or from the Hugging Face hub.

    python launch/download.py ls
    python launch/download.py ERNIE-v2-en-base BERT-zh-base --path models
    python launch/download.py org/name --revision main

PALM_MIRROR names a mirror of the archives: a base URL, or a folder.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from palm_ds import downloader
from palm_ds.errors import exit_on_user_error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="of a model; `ls` lists them")
    parser.add_argument("--path", type=Path, default=Path(), help="models go to PATH/pretrain/NAME")
    parser.add_argument("--mirror", help="a base URL or a folder (PALM_MIRROR)")
    parser.add_argument("--revision", help="of a repository on the hub: a branch, tag or commit")
    parser.add_argument("--again", action="store_true", help="even if the folder is there")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        if args.names == ["ls"]:
            downloader.ls()
            return 0
        places = downloader.places_from_environment()
        if args.mirror is not None:
            places = replace(places, mirror=args.mirror)
        for name in args.names:
            options = {"places": places, "again": args.again, "revision": args.revision}
            print(downloader.download(name, path=args.path, **options), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr, flush=True)
        sys.exit(130)
