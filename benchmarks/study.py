"""Arms of a study: recipes trained with equal FLOPs on one corpus, and what their encoders learn.

    python benchmarks/study.py --corpus runs/study/corpus --out runs/study --pairs zorro/*.txt \\
        --suite suite.yaml --tokens 1e7 --seeds 1 2 3
    python benchmarks/study.py --corpus runs/study/corpus --out runs/study --table docs/study.md

An arm is a recipe of launch/recipes/study on a body: `modern`, the recipe's own ModernBERT, or
`bert`. Its stages are scaled so that it takes as many FLOPs as `masked_15` on `modern` does for
--tokens tokens; FLOPs are those of `--plan`, with heads, generators and products with the
vocabulary. Text, tokenizer, held-out documents and batch are the same for all arms of a seed. On a
Chinese corpus discourse markers are Chinese, and capitalization is no task. The protocol is in
docs/study.md.

Each arm and seed has a folder OUT/BODY/ARM/seed_N with its recipe, the run, and measures.json:

    masked     loss and accuracy of masked tokens of held-out documents: 15 %, the same for all arms
    tasks      held-out accuracy of every task at the end of every stage
    pairs      accuracy on minimal pairs, the mean over paradigms (--pairs)
    SET        scores of fine-tuning (--suite, a suite file of `palm-ds suite` with one seed)

Runs go one after the other. Called again, the study continues; what is finished is not repeated,
and a measure that was not asked for before is added. Called in several terminals, on a GPU that
one small model does not fill, the processes share the runs. --table writes the table of all that
is there into a page, between its two marks for the language of the corpus. --record keeps all
measures in one file, a line of JSON each, with which a study continues on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cpu import compute_on_cpu  # noqa: E402
from palm_ds.cli.runs import stop_on_signals  # noqa: E402
from palm_ds.common.atomic import write_file_atomically  # noqa: E402
from palm_ds.common.errors import UserError  # noqa: E402
from palm_ds.common.files import locked, try_lock  # noqa: E402
from palm_ds.common.messages import print_error  # noqa: E402
from palm_ds.train.sweeps.subprocesses import run_and_wait  # noqa: E402

RECIPES = ROOT / "launch/recipes/study"
_PALM_DS, _ENVIRONMENT = (sys.executable, "-m", "palm_ds"), {"PYTHONPATH": str(ROOT)}
REFERENCE = "masked_15"
CPU = "cpu.json"
CONFIG = "deepspeed_config"
_BERT = (
    "{preset: small, max_positions: 128, init_range: 0.05, dropout: 0.0, attention_dropout: 0.0}"
)
BODIES: Mapping[str, Sequence[str]] = {
    "modern": [],
    "bert": [f"backbone={_BERT}", "optimizer.lr=5e-4"],  # at the recipes' rate it does not learn
}
REFERENCE_BODY = "modern"
CAPITALS = "capitalization"
OF_TASK = "tasks: "


@dataclass(frozen=True, kw_only=True)
class Run:
    """An arm with one body and one seed."""

    arm: str
    body: str
    seed: int
    out: Path

    @property
    def folder(self) -> Path:
        return self.out / self.body / self.arm / f"seed_{self.seed}"

    @property
    def measures(self) -> Path:
        return self.folder / "measures.json"

    def values(self, corpus: Path, overrides: Sequence[str]) -> dict[str, Any]:
        """The contents of its recipe, with stages as written."""
        from palm_ds.train.recipe.recipe import read_values

        values = read_values(RECIPES / f"{self.arm}.yaml", [*BODIES[self.body], *overrides])
        values |= {"seed": self.seed, "export_onnx": []}
        values["sources"] = {"text": {"corpus": str(corpus.absolute())}}
        if ngrams := values["tasks"].get("explicit_ngram_masking"):
            ngrams["lexicon"] = str(corpus.absolute().parent / Path(ngrams["lexicon"]).name)
        return in_chinese(values) if language_of(corpus) == "zh" else values


def language_of(corpus: Path) -> str:
    from palm_ds.corpus.store import open_corpus

    return str(open_corpus(corpus).manifest.options.get("text", {}).get("language", ""))


def in_chinese(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with Chinese discourse markers and without capitalization, which Chinese lacks."""
    tasks = {name: dict(task) for name, task in values["tasks"].items() if name != CAPITALS}
    for task in tasks.values():
        task |= {"markers": "zh"} if "markers" in task else {}

    def kept(stages: Any) -> Any:
        if isinstance(stages, str):
            return " + ".join(name for name in stages.split(" + ") if name != CAPITALS)
        if isinstance(stages, Mapping):
            return {kept(key): kept(value) for key, value in stages.items()}
        return [kept(each) for each in stages] if isinstance(stages, list) else stages

    return {**values, "tasks": tasks, "stages": kept(values["stages"])}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arms = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    add = parser.add_argument
    add("--corpus", required=True, type=Path, help="of `palm-ds prepare`")
    add("--out", required=True, type=Path, help="folder of all runs; kept")
    add("--arms", nargs="+", choices=arms, default=arms, metavar="ARM")
    add("--bodies", nargs="+", choices=BODIES, default=[REFERENCE_BODY])
    add("--seeds", nargs="+", type=int, default=[1, 2, 3])
    add("--tokens", type=float, default=1e7, help="that masked_15 is trained on")
    add("--set", nargs="*", default=[], metavar="a.b=c", help="overrides of every recipe")
    add("--pairs", nargs="*", default=[], metavar="FILE", help="minimal pairs")
    add("--suite", type=Path, metavar="FILE", help="what to fine-tune on; `init_from` is the arm's")
    add(
        "--deepspeed_config",
        default=CPU,
        metavar="FILE",
        help="default: %(default)s, which computes on CPUs",
    )
    add("--threads", type=int, default=2)
    add("--record", type=Path, metavar="FILE", help="measures of runs, which are not repeated")
    add("--table", type=Path, metavar="PAGE", help="write the table into this page and stop")
    return parser.parse_args(arguments)


# ---- equal FLOPs ----


def flops_of(values: Mapping[str, Any]) -> float:
    """FLOPs of all steps of a recipe, forward and backward."""
    import torch

    from palm_ds.runtime.deepspeed.ds_config import DSConfig
    from palm_ds.train.plan.table import stage_work
    from palm_ds.train.plan.work import size_of
    from palm_ds.train.recipe.recipe import make_recipe
    from palm_ds.train.setup.build import build_model, build_stream
    from palm_ds.train.setup.resolve import resolve
    from palm_ds.train.setup.sources import open_data

    recipe = make_recipe(dict(values), "study")
    data = open_data(recipe)
    recipe = resolve(recipe, data)
    ds_config = DSConfig(path="", sections={}, stage=0, precision="fp32")
    model = build_model(recipe, ds_config, data.vocabulary, device=torch.device("cpu"))
    size = size_of(model)
    return sum(stage.flops(size) for stage in stage_work(build_stream(recipe, data), model))


def scaled(stages: Any, tasks: Mapping[str, Any], factor: float) -> Any:
    """The stages of a recipe with `factor` times their steps."""
    if isinstance(stages, Mapping):
        return {**stages, "steps": max(round(stages["steps"] * factor), 1)}
    return [
        {
            key: max(round(value * factor), 1) if set(key.split(" + ")) <= set(tasks) else value
            for key, value in stage.items()
        }
        for stage in stages
    ]


def budget_of(out: Path, args: argparse.Namespace) -> float:
    """FLOPs of every run: those of the reference arm, which has one stage of 1,000 steps."""
    reference = Run(arm=REFERENCE, body=REFERENCE_BODY, seed=1, out=out)
    values = reference.values(args.corpus, args.set)
    number, unit = str(values["batch"]).split()
    if unit != "tokens":
        raise UserError(
            f"batch: {values['batch']}: the study counts in tokens, such as 8192 tokens"
        )
    return flops_of(values) * args.tokens / (1000 * float(number))


# ---- running ----


def train(run: Run, values: Mapping[str, Any], args: argparse.Namespace) -> None:
    import yaml

    recipe = run.folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    command = ["pretrain", recipe, "--deepspeed_config", args.deepspeed_config]
    call(*command, "--run_dir", run.folder / "run")


def call(*words: object) -> None:
    """Run a command of palm-ds; a signal that ends the study interrupts it, and waits until it has
    saved. Raises UserError if it fails."""
    _check(words, run_and_wait([*_PALM_DS, *map(str, words)], _ENVIRONMENT))


def printed_by(*words: object) -> str:
    """What a command of palm-ds prints. Raises UserError if it fails."""
    command, environment = [*_PALM_DS, *map(str, words)], {**os.environ, **_ENVIRONMENT}
    done = subprocess.run(command, check=False, env=environment, stdout=subprocess.PIPE, text=True)
    _check(words, done.returncode)
    return done.stdout


def _check(words: Sequence[object], code: int) -> None:
    if code:
        raise UserError(f"palm-ds {words[0]}: failed (exit code {code})")


Part = Callable[[], Mapping[str, float]]


def missing_parts(
    run: Run, values: Mapping[str, Any], found: Mapping[str, Any], args: argparse.Namespace
) -> dict[str, Part]:
    """{part: what measures it}, {name: value} each; of the suite, the sets without a score."""
    parts: dict[str, Part] = {"tasks": lambda: dict(stage_scores(run.folder / "run"))}
    if "replaced_token_detection" not in values["tasks"]:  # its encoder predicts no words
        if args.pairs:
            parts["pairs"] = lambda: minimal_pairs(run, args)
        parts["masked"] = lambda: masked_words(run, values["held_out"], args)
    missing = {name: part for name, part in parts.items() if name not in found["parts"]}
    if args.suite and (sets := [name for name in sets_of(args.suite) if name not in found]):
        missing["suite"] = lambda: finetuned(run, sets, args)
    return missing


def sets_of(suite: Path) -> list[str]:
    import yaml

    contents = yaml.safe_load(suite.read_text(encoding="utf-8"))
    return contents.get("only") or list(contents["sets"])


def minimal_pairs(run: Run, args: argparse.Namespace) -> dict[str, float]:
    options = ("--model", run.folder / "run", "--json")
    return {"pairs": json.loads(printed_by("evaluate", "--pairs", *args.pairs, *options))["mean"]}


def masked_words(run: Run, held_out: float, args: argparse.Namespace) -> dict[str, float]:
    from palm_ds.corpus.store import open_corpus
    from palm_ds.inference.held_out_loss import masked_lm_loss
    from palm_ds.inference.trained_model import TrainedModel

    model = TrainedModel.open(run.folder / "run")
    loss = masked_lm_loss(model, open_corpus(args.corpus), held_out=held_out)
    return {"masked": loss.nats, "masked accuracy": loss.accuracy}


def stage_scores(folder: Path) -> Iterator[tuple[str, float]]:
    """(task, stage N: its held-out accuracy at the end of that stage)"""
    from palm_ds.train.report.metrics_file import FILE, read_metrics

    ends = {}
    for record in read_metrics(folder / FILE).evaluations:
        ends[record["stage"]] = record["scores"]
    for stage, scores in ends.items():
        for task, score in scores.items():
            if score.get("accuracy") is not None:
                yield f"{OF_TASK}{task}, stage {stage}", score["accuracy"]


def finetuned(run: Run, names: Sequence[str], args: argparse.Namespace) -> dict[str, float]:
    """{set: its metric}: `best` of the suite file, or the first metric of its task"""
    import yaml

    suite = yaml.safe_load(args.suite.read_text(encoding="utf-8")) | {"only": list(names)}
    file, out = run.folder / "suite.yaml", run.folder / "suite"
    file.write_text(yaml.safe_dump(suite, sort_keys=False), encoding="utf-8")
    options = ("--deepspeed_config", args.deepspeed_config, "--out", out)
    call("suite", file, f"init_from={run.folder / 'run'}", *options)
    scores = json.loads((out / "suite.json").read_text(encoding="utf-8"))["sets"]
    settings = suite["sets"]  # of sets that need some
    return {
        name: metrics[settings.get(name, {}).get("best", next(iter(metrics)))]["median"]
        for name, record in scores.items()
        for metrics in record["tasks"].values()
    }


def run_all(runs: Sequence[Run], args: argparse.Namespace) -> None:
    budget = budget_of(runs[0].out, args)
    for number, run in enumerate(runs, 1):
        title = f"{run.body}, {run.arm}, seed {run.seed} ({number} of {len(runs)})"
        run.folder.mkdir(parents=True, exist_ok=True)
        with (run.folder / "lock").open("ab") as lock:
            if try_lock(lock.fileno()):
                print(f"== {title}: {budget:.3g} FLOPs", flush=True)
                run_one(run, budget, args)
                if args.record:
                    add_to_record(args.record, run)
            else:
                print(f"== {title}: another process has it", flush=True)


def run_one(run: Run, budget: float, args: argparse.Namespace) -> None:
    values = run.values(args.corpus, args.set)
    found: dict[str, Any] = {"flops": budget, "seconds": 0.0, "cpu_seconds": 0.0, "parts": []}
    found |= measures_of(run)
    if not 0.99 < found["flops"] / budget < 1.01:
        raise UserError(
            f"{run.measures}: of a run of {found['flops']:.3g} FLOPs, not {budget:.3g}; give the "
            "--tokens and --set of that study, or another --out and --record"
        )
    start, cpu_start = time.monotonic() - found["seconds"], cpu_seconds() - found["cpu_seconds"]

    def save() -> None:
        found["seconds"], found["cpu_seconds"] = time.monotonic() - start, cpu_seconds() - cpu_start
        write_file_atomically(run.measures, json.dumps(found, indent=1))

    if not found["parts"]:
        factor = budget / flops_of(values)
        values["stages"] = scaled(values["stages"], values["tasks"], factor)
        found[CONFIG] = Path(args.deepspeed_config).name
        try:
            train(run, values, args)
        finally:
            save()  # the time of a run that was stopped counts too
    missing = missing_parts(run, values, found, args)
    if missing and not (run.folder / "run").is_dir():
        print(f"   not measured, since the weights are elsewhere: {', '.join(missing)}")
        return
    for name, part in missing.items():
        found |= part()
        found["parts"] = list(dict.fromkeys([*found["parts"], name]))
        save()


def measures_of(run: Run) -> dict[str, Any]:
    """What is known of a run; its "parts" are empty if its training was stopped."""
    return json.loads(run.measures.read_text(encoding="utf-8")) if run.measures.is_file() else {}


def cpu_seconds() -> float:
    """Processor time so far, of this process and of those that it waited for."""
    return sum(os.times()[:4])


# ---- the record ----


def add_to_record(file: Path, run: Run) -> None:
    """Put the measures of a run into the record; those it had of this run are replaced."""
    with locked(run.out / "record.lock"):
        runs = read_record(file)
        runs[run.body, run.arm, run.seed] = json.loads(run.measures.read_text(encoding="utf-8"))
        lines = [
            json.dumps({"body": body, "arm": arm, "seed": seed, **found})
            for (body, arm, seed), found in sorted(runs.items())
        ]
        write_file_atomically(file, "".join(f"{line}\n" for line in lines))


def read_record(file: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """{(body, arm, seed): measures}; without a file, empty."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = [json.loads(line) for line in lines]
    return {(each.pop("body"), each.pop("arm"), each.pop("seed")): each for each in found}


def restore(file: Path, runs: Sequence[Run]) -> None:
    """Give the runs of the record the measures that they have there, if they have none here."""
    known = read_record(file)
    for run in runs:
        measures = known.get((run.body, run.arm, run.seed))
        if measures and not measures_of(run).get("parts"):
            run.folder.mkdir(parents=True, exist_ok=True)
            write_file_atomically(run.measures, json.dumps(measures, indent=1))


# ---- the table ----


Seeds = Mapping[int, Mapping[str, float]]
"""{seed: {measure: value}} of an arm."""
Measured = Mapping[tuple[str, str], Seeds]
"""{(body, arm): Seeds}"""


def table(runs: Sequence[Run]) -> str:
    """Markdown: the measures of every arm, and what is left of every task after each stage."""
    known: dict[tuple[str, str], dict[int, Mapping[str, float]]] = {}
    for run in runs:
        if (record := measures_of(run)).get("parts"):
            known.setdefault((run.body, run.arm), {})[run.seed] = record
    records = [record for seeds in known.values() for record in seeds.values()]
    hours, cpu_hours = (
        sum(record[key] for record in records) / 3600 for key in ("seconds", "cpu_seconds")
    )
    time_taken = f"All runs together took {hours:.1f} hours, {cpu_hours:.1f} of processor time."
    about_stages = (
        "Held-out accuracy of every task at the end of every stage, of the arms that have several "
        "(mean over the seeds):"
    )
    parts = [markdown(arm_lines(known)), time_taken]
    if len(stages := stage_lines(known)) > 1:
        parts += [about_stages, markdown(stages)]
    return "\n\n".join(parts)


def arm_lines(known: Measured) -> list[list[str]]:
    """A line for each arm and body, a column for each measure: mean ± standard deviation of the
    seeds, (n) if only n of them have it; bold where the arm differs from the reference arm."""
    hidden = {"flops", "seconds", "cpu_seconds", "parts", CONFIG}
    found = (name for seeds in known.values() for record in seeds.values() for name in record)
    names = [n for n in dict.fromkeys(found) if n not in hidden and not n.startswith(OF_TASK)]
    lines = [["body", "arm", "seeds", *names]]
    for (body, arm), seeds in known.items():
        reference = known.get((body, REFERENCE), {})
        cells = [cell(name, seeds, reference) for name in names]
        lines.append([body, arm, str(len(seeds)), *cells])
    return lines


def stage_lines(known: Measured) -> list[list[str]]:
    """A line for each task of an arm with several stages, a column for each stage."""
    scores: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for arm, seeds in known.items():
        for record in seeds.values():
            for name in record:
                if name.startswith(OF_TASK):
                    task, stage = name.removeprefix(OF_TASK).split(", ")
                    scores.setdefault((*arm, task), {}).setdefault(stage, []).append(record[name])
    several = {task: found for task, found in scores.items() if len(found) > 1}
    stages = sorted({stage for found in several.values() for stage in found})
    lines = [["body", "arm", "task", *stages]]
    for task, found in several.items():
        lines.append([*task, *(shown_mean(found.get(stage, ())) for stage in stages)])
    return lines


def shown_mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f}" if values else ""


def markdown(lines: Sequence[Sequence[str]]) -> str:
    header, *others = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *others])


def cell(name: str, seeds: Seeds, reference: Seeds) -> str:
    values = [record[name] for record in seeds.values() if name in record]
    text = shown(values) if len(values) in {0, len(seeds)} else f"{shown(values)} ({len(values)})"
    pairs = [(seeds[s], reference[s]) for s in seeds if s in reference]
    differences = [ours[name] - its[name] for ours, its in pairs if name in ours and name in its]
    return f"**{text}**" if is_difference(differences) else text


def is_difference(differences: Sequence[float]) -> bool:
    """Whether 0 lies outside of the 95 % interval of the mean (Student's t); never for one seed."""
    from scipy.stats import t

    if len(differences) < 2:
        return False
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return abs(statistics.fmean(differences)) > t.ppf(0.975, len(differences) - 1) * error


def shown(values: Sequence[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def marks(language: str) -> tuple[str, str]:
    """The lines of a page before and after the table of a language."""
    return (
        f"<!-- table of benchmarks/study.py, {language} -->",
        f"<!-- end of the table, {language} -->",
    )


def write_table(page: Path, text: str, language: str) -> None:
    first, last = marks(language)
    before, _, rest = page.read_text(encoding="utf-8").partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise SystemExit(f"{page}: no lines {first} and {last}")
    page.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}", encoding="utf-8")


def main() -> None:
    args = parse()
    if Path(args.deepspeed_config).name.startswith("cpu"):
        compute_on_cpu(args.threads)
    runs = [
        Run(arm=arm, body=body, seed=seed, out=args.out.absolute())
        for seed in args.seeds
        for body in args.bodies
        for arm in args.arms
    ]
    if args.record:
        restore(args.record, runs)
    if args.table:
        write_table(args.table, table(runs), language_of(args.corpus))
        return
    try:
        run_all(runs, args)
    except UserError as error:
        raise SystemExit(f"{error}; the same command continues the study") from None
    except KeyboardInterrupt:
        print_error("stopped; the same command continues the study")
        raise SystemExit(130) from None
    print(table(runs))


def start() -> None:
    """As the whole program."""
    stop_on_signals(signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    main()


if __name__ == "__main__":
    start()
