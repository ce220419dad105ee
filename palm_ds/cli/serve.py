"""`palm-ds serve`"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from palm_ds.cli.command import Command, hint_next
from palm_ds.cli.options import add_fields, options_of
from palm_ds.common.errors import UserError

if TYPE_CHECKING:
    import torch

    from palm_ds.serve.model_set import Served

TOKEN = "PALM_DS_TOKEN"
"""The environment variable with the server's token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from palm_ds.serve.limits import ServingLimits

    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="MODEL",
        help="run folders or checkpoints of any format; NAME=PATH names one",
    )
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    add(
        "--allowed_host",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Host headers to accept besides addresses and localhost; *: any",
    )
    add("--port", type=int, default=8080, help="port to listen on; 0: any free port (8080)")
    add("--devices", default="", metavar="A,B", help="cpu, cuda:0,cuda:1 (a GPU if there is one)")
    add("--precision", default="fp32", help="fp32, bf16 or fp16 (fp32)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads per forward pass")
    add("--batch_tokens", type=int, default=0, metavar="N", help="tokens per forward pass")
    token = f"file with the token that clients must send (else ${TOKEN})"
    add("--token_file", type=Path, metavar="FILE", help=token)
    index = "search this index, or these vectors of `palm-ds embed`"
    add("--index", type=Path, metavar="PATH", help=index)
    add(
        "--texts",
        nargs="+",
        default=[],
        metavar="FILE",
        help="the texts of these vectors (the files they were made from)",
    )
    add("--column", default="", metavar="NAME", help="column of the texts in --texts")
    poolings = "of embeddings: mean, cls, max, pooler or splade (the model's own, else mean)"
    add("--pooling", default=None, help=poolings)
    normalize = "scale embeddings to length 1, or not (the model's own setting, else not)"
    add("--normalize", action=argparse.BooleanOptionalAction, default=None, help=normalize)
    add("--quiet", action="store_true", help="do not log requests")
    limits = {field.name: "N" for field in fields(ServingLimits)}
    add_fields(parser.add_argument_group("limits"), ServingLimits, metavar=limits)


def run(args: argparse.Namespace) -> int:
    from palm_ds.serve.limits import ServingLimits

    check_extra()
    from palm_ds.serve.client import is_loopback
    from palm_ds.serve.http.server import address_of, listen, serve
    from palm_ds.serve.model_set import open_set
    from palm_ds.serve.service import Service

    allowed_hosts = [_host_name(name) for name in args.allowed_host]
    limits = options_of(ServingLimits, args)
    token = _token(args.token_file)
    with listen(args.host, args.port) as bound:
        _log(quiet=args.quiet)
        if not token and not is_loopback(args.host):
            _say(f"warning: anyone who reaches {args.host} can use this server; set --token_file")
        served = _served(args)
        service = Service(open_set(served, _say), served, limits)
        address = address_of(bound)

        def ready() -> None:
            _say(f"serving on {address} (page: /, documentation: /docs; Ctrl-C stops)")
            hint_next(f"open {address} in a browser")

        allowed_hosts.append(args.host.lower())
        serve(service, bound, token=token, allowed_hosts=allowed_hosts, ready=ready)
        service.close()
    return 0


def check_extra() -> None:
    """Raises UserError without the packages of the extra `serve`."""
    try:
        import fastapi  # noqa: F401
        import orjson  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"serve needs {error.name}: pip install 'palm_ds[serve]'") from None


def _served(args: argparse.Namespace) -> Served:
    from palm_ds.inference.embedder import EmbeddingSettings
    from palm_ds.serve.model_set import Served
    from palm_ds.serve.served_model import ModelOptions, names_of

    if args.threads < 0:
        raise UserError(f"--threads {args.threads}: expected at least 1, or 0 for torch's default")
    if (args.texts or args.column) and args.index is None:
        raise UserError("--texts: needs --index, their vectors")
    options = ModelOptions(
        devices=_devices(args.devices, args.threads),
        precision=args.precision,
        embedding=EmbeddingSettings(pooling=args.pooling, normalize=args.normalize),
        batch_tokens=args.batch_tokens,
    )
    return Served(
        models=names_of(args.models),
        options=options,
        index=args.index,
        texts=args.texts,
        column=args.column,
    )


def _devices(names: str, threads: int) -> list[torch.device]:
    import torch

    from palm_ds.runtime.processes.processes import device_named

    if threads:
        torch.set_num_threads(threads)
    gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    devices = names.split(",") if names else ["cuda:0" if gpu else "cpu"]
    return [device_named(name.strip()) for name in devices]


def _host_name(name: str) -> str:
    """A name as the Host header of a request has it, without the port. Raises UserError."""
    if not name or any(each in "/:@?# " for each in name):
        raise UserError(f"--allowed_host {name}: expected a name such as models.example.org, or *")
    return name.lower().removesuffix(".")


def _token(file: Path | None) -> str:
    """The token of a file, else of the environment; empty: none. Raises UserError."""
    if file is None:
        return os.environ.get(TOKEN, "").strip()
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token_file {file}: {getattr(error, 'strerror', error)}") from None
    if not token or not token.isascii() or len(token.split()) > 1:
        raise UserError(f"--token_file {file}: expected one word of ASCII characters")
    return token


def _log(*, quiet: bool) -> None:
    """Lines with the time on standard error; those of requests have their id."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("palm_ds.serve")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    logging.getLogger("palm_ds.serve.access").setLevel(logging.WARNING if quiet else logging.INFO)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


COMMAND = Command(
    name="serve",
    summary="Answer HTTP requests with one model or several: predictions, embeddings, search.",
    usage="MODEL... [options]",
    examples="""
palm-ds serve runs/joint
palm-ds serve runs/joint minilm=models/all-MiniLM-L6-v2 --port 9000 --devices cuda:0,cuda:1
palm-ds serve runs/mine --index indexes/news
palm-ds serve runs/mine --index vectors.npy --texts texts.txt
palm-ds serve runs/joint --host 0.0.0.0 --token_file token.txt
""",
    notes="""
The page / tries every head by hand; /docs describes the interface. Requests of all clients share
forward passes. SIGTERM answers what was accepted and ends; SIGHUP opens the models again.""",
    results=False,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
