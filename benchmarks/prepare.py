"""Preparation against `datasets.map` with the same tokenizer: megabytes of text a second and core.

    python benchmarks/prepare.py                                      # the embedded English text
    python benchmarks/prepare.py --input wiki/ --tokenizer vocab.txt
    python benchmarks/prepare.py --input zh/ --language zh --runs 5

One process, one thread, runs in turn. `datasets.map` starts from text that is in Arrow already and
makes ids alone; `prepare` reads the files, mines phrases, makes ids and all marks, and hashes what
it writes. CPU seconds are compared, so that a busy machine does not decide. On small inputs such
as the embedded one, meeting words for the first time is most of the work; it pays from about 5 MB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from palm_ds.common.errors import exit_on_user_error  # noqa: E402
from palm_ds.corpus.options import TextOptions  # noqa: E402
from palm_ds.corpus.prepare import PrepareOptions, plan, prepare  # noqa: E402
from palm_ds.corpus.worker import WorkUnitReader  # noqa: E402
from palm_ds.text.tokenizer import load_tokenizer  # noqa: E402
from palm_ds.text.train_tokenizer import train_tokenizer  # noqa: E402


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        texts = _texts(args.input, args.most_mb)
        megabytes = sum(len(text.encode("utf-8")) for text in texts) / 1e6
        tokenizer = _tokenizer(args.tokenizer, texts, folder)
        print(f"{megabytes:.1f} MB of text, {len(texts)} documents, language {args.language}")
        source = _as_files(texts, folder)
        runs: dict[str, Callable[[int], None]] = {
            "datasets.map": _map(texts, tokenizer, folder),
            "prepare, no mining": _prepare(source, tokenizer, args.language, folder, mine=False),
            "prepare": _prepare(source, tokenizer, args.language, folder, mine=True),
        }
        seconds = _in_turn(runs, args.runs)
    _show(seconds, megabytes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--input", nargs="+", default=["embedded"], help="as of launch/prepare.py (embedded)")
    add("--language", default="en", choices=("en", "zh", "mixed"), help="(en)")
    add("--tokenizer", help="as of launch/prepare.py (WordPiece, trained on the input)")
    add("--runs", type=int, default=3, help="runs of each (3)")
    add("--most_mb", type=float, default=64, help="text that is used at most, in MB (64)")
    add("--scratch", help="folder for temporary files")
    return parser.parse_args()


def _texts(inputs: list[str], most_mb: float) -> list[str]:

    job = plan(inputs, PrepareOptions(train="wordpiece"))
    texts, size = [], 0
    for number in range(len(job.units)):
        for record in WorkUnitReader(job, number):
            if size > most_mb * 1e6:
                return texts
            texts.append(record.text)
            size += len(record.text.encode("utf-8"))
    return texts


def _tokenizer(path: str | None, texts: list[str], folder: Path) -> str:
    """A folder with the tokenizer's files, for both."""
    found = (
        load_tokenizer(path)
        if path
        else train_tokenizer(texts, kind="wordpiece", vocab_size=30_522, lower=True)
    )
    found.save(folder / "tokenizer")
    return str(folder / "tokenizer")


def _as_files(texts: list[str], folder: Path) -> str:
    import json

    file = folder / "input.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for text in texts:
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return str(file)


def _map(texts: list[str], tokenizer: str, folder: Path) -> Callable[[int], None]:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    peer = AutoTokenizer.from_pretrained(tokenizer)
    table = datasets.Dataset.from_dict({"text": texts})
    table.save_to_disk(str(folder / "text"))
    table = datasets.Dataset.load_from_disk(str(folder / "text"))

    def encode(batch: dict) -> dict:
        return {"input_ids": peer(batch["text"], add_special_tokens=False)["input_ids"]}

    def run(number: int) -> None:
        made = table.map(
            encode,
            batched=True,
            remove_columns=["text"],
            cache_file_name=str(folder / f"map-{number}.arrow"),
            new_fingerprint=f"run{number}",
            load_from_cache_file=False,
        )
        assert len(made) == len(texts)

    return run


def _prepare(
    source: str, tokenizer: str, language: str, folder: Path, *, mine: bool
) -> Callable[[int], None]:
    options = PrepareOptions(
        text=TextOptions(language=language, collocations=mine), tokenizer=tokenizer, workers=1
    )

    def run(number: int) -> None:
        prepare(folder / f"corpus-{mine}-{number}", [source], options)

    return run


def _in_turn(
    runs: dict[str, Callable[[int], None]], times: int
) -> dict[str, list[tuple[float, float]]]:
    """(CPU, wall) seconds of every run."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(times):
        for name, run in runs.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run(number)
            seconds[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return seconds


def _show(seconds: dict[str, list[tuple[float, float]]], megabytes: float) -> None:
    peer = statistics.median(cpu for cpu, _ in seconds["datasets.map"])
    print(f"{'':20s} {'CPU s':>8s} {'MB/s a core':>12s} {'times map':>10s} {'wall s':>8s}")
    for name, runs in seconds.items():
        cpu, wall = (statistics.median(column) for column in zip(*runs, strict=True))
        row = f"{name:20s} {cpu:8.2f} {megabytes / cpu:12.2f} {peer / cpu:10.2f} {wall:8.2f}"
        print(row, flush=True)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
