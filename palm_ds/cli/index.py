"""`palm-ds index build|add|delete|compact|search|info`: an index of texts that can be changed."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palm_ds.cli.command import Command, CommandGroup, hint_next, typed
from palm_ds.cli.inference_options import (
    add_inference_arguments,
    add_vector_arguments,
    progress,
    start_processes,
)
from palm_ds.cli.options import local_path
from palm_ds.cli.output import show, summarize
from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted, print_error

if TYPE_CHECKING:
    from palm_ds.inference.embedder import Embedder, EmbeddingSettings
    from palm_ds.inference.search.index import SearchIndex
    from palm_ds.inference.search.texts import TextColumns

_INDEX = "a folder that `palm-ds index build` made"
_MANY = 0.2  # the share of an index that was deleted, from which it is worth compacting
_CONTINUES = "`palm-ds index add` with the same files continues"


def _input_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", nargs="+", metavar="INPUT", help="files of rows, or .txt files")
    add("--column", default="", metavar="NAME", help="column of the texts (text, text_a, ...)")
    ids = "column of the ids (id, _id or idx; else a hash of the text)"
    add("--id", default="", metavar="NAME", help=ids)
    add("--title", default="", metavar="NAME", help="column of the titles (title)")
    metadata = "columns stored as metadata, which filters can test (all others)"
    add("--metadata", nargs="*", default=None, metavar="NAME", help=metadata)
    add("--format", default="", help="format of the files (by their suffixes)")


def _columns(args: argparse.Namespace) -> TextColumns:
    from palm_ds.inference.search.texts import TextColumns

    return TextColumns(
        text=args.column, id=args.id, title=args.title, metadata=args.metadata, format=args.format
    )


def _open_embedder(
    args: argparse.Namespace, model: str | Path, settings: EmbeddingSettings
) -> Embedder:
    from palm_ds.inference.trained_model import TrainedModel

    _, device = start_processes(args.device)
    opened = TrainedModel.open(
        model, device=device, precision=args.precision, batch_tokens=args.batch_tokens
    )
    return opened.embedder(settings)


def _own_embedder(args: argparse.Namespace, index: SearchIndex) -> Embedder:
    """The model of an index, from where it is now."""
    from palm_ds.inference.search.add_files import check_model

    model = args.model or index.embedding.model
    if not Path(model).exists():
        raise UserError(
            f"{model}: the model of {args.index} is no longer there; give its new place: --model"
        )
    embedder = _open_embedder(args, model, index.embedding.settings)
    check_model(index, embedder, model)
    return embedder


def _add(args: argparse.Namespace, index: SearchIndex, embedder: Embedder) -> int:
    from palm_ds.inference.search.add_files import add_files
    from palm_ds.inference.search.graph import available

    started = time.monotonic()
    with progress("index", not args.quiet) as done:
        summary = add_files(index, embedder, args.input, _columns(args), done)
    grown = index.grow_graph()
    seconds, total = time.monotonic() - started, index.total
    lines = [
        f"{counted(summary.added, 'text')} added ({summary.replaced:,} replace others), "
        f"{summary.unchanged:,} unchanged; {seconds:.1f} s; {args.index} has {total:,}"
    ]
    if index.wants_graph and not available():
        lines.append("searches compare every vector; pip install 'palm_ds[search]' is faster")
    record = {**vars(summary), "texts": total, "graph": grown, "seconds": round(seconds, 3)}
    summarize(args, record, *lines)
    return 0


# ---- build ----


def _build_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("index", type=local_path, metavar="INDEX", help="a new folder")
    add("model", metavar="MODEL", help="a run folder, or a checkpoint of any format")
    _input_arguments(parser)
    poolings = "mean, cls, max, pooler or splade (the model's own, else mean)"
    add("--pooling", default=None, help=poolings)
    add_vector_arguments(parser)
    add_inference_arguments(parser)


def _build(args: argparse.Namespace) -> int:
    from palm_ds.common.atomic import check_new_folder
    from palm_ds.inference.embedder import EmbeddingSettings
    from palm_ds.inference.search.add_files import embedding_of
    from palm_ds.inference.search.index import create_index, is_index, open_index
    from palm_ds.inference.search.texts import read_texts

    if is_index(args.index):
        raise UserError(f"{args.index}: is already an index; `palm-ds index add` adds to it")
    check_new_folder(args.index)
    next(read_texts(args.input, _columns(args)), None)  # a mistake costs no model that is opened
    names = ("pooling", "dimensions", "max_active_dims", "max_length", "prompt", "task")
    settings = EmbeddingSettings(**{name: getattr(args, name) for name in names})
    embedder = _open_embedder(args, args.model, settings)
    create_index(args.index, embedding_of(embedder, args.model), embedder.size)
    with _without_empty_index(args.index), open_index(args.index) as index:
        done = _add(args, index, embedder)
    hint_next(f"palm-ds serve {typed(args.model)} --index {typed(args.index)}")
    return done


@contextmanager
def _without_empty_index(folder: Path) -> Iterator[None]:
    """After a mistake in the files: removes an index without texts, and says of another how to go
    on."""
    from palm_ds.inference.search.index import open_index

    try:
        yield
    except UserError as error:
        with open_index(folder) as index:
            empty = not index.total
        if not empty:
            how = f"{folder} has the texts before; `palm-ds index add` with mended files continues"
            raise UserError(f"{error}; {how}") from None
        shutil.rmtree(folder)
        raise


BUILD = Command(
    name="index build",
    summary="Build an index of texts: their vectors, words, ids, titles and metadata.",
    usage="INDEX MODEL INPUT... [options]",
    examples="""
palm-ds index build indexes/news runs/mine news.jsonl --column body --title headline
palm-ds index build indexes/mine models/minilm texts.txt --precision bf16
""",
    interrupted=_CONTINUES,
    add_arguments=_build_arguments,
    run=_build,
)


# ---- add ----


def _model_argument(parser: argparse.ArgumentParser) -> None:
    moved = "the model that built the index, if it has moved since"
    parser.add_argument("--model", type=Path, metavar="PATH", help=moved)
    add_inference_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", type=Path, metavar="INDEX", help=_INDEX)
    _input_arguments(parser)
    _model_argument(parser)


def _add_texts(args: argparse.Namespace) -> int:
    from palm_ds.inference.search.index import open_index

    with open_index(args.index) as index:
        return _add(args, index, _own_embedder(args, index))


ADD = Command(
    name="index add",
    summary="Add texts to an index; a text whose id it has replaces the old one.",
    usage="INDEX INPUT... [options]",
    examples="palm-ds index add indexes/news today.jsonl --column body --title headline",
    notes="""
A server that searches the index finds them immediately. Unchanged texts are not embedded again.""",
    interrupted=_CONTINUES,
    add_arguments=_add_arguments,
    run=_add_texts,
)


# ---- delete ----


def _delete_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", type=Path, metavar="INDEX", help=_INDEX)
    parser.add_argument("ids", nargs="*", metavar="ID", help="ids of texts to delete")
    _filter_argument(parser)


def _filter_argument(parser: argparse.ArgumentParser) -> None:
    what = """only texts with this metadata: '{"lang": "en", "year": {">=": 2020}}'"""
    parser.add_argument("--filter", type=_as_filter, metavar="JSON", help=what)


def _as_filter(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("""expected JSON such as '{"lang": "en"}'""")
    return value


def _delete(args: argparse.Namespace) -> int:
    from palm_ds.inference.search.index import open_index

    if bool(args.ids) == (args.filter is not None):
        raise UserError("give either ids or --filter, to name the texts")
    with open_index(args.index) as index:
        deleted = index.delete(args.ids, args.filter)
        total = index.total
    absent = len(set(args.ids)) - deleted if args.ids else 0
    line = f"{counted(deleted, 'text')} deleted; {args.index} has {total:,}"
    lines = [line, *[f"not there: {counted(absent, 'id')}"] * bool(absent)]
    summarize(args, {"deleted": deleted, "absent": absent, "texts": total}, *lines)
    return 0


DELETE = Command(
    name="index delete",
    summary="Delete texts of an index, by id or by their metadata.",
    usage="INDEX (ID... | --filter JSON)",
    examples="""
palm-ds index delete indexes/news 1042 1043
palm-ds index delete indexes/news --filter '{"year": {"<": 2020}}'
""",
    add_arguments=_delete_arguments,
    run=_delete,
)


# ---- compact ----


def _compact_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", type=Path, metavar="INDEX", help=_INDEX)


def _compact(args: argparse.Namespace) -> int:
    from palm_ds.inference.search.index import open_index

    started = time.monotonic()
    with open_index(args.index) as index:
        left_out = index.compact()
        grown, total = index.grow_graph(), index.total
    seconds = time.monotonic() - started
    line = (
        f"{counted(left_out, 'deleted text')} left out; {seconds:.1f} s; {args.index} has {total:,}"
    )
    record = {"left_out": left_out, "texts": total, "graph": grown, "seconds": round(seconds, 3)}
    summarize(args, record, line)
    return 0


COMPACT = Command(
    name="index compact",
    summary="Free the space of an index's deleted texts.",
    usage="INDEX",
    examples="palm-ds index compact indexes/news",
    notes="""
Servers continue to search meanwhile; additions and deletions wait. If the command is interrupted,
the index is either as before or compacted.""",
    add_arguments=_compact_arguments,
    run=_compact,
)


# ---- search ----


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("index", type=Path, metavar="INDEX", help=_INDEX)
    add("query", metavar="QUERY", help="the text to search for")
    add("--top", type=int, default=10, metavar="N", help="number of texts to find (10)")
    add("--hybrid", action="store_true", help="search by words (BM25) as well as by vectors")
    add("--exact", action="store_true", help="compare every vector, even in a large index")
    _filter_argument(parser)
    _model_argument(parser)


def _search(args: argparse.Namespace) -> int:
    from palm_ds.inference.search.index import open_index

    if args.top < 1:
        raise UserError(f"--top {args.top}: expected at least 1")
    if not args.query.strip():
        raise UserError("QUERY: the text is empty")
    with open_index(args.index) as index:
        vector = _own_embedder(args, index).vectors([args.query])[0]
        index.open_graph()
        found = index.search(
            vector,
            args.query,
            top=args.top,
            filter=args.filter,
            hybrid=args.hybrid,
            exact=args.exact,
        )
        why = "" if found else _why_nothing(index, bool(args.filter))
    for each in found:
        record = each.record
        title = f"{record.title}: " if record.title else ""
        line = f"{each.score:.4f}  {record.id}  {title}{record.text}"
        shown = record._asdict() | {"score": each.score}
        shown.pop("row")
        show(args, shown, line)
    if not found and not args.quiet:
        print_error(f"nothing found: {why}")
    return 0


def _why_nothing(index: SearchIndex, filtered: bool) -> str:
    if not index.total:
        return "the index has no texts"
    if not index.store.sparse:
        return "no text passes --filter"
    return "no text has a word of the query" + (" and passes --filter" if filtered else "")


SEARCH = Command(
    name="index search",
    summary="Search an index for the texts nearest to a query.",
    usage="INDEX QUERY [options]",
    examples="""
palm-ds index search indexes/news "towers in France" --top 5
palm-ds index search indexes/news "towers in France" --hybrid --filter '{"lang": "en"}'
""",
    piped=True,
    add_arguments=_search_arguments,
    run=_search,
)


# ---- info ----


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", type=Path, metavar="INDEX", help=_INDEX)


def _info(args: argparse.Namespace) -> int:
    from palm_ds.inference.search.graph import available
    from palm_ds.inference.search.index import open_index

    with open_index(args.index) as index:
        index.open_graph()
        with index.store.reading() as now:
            rows = now.rows
        covered = index.graph.covered if index.graph else 0
        embedding, size = index.embedding, index.size
        wanted, sparse = index.wants_graph, index.store.sparse
    deleted = rows.count - rows.total
    hint = "; `palm-ds index compact` frees their space" if deleted > _MANY * rows.count else ""
    lines = [
        f"{counted(rows.total, 'text')}, {deleted:,} deleted{hint}",
        f"vectors of {size} numbers by {embedding.model} ({embedding.settings.pooling})",
        "searched by the texts of each word"
        if sparse
        else _about_graph(covered, wanted, available()),
    ]
    record = {
        "texts": rows.total,
        "deleted": deleted,
        "size": size,
        "model": embedding.model,
        "fingerprint": embedding.fingerprint,
        "graph": covered,
    }
    show(args, record, *lines)
    return 0


def _about_graph(covered: int, wanted: bool, available: bool) -> str:
    if covered:
        return f"searched by a graph of {counted(covered, 'row')}"
    if not wanted:
        return "every vector is compared"
    how = "the next addition makes a graph" if available else "pip install 'palm_ds[search]'"
    return f"every vector is compared; faster: {how}"


INFO = Command(
    name="index info",
    summary="Show how many texts an index has, and how they are embedded and searched.",
    usage="INDEX",
    examples="palm-ds index info indexes/news",
    add_arguments=_info_arguments,
    run=_info,
)

_COMMANDS: Sequence[Command] = (BUILD, ADD, DELETE, COMPACT, SEARCH, INFO)
COMMAND = CommandGroup(
    name="index",
    summary="Build an index of texts, add to it, delete from it, compact it, and search it.",
    commands={command.name.split()[1]: command for command in _COMMANDS},
)

if __name__ == "__main__":
    COMMAND.start()
