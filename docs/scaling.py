"""docs/scaling.md: what a run on 8 to 1,024 GPUs is predicted to take.

    python docs/generate.py

The page is made by the planner of `--plan` from the shapes below; nothing in it was measured.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence

import torch

from palm_ds.model.config.config import PRESETS, EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.runtime.device.gpu_specs import CARDS as CARDS_OF_PLANS
from palm_ds.train.plan import cluster, step_time
from palm_ds.train.plan.cluster import parse_clusters
from palm_ds.train.plan.memory import BUCKET
from palm_ds.train.plan.table import make_plan, plan_lines, table_lines
from palm_ds.train.plan.work import ModelSize, StepWork, size_of

LENGTH, ROWS, MICRO_ROWS, WORDS = 512, 8192, 64, 30_528
MEAN_LENGTH, MASKED = 300, 0.15
"""Mean length of a token's sequence, and the share of tokens that are predicted."""
CLUSTERS = "8 to 1024 x H100, 8 per host, 3200 Gb/s per host"
SLOW = "8 to 1024 x A100, 8 per host, 200 Gb/s per host"
CARDS = ("A10", "A100", "H100", "H200", "B200", "MI300X")


def model_of(preset: str) -> ModelSize:
    """The size of a preset with a masked-LM head, without its weights."""
    config = EncoderConfig.from_dict({**PRESETS[preset], "vocab_size": WORDS})
    with torch.device("meta"):
        backbone = build_encoder(config)
        return size_of(Model(backbone, {"words": MaskedLMHead(backbone)}, {"words": "words"}))


def work() -> StepWork:
    """A step of 4 million tokens in full rows."""
    tokens = float(ROWS * LENGTH)
    return StepWork(
        rows=ROWS,
        length=LENGTH,
        tokens=tokens,
        squares=tokens * MEAN_LENGTH,
        labels=tokens * MASKED,
    )


def ds_config(stage: int, gpus: int = 1, **palm: bool) -> DSConfig:
    rows = min(MICRO_ROWS, ROWS // gpus)
    zero = {"stage": stage, "overlap_comm": True}
    values = {"train_micro_batch_size_per_gpu": rows, "bf16": {"enabled": True}}
    return make_ds_config({**values, "zero_optimization": zero, "palm_ds": palm})


def parts() -> Iterator[str]:
    yield "# Many GPUs: predictions"
    yield (
        "**Nothing on this page was measured.** It is what `--plan` predicts, made by "
        "`python docs/generate.py`. Use it to choose a ZeRO stage, a micro-batch and a network, "
        "not to compare programs; the first minutes of a run are more reliable."
    )
    yield (
        "For your own recipe, on any machine (it trains nothing and needs no GPU):\n\n"
        "```\npalm-ds pretrain mine.yaml --deepspeed_config zero1_bf16.json "
        '--plan "8 to 64 x H100, 400 Gb/s, 35 %"\n```'
    )
    yield (
        "`8 per host` is the default, `400 Gb/s` is the network of a host (or `per GPU`), `35 %` "
        "the share of peak that matrix products reach. Cards: "
        f"{', '.join(card.name for card in CARDS_OF_PLANS)}."
    )
    yield (
        "It prints two tables: the memory and time of the largest step, as below; and the steps, "
        "tokens (without padding), FLOPs and hours of every stage and of the whole run. The second "
        "follows from some rows of one step per stage (with `mix: step`, per task group)."
    )
    yield "## What is assumed"
    yield assumptions()
    for preset, stage in (
        ("ernie-2.0-base", 1),
        ("ernie-2.0-large", 1),
        ("ernie-2.0-large", 2),
        ("ernie-2.0-large", 3),
    ):
        yield f"## {preset}, ZeRO {stage}, H100"
        yield from table(preset, stage, CLUSTERS)
    yield "## ernie-2.0-large, ZeRO 1, A100 with one slow network"
    yield from table("ernie-2.0-large", 1, SLOW)
    yield "## One GPU, by card"
    yield "ernie-2.0-large, ZeRO 1, one GPU, 64 rows per step in one micro-batch."
    yield by_card()


def assumptions() -> str:
    points = (
        f"A step has {ROWS * LENGTH:,} tokens: {ROWS:,} packed rows of {LENGTH}, micro-batches of "
        f"up to {MICRO_ROWS} rows, {MASKED:.0%} of the tokens masked, sequences of {MEAN_LENGTH} "
        "tokens.",
        f"Matrix products reach {cluster.EFFICIENCY:.0%} of the card's peak "
        "([the cards](speed.md#cards)). Others report 25 % (ModernBERT-base) to 50 % (MLPerf's "
        "BERT-large) of the peak of an H100; palm_ds with base reached 38 % on an H200 "
        "([measured](speed.md#measured)). Small micro-batches reach less.",
        f"Networks and memories reach {step_time.LINK_SHARE:.0%} of their bandwidth; a collective "
        f"takes {1e6 * step_time.LATENCY:.0f} us more for each doubling of the GPUs; communication "
        f"hides behind {step_time.HIDDEN:.0%} of the backward pass it goes with.",
        f"DeepSpeed's buckets have their default size, {BUCKET:,} values, two of them with "
        "`overlap_comm`, whatever the size of the model: lower `reduce_bucket_size` where memory "
        "is short (the shipped files for ZeRO 1 and 2 have 50,000,000).",
        "Attention stores no scores (FlashAttention), the vocabulary's logits exist one chunk at a "
        "time, dropout stores a byte per value. Fragmentation, CUDA and NCCL take 1 to 2 GB more.",
        "Data, evaluation, checkpoints and slow hosts take no time.",
    )
    tested = (
        "The formulas are in `palm_ds/train/plan/`. What a CPU can count is tested: the tensors "
        "kept for a backward pass (to 10 %), and what two DeepSpeed processes hold under every "
        "ZeRO stage (to 3 %)."
    )
    return "\n".join(map(_point, points)) + "\n\n" + tested


def _point(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  ")


def table(preset: str, stage: int, clusters: str) -> Iterator[str]:
    """The lines of a plan, with the largest micro-batch that divides the rows of each cluster."""
    model, several = model_of(preset), parse_clusters(clusters)
    about = plan_lines(model, work(), ds_config(stage), several)[:2]
    yield about[0][0].upper() + about[0][1:] + ". " + about[1] + "."
    plans = [make_plan(model, work(), ds_config(stage, each.gpus), each) for each in several]
    yield "\n".join(table_lines([plan.cells() for plan in plans]))


def by_card() -> str:
    step = dataclasses.replace(work(), rows=64, tokens=64.0 * LENGTH)
    step = dataclasses.replace(step, squares=step.tokens * MEAN_LENGTH, labels=step.tokens * MASKED)
    rows = [
        "| card | bf16 peak, TFLOP/s | memory, GB | tokens/s | with recomputation, GB | tokens/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    model = model_of("ernie-2.0-large")
    for name in CARDS:
        [one] = parse_clusters(f"1 x {name}")
        plain = make_plan(model, step, ds_config(1), one)
        again = make_plan(model, step, ds_config(1, activation_checkpointing=True), one)
        cells: Sequence[str] = (
            name,
            f"{one.card.bf16:,g}",
            f"{plain.memory.total / 1e9:.1f} of {one.card.memory:g}",
            f"{plain.tokens_per_second:,.0f}",
            f"{again.memory.total / 1e9:.1f}",
            f"{again.tokens_per_second:,.0f}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
