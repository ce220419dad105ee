"""Fine-tuning compared with transformers.Trainer: the same encoder, rows, lr, epochs; scores,
speed.

    python benchmarks/finetune_vs_transformers.py --data DIR --english DIR --chinese DIR
        --results runs/finetuning.jsonl --table runs/finetuning.md

DIR of --data has the files that finetuning_sets.py names, the others are Hugging Face folders of an
encoder; data sets of a language without one are left out. Each finished run is a line of --results,
and a run that has one is not repeated: a comparison that was stopped continues, and one with more
--seeds or --sets adds to it. --only palm_ds --change KEY=VALUE --name NAME adds another recipe of
palm_ds.

Each seed chooses the first weights of the head, dropout, and the order of the rows; which rows are
learned from is the same for all. Both: AdamW, linear warm-up and decay, clipping at 1, dropout as
the checkpoint has it, fp32, as many rows in each step. transformers pads each batch to its longest
row and is used as in its own examples; palm_ds packs. All else are the defaults of each, and the
same functions score both. A real token is one that is no padding. Times are of the steps alone,
making the batches included; evaluation, loading and saving are not. The contenders take turns, each
in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cpu import compute_on_cpu  # noqa: E402
from benchmarks.finetuning_sets import SETS, DataSet  # noqa: E402

CONTENDERS: tuple[str, ...] = ("palm_ds", "transformers")
Row = dict[str, Any]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder of the data sets")
    parser.add_argument("--english", default="", help="a Hugging Face folder to start from")
    parser.add_argument("--chinese", default="", help="likewise, for Chinese")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=0, help="of the encoders; 0: all")
    parser.add_argument("--only", choices=CONTENDERS)
    parser.add_argument("--change", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name", default="palm_ds", help="what results call palm_ds (--change)")
    parser.add_argument("--reference", default="transformers", help="what others differ from")
    parser.add_argument("--results", required=True, help="a file of JSON lines; kept and added to")
    parser.add_argument("--table", default="", help="a file for the table; default: only printed")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("accelerate") is None and args.only != "palm_ds":
        raise SystemExit("transformers.Trainer needs accelerate: pip install -e '.[dev]'")
    results = Path(args.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    spawn = get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(1, spawn) as first,
        ProcessPoolExecutor(1, spawn) as second,
    ):
        processes = dict(zip(CONTENDERS, (first, second), strict=True))
        for run in planned_runs(args, Path(scratch)):
            run_once(run, processes[run.contender], results)
    text = table(read_results(results), args.reference)
    print(text)
    if args.table:
        Path(args.table).write_text(text + "\n")


def planned_runs(args: argparse.Namespace, scratch: Path) -> list[Run]:
    """All runs of the comparison: the sets and contenders in turns."""
    folders, encoders = {}, {}
    for set_name in args.sets:
        language = SETS[set_name].language
        if not getattr(args, language):
            print(f"{set_name}: left out; give --{language}")
            continue
        encoders[set_name] = encoder_of(args, language, scratch)
        folders[set_name] = scratch / set_name.split(",")[0]
        folders[set_name].mkdir()
        write_rows(Path(args.data), SETS[set_name], folders[set_name])
    return [
        Run(
            set_name=set_name,
            contender=contender,
            name=args.name if contender == "palm_ds" else contender,
            encoder=encoders[set_name],
            folder=folders[set_name],
            seed=seed,
            batch=args.batch,
            changes=tuple(args.change),
        )
        for seed in args.seeds
        for set_name in folders
        for contender in ([args.only] if args.only else CONTENDERS)
    ]


def run_once(run: Run, process: ProcessPoolExecutor, results: Path) -> None:
    """Add a run to the results if they lack it."""
    key = {"set": run.set_name, "name": run.name, "seed": run.seed}
    if any(key.items() <= done.items() for done in read_results(results)):
        return
    found = process.submit(LEARN[run.contender], run).result()
    with results.open("a") as file:
        file.write(json.dumps({**key, **found}) + "\n")
    score, speed = f"{found['score']:.2f}", f"{found['speed']:,.0f} tokens/s"
    print(f"{run.set_name}  seed {run.seed}  {run.name}  {score}  {speed}", flush=True)


def encoder_of(args: argparse.Namespace, language: str, scratch: Path) -> str:
    """The encoder to start from: with --layers a copy of its first layers."""
    encoder = getattr(args, language)
    if not args.layers:
        return encoder
    folder = scratch / f"{language}-encoder"
    if not folder.exists():
        from transformers import AutoConfig, AutoModel, AutoTokenizer

        config = AutoConfig.from_pretrained(encoder)
        config.num_hidden_layers = args.layers
        AutoModel.from_pretrained(encoder, config=config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of one contender."""

    set_name: str
    contender: str
    name: str
    encoder: str
    folder: Path
    """Of the rows."""
    seed: int
    batch: int
    changes: tuple[str, ...] = ()

    @property
    def data_set(self) -> DataSet:
        return SETS[self.set_name]

    def rows(self, part: str) -> list[Row]:
        lines = (self.folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


# Results ---------------------------------------------------------------------------------------


def read_results(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(results: Sequence[Mapping[str, Any]], reference: str) -> str:
    """Mean score of each contender in each data set ± the standard deviation of one run, and its
    difference from the reference ± its standard error: over the seeds that both ran, and in the
    last row over the sets.
    """
    names = list(dict.fromkeys(result["name"] for result in results))
    others = [name for name in names if name != reference]
    head = ["data set", "seeds", *names, *(f"{name} - {reference}" for name in others)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    means: dict[str, list[float]] = {name: [] for name in others}
    for set_name in dict.fromkeys(result["set"] for result in results):
        of_set = [result for result in results if result["set"] == set_name]
        scores: dict[str, dict[int, float]] = {name: {} for name in names}
        for result in of_set:
            scores[result["name"]][result["seed"]] = result["score"]
        cells = [_mean_and(statistics.stdev, list(scores[name].values())) for name in names]
        for name in others:
            both = scores[name].keys() & scores.get(reference, {}).keys()
            found = [scores[name][seed] - scores[reference][seed] for seed in sorted(both)]
            means[name] += [statistics.mean(found)] if found else []
            cells.append(_mean_and(_standard_error, found, "+"))
        seeds = max(map(len, scores.values()))
        lines.append(f"| {set_name}, {of_set[0]['metric']} | {seeds} | {' | '.join(cells)} |")
    last = [_mean_and(_standard_error, means[name], "+") for name in others]
    return "\n".join([*lines, f"| mean | {'| ' * (len(names) + 1)}{' | '.join(last)} |"])


def _mean_and(spread: Callable[[list[float]], float], values: list[float], sign: str = "") -> str:
    if len(values) < 2:
        return f"{values[0]:{sign}.1f}" if values else ""
    return f"{statistics.mean(values):{sign}.1f} ± {spread(values):.1f}"


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


# Rows ------------------------------------------------------------------------------------------

_ROLES = ("text_a", "text_b", "label", "tokens", "tags", "id", "question", "context", "answers")


def write_rows(data: Path, data_set: DataSet, folder: Path) -> None:
    """The rows that both read, as jsonl."""
    import numpy as np

    from palm_ds.data.reader import TableSettings, open_table

    def every(file: str) -> list[Row]:
        table = open_table(str(data / file), TableSettings(**data_set.read))
        found = [dict(table[number]) for number in range(len(table))]
        return [row for row in found if len(row.get("context", "")) <= data_set.longest]

    parts = {"train": every(data_set.train)}
    if data_set.dev:
        parts["dev"] = every(data_set.dev)
    else:
        parts = held_out(parts["train"])
    for part, most in (("train", data_set.rows), ("dev", data_set.dev_rows)):
        rows = parts[part]
        numbers = np.sort(np.random.default_rng(0).permutation(len(rows))[:most])
        kept = [{key: rows[n][key] for key in _ROLES if key in rows[n]} for n in numbers]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in kept]
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")


def held_out(rows: list[Row]) -> dict[str, list[Row]]:
    """The last third of the rows for scoring, without those whose context is learned from."""
    cut = len(rows) * 2 // 3
    learned = {row["context"] for row in rows[:cut] if "context" in row}
    kept = [row for row in rows[cut:] if row.get("context") not in learned]
    return {"train": rows[:cut], "dev": kept}


# palm_ds ---------------------------------------------------------------------------------------


def palm_ds_run(run: Run) -> dict[str, Any]:
    from palm_ds.common.config import override, parse_override
    from palm_ds.runtime.deepspeed.ds_config import read_ds_config
    from palm_ds.train.recipe.recipe import make_recipe
    from palm_ds.train.setup.run_folder import RunSpec
    from palm_ds.train.train import train

    recipe = _recipe(run)
    for change in run.changes:
        override(recipe, *parse_override(change))
    clock: dict[str, float] = {}
    tokens, scores = [0], {}

    def on_event(event: str, facts: Any) -> None:
        if event == "begin":
            clock["begin"] = time.monotonic()
        elif event == "step":
            tokens[0] += facts["result"].tokens
            clock["end"] = time.monotonic()
        elif event == "evaluation":
            scores.update(facts["scores"])

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        spec = RunSpec(
            recipe=make_recipe(recipe),
            ds_config=read_ds_config(ROOT / "ds_configs/cpu.json"),
            folder=Path(folder) / "run",
        )
        assert train(spec, on_event) == 0
    metric = run.data_set.metric
    speed = tokens[0] / (clock["end"] - clock["begin"])
    return {"metric": metric, "score": 100 * scores["task"].metrics[metric], "speed": speed}


def _recipe(run: Run) -> dict[str, Any]:
    data_set = run.data_set
    return {
        "seed": run.seed,
        "init_from": run.encoder,
        "length": data_set.length,
        "batch": f"{run.batch} examples",
        "optimizer": {"lr": data_set.lr, "weight_decay": 0.01, "clip": 1.0, "eps": 1e-8},
        "schedule": {"kind": "linear", "warmup": 0.1},
        "sources": {
            "rows": {
                "table": str(run.folder / "train.jsonl"),
                "validation": str(run.folder / "dev.jsonl"),
            }
        },
        "tasks": {"task": {"kind": data_set.kind, "source": "rows"}},
        "stages": [{"task": f"{data_set.epochs} epochs"}],
        "export_onnx": [],
        "save": {"every": 0},
        "log": {"every": 1_000_000},
    }


# transformers ----------------------------------------------------------------------------------


def transformers_run(run: Run) -> dict[str, Any]:
    import torch
    from transformers import AutoTokenizer

    from benchmarks.transformers_finetuning import KINDS

    torch.manual_seed(run.seed)
    task = KINDS[run.data_set.kind](
        rows=run.rows("train"),
        dev_rows=run.rows("dev"),
        tokenizer=AutoTokenizer.from_pretrained(run.encoder),
        length=run.data_set.length,
    )
    learned = task.features(task.rows, labeled=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(run, task, learned, folder)
        started = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - started
        value = task.score(trainer)
    tokens = run.data_set.epochs * sum(len(each["input_ids"]) for each in learned)
    return {"metric": run.data_set.metric, "score": 100 * value, "speed": tokens / seconds}


def _trainer(run: Run, task: Any, learned: Any, folder: str) -> Any:
    from transformers import Trainer, TrainingArguments

    steps = -(-len(learned) // run.batch) * run.data_set.epochs
    settings = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=run.batch,
        per_device_eval_batch_size=run.batch,
        num_train_epochs=run.data_set.epochs,
        learning_rate=run.data_set.lr,
        weight_decay=0.01,
        warmup_steps=int(0.1 * steps),
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        seed=run.seed,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
    )
    return Trainer(
        model=task.model(run.encoder),
        args=settings,
        train_dataset=learned,
        data_collator=task.collator(),
    )


LEARN: Mapping[str, Callable[[Run], dict[str, Any]]] = {
    "palm_ds": palm_ds_run,
    "transformers": transformers_run,
}

if __name__ == "__main__":
    given = parse()
    compute_on_cpu(given.threads)
    main(given)
