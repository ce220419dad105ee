"""Real tokens per second of training: palm_ds and transformers.Trainer on the same examples.

    python benchmarks/pretrain_vs_transformers.py                        the English text in CPython
    python benchmarks/pretrain_vs_transformers.py --input CORPUS --shape base
    python benchmarks/pretrain_vs_transformers.py --contenders palm_ds ds_configs/cpu.json
    python benchmarks/pretrain_vs_transformers.py --body modernbert

The examples are runs of whole sentences of a document, of varied length, as sentence-level tasks
make them. Both learn masked words, 15 % of the tokens, with the same shape of BERT or ModernBERT,
AdamW, clipping, dropout 0.1 and fp32, one process, about the same number of real tokens a step. A
real token is one that is no padding. palm_ds packs its rows (the real stream, masking included);
transformers gets its own masking collator and dynamic padding. Each contender's training time
includes making its batches. Runs are interleaved, each begins with steps that do not count, and the
medians over the rounds are compared. On a machine that does other things too, `--clock cpu` counts
the seconds that the process computes.

A contender that is a file of ds_configs/ is palm_ds on its DeepSpeed engine; `palm_ds` alone is
a plain torch loop over the same model and stream.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHAPES = {"small": (256, 4, 4), "base": (768, 12, 12)}  # width, layers, heads
WORDS = 30_522
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
RATE, DROPOUT, LEARNING_RATE, CLIP = 0.15, 0.1, 1e-4, 1.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", default="embedded", help="a prepared corpus, text to prepare one from, embedded"
    )
    parser.add_argument("--shape", choices=_SHAPES, default="small")
    parser.add_argument("--body", choices=("bert", "modernbert"), default="bert")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--tokens", type=int, default=4096, help="approximate tokens per step")
    parser.add_argument("--steps", type=int, default=12, help="that count, in a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cut",
        choices=("varied", "full"),
        default="varied",
        help="runs of sentences up to a length drawn for each, or up to the row's",
    )
    parser.add_argument("--contenders", nargs="+", default=["palm_ds", "transformers"])
    return parser.parse_args(arguments)


ARGUMENTS = parse() if __name__ == "__main__" else None
if ARGUMENTS is not None:  # before torch reads them
    os.environ["OMP_NUM_THREADS"] = str(ARGUMENTS.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from palm_ds.common.rng import derive_key, keyed_uniform  # noqa: E402
from palm_ds.corpus.store import Corpus, open_corpus  # noqa: E402
from palm_ds.data.sources.corpus import CorpusSource, split_corpus  # noqa: E402
from palm_ds.data.stream.curriculum_spec import read_stages  # noqa: E402
from palm_ds.data.stream.packed_stream import PackedStream  # noqa: E402
from palm_ds.data.stream.stages import StepSize  # noqa: E402
from palm_ds.data.stream.task_group_dataset import make_datasets  # noqa: E402
from palm_ds.data.tasks.example import (  # noqa: E402
    Example,
    build_input,
    layouts,  # noqa: E402
)
from palm_ds.model.config.config import EncoderConfig  # noqa: E402
from palm_ds.model.encoder.encoder import build_encoder  # noqa: E402
from palm_ds.model.heads.heads import MaskedLMHead  # noqa: E402
from palm_ds.model.kernels import choose_kernels  # noqa: E402
from palm_ds.model.multi_task_model import Model  # noqa: E402
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking  # noqa: E402
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig  # noqa: E402
from palm_ds.runtime.optimizer.param_groups import param_groups  # noqa: E402

Measured = tuple[int, float]  # real tokens, seconds
Contender = Callable[[], Measured]


# ---- the examples ----


def open_input(name: str, folder: Path) -> Corpus:
    """A prepared corpus, or one prepared now."""
    if (Path(name) / "manifest.json").is_file():
        return open_corpus(name)
    from palm_ds.corpus.options import TextOptions
    from palm_ds.corpus.prepare import PrepareOptions, prepare

    text = TextOptions(language="en", lower=True)
    prepare(folder, [name], PrepareOptions(text=text, train="wordpiece", vocab_size=WORDS))
    return open_corpus(folder)


def sentence_runs(source: CorpusSource, max_length: int, cut: str) -> np.ndarray:
    """(runs, 2) [start, end): consecutive whole sentences of a document, as many as fit the length
    drawn for the run (`varied`: from an eighth of the room to all of it) or the room (`full`).
    A sentence longer than that is a run of its own, cut at the room."""
    offsets, runs = np.asarray(source.corpus.sentence_starts), []
    num_uniforms = iter(keyed_uniform(derive_key("runs", cut), np.arange(len(offsets)), 1)[:, 0])
    for first, last in zip(source.first_sentences, source.last_sentences, strict=True):
        while first < last:
            share = next(num_uniforms) * 7 / 8 + 1 / 8 if cut == "varied" else 1.0
            start, most = offsets[first], int((max_length - 2) * share)
            after = np.searchsorted(offsets, start + most, side="right") - 1
            after = min(max(int(after), int(first) + 1), int(last))
            runs.append((start, min(offsets[after], start + max_length - 2)))
            first = after
    return np.array(runs, np.int64)


@dataclass(frozen=True, kw_only=True)
class SentenceRuns(KnowledgeMasking):
    """Masked words in runs of whole sentences."""

    cut: str = "varied"

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        return sentence_runs(source, max_length, self.cut)

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        """[CLS] run [SEP], and never longer: the other contender gets the same examples."""
        return layouts(items[:, 1] - items[:, 0] + 2, start=items[:, 0], end=items[:, 1])

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        return build_input([source.read(layout["start"], layout["end"])], source.vocabulary)


def open_stream(source: CorpusSource, length: int, tokens: int, cut: str) -> PackedStream:
    task = SentenceRuns(name="words", source="text", units=("token",), rate=RATE, cut=cut)
    curriculum = read_stages([{"words": 1_000_000}], ["words"])
    datasets, mixtures = make_datasets(
        curriculum.task_groups,
        {"words": task},
        {"words": 0},
        {"text": [("text", source, 1.0)]},
        seed=1,
        length=length,
    )
    return PackedStream(
        curriculum=curriculum,
        datasets=datasets,
        mixtures=[mixtures],
        sizes=[StepSize(length, max(tokens // length, 1))],
        seed=1,
        pad=source.vocabulary.pad,
    )


# ---- palm_ds ----


def build_model(args: argparse.Namespace, length: int) -> Model:
    width, layers, heads = _SHAPES[args.shape]
    modern = args.body == "modernbert"
    config = EncoderConfig.from_dict(
        {
            "kind": args.body,
            "vocab_size": WORDS,
            "hidden_size": width,
            "num_layers": layers,
            "num_heads": heads,
            "intermediate_size": width * 3 // 2 if modern else 4 * width,
            "max_positions": length,
            "token_types": 1 if modern else 2,
            "task_types": 0,
            "dropout": DROPOUT,
            "attention_dropout": DROPOUT,
        }
    )
    kernels, _ = choose_kernels({}, device="cpu", dtype=torch.float32, config=config)
    torch.manual_seed(1)
    backbone = build_encoder(config, kernels)
    return Model(backbone, {"words": MaskedLMHead(backbone)}, {"words": "words"})


def plain_loop(stream: PackedStream, args: argparse.Namespace) -> Contender:
    """palm_ds's model and stream in a plain torch loop."""
    model = build_model(args, stream.longest).train()
    groups = param_groups(model, weight_decay=0.01)
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def step(number: int) -> int:
        [batch] = stream.batches(number, 0, 1, stream.rows)
        loss = model(batch)["words"].loss_sum / len(batch.labels["words"][0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return batch.real_tokens

    return timed_steps(step, args)


def engine_loop(file: str, stream: PackedStream, args: argparse.Namespace) -> Contender:
    """palm_ds on its engine."""
    from palm_ds.engine import Engine
    from palm_ds.runtime.deepspeed.ds_config import read_ds_config

    engine = Engine(
        build_model(args, stream.longest),
        ds_config=read_ds_config(file),
        optimizer=OptimizerConfig(lr=LEARNING_RATE, clip=CLIP),
        rows=stream.rows,
        seed=1,
    )

    def step(number: int) -> int:
        batches = stream.batches(number, engine.rank, engine.world, engine.micro_rows)
        return engine.step(batches, LEARNING_RATE, number).tokens

    return timed_steps(step, args)


def timed_steps(step: Callable[[int], int], args: argparse.Namespace) -> Contender:
    """Rounds of a step function that returns its real tokens; the steps are numbered on."""
    done = 0

    def run() -> Measured:
        nonlocal done
        for _ in range(args.warmup):
            step(done)
            done += 1
        tokens, began = 0, CLOCKS[args.clock]()
        for _ in range(args.steps):
            tokens += step(done)
            done += 1
        return tokens, CLOCKS[args.clock]() - began

    return run


# ---- transformers ----


def trainer_loop(stream: PackedStream, corpus: Corpus, folder: Path, args: Any) -> Contender:
    """transformers.Trainer over the same examples, unpacked."""
    from transformers import AutoTokenizer, PrinterCallback, Trainer, TrainingArguments
    from transformers import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    corpus.tokenizer().save(folder / "tokenizer")
    dataset = [{"input_ids": ids} for ids in all_examples(stream)]
    clock = Clock(
        AutoTokenizer.from_pretrained(folder / "tokenizer"), args.warmup, CLOCKS[args.clock]
    )
    model = transformers_model(args, stream.longest)
    mean = sum(len(row["input_ids"]) for row in dataset) / len(dataset)
    settings = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=args.warmup + args.steps,
        per_device_train_batch_size=max(round(stream.rows * stream.longest / mean), 1),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

    def run() -> Measured:
        clock.reset()
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=dataset,  # type: ignore[arg-type]
            data_collator=clock.collate,
            callbacks=[clock.callback],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return clock.read()

    return run


def transformers_model(args: argparse.Namespace, length: int) -> Any:
    """Its masked-LM class of this body, of the same sizes."""
    import transformers

    made: Any = transformers  # its configurations take more than they declare
    width, layers, heads = _SHAPES[args.shape]
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
    }
    if args.body == "bert":
        rates = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
        config = made.BertConfig(**sizes, **rates, intermediate_size=4 * width)
        return made.BertForMaskedLM(config)
    rates = {f"{part}_dropout": DROPOUT for part in ("embedding", "attention", "mlp")}
    ids = dict.fromkeys(("pad", "bos", "eos", "cls", "sep"), 0)
    config = made.ModernBertConfig(
        **sizes,
        **rates,
        **{f"{name}_token_id": number for name, number in ids.items()},
        intermediate_size=width * 3 // 2,
    )
    return made.ModernBertForMaskedLM(config)


def all_examples(stream: PackedStream) -> list[list[int]]:
    """The ids of every example of an epoch, before masking."""
    [dataset] = stream.datasets
    vocabulary, rng = dataset.source.vocabulary, np.random.default_rng(0)
    task: Any = dataset.tasks[0]
    made = [
        task.example(layout, dataset.order.source_of(n), rng).input_ids.tolist()
        for n, layout in enumerate(dataset.layouts(np.arange(dataset.num_items)))
    ]
    assert all(ids[0] == vocabulary.cls and ids[-1] == vocabulary.sep for ids in made)
    return made


class Clock:
    """Counts the real tokens of the Trainer's batches and times its steps after the first few."""

    def __init__(self, tokenizer: Any, warmup: int, now: Callable[[], float]):
        from transformers import DataCollatorForLanguageModeling, TrainerCallback

        self._make = DataCollatorForLanguageModeling(tokenizer, mlm_probability=RATE)
        self._warmup = warmup
        clock = self

        class Callback(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                clock.ends.append(now())

        self.callback = Callback()
        self.reset()

    def reset(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[float] = []

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        batch = self._make(rows)
        self.tokens.append(int(batch["attention_mask"].sum()))
        return batch

    def read(self) -> Measured:
        steps = len(self.ends)
        tokens = sum(self.tokens[self._warmup : steps])
        return tokens, self.ends[-1] - self.ends[self._warmup - 1]


# ---- the comparison ----


def compare(corpus: Corpus, length: int, folder: Path, args: argparse.Namespace) -> None:
    source, _ = split_corpus(corpus, 0.0, [])
    stream = open_stream(source, length, args.tokens, args.cut)
    contenders = {name: contender(name, stream, corpus, folder, args) for name in args.contenders}
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(args.rounds):
        order = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
        for name in order:
            tokens, seconds = contenders[name]()
            speeds[name].append(tokens / seconds)
    show(speeds, stream, args)


def contender(
    name: str, stream: PackedStream, corpus: Corpus, folder: Path, args: argparse.Namespace
) -> Contender:
    if name == "palm_ds":
        return plain_loop(stream, args)
    if name == "transformers":
        return trainer_loop(stream, corpus, folder, args)
    return engine_loop(name, stream, args)


def show(speeds: dict[str, list[float]], stream: PackedStream, args: argparse.Namespace) -> None:
    [dataset] = stream.datasets
    sizes = dataset.layouts(np.arange(dataset.num_items))["length"]
    quartiles = ", ".join(str(int(q)) for q in np.quantile(sizes, [0.25, 0.5, 0.75]))
    rows = [stream.batches(step, 0, 1, stream.rows)[0] for step in range(8)]
    full = sum(b.real_tokens for b in rows) / sum(b.input_ids.numel() for b in rows)
    print(
        f"\n{args.body}, {args.shape}, length {stream.longest}, {args.threads} threads, "
        f"{args.clock} time, {args.tokens} tokens a"
    )
    print(f"a step; {len(sizes)} examples, quartiles of their lengths {quartiles};", end=" ")
    print(f"packed rows {full:.1%} full")
    for name, values in speeds.items():
        middle = statistics.median(values)
        print(f"  {name:24} {middle:9.0f} tokens/s   ({min(values):.0f} to {max(values):.0f})")
    first, *others = speeds
    for other in others:
        ratios = [a / b for a, b in zip(speeds[first], speeds[other], strict=True)]
        print(
            f"  {first} / {other}: {statistics.median(ratios):.2f} times   "
            f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds)",
            flush=True,
        )


def main(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise SystemExit("transformers.Trainer needs accelerate: pip install -e '.[dev]'")
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as name:
        corpus = open_input(args.input, Path(name) / "corpus")
        for length in args.lengths:
            compare(corpus, length, Path(name), args)


if __name__ == "__main__":
    assert ARGUMENTS is not None
    main(ARGUMENTS)
