"""transformers.Trainer on the same work, with its best settings: bf16, SDPA (FlashAttention inside
torch), fused AdamW, pinned batches from workers, and torch.compile where shapes stay the same."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts.context import Context, Row, synchronize
from benchmarks.gpu_parts.measure import rate_row, with_room
from benchmarks.gpu_parts.models import CLIP, FIRST, LEARNING_RATE, MASKED, SHAPES, WORDS, Setup
from benchmarks.gpu_parts.speed import setup_of
from palm_ds.runtime.device.memory import take_memory_use

CASES = (
    ("base", 512, True, True),
    ("base", 128, True, True),
    ("modernbert-base", 1024, True, True),
    ("modernbert-base", 8192, True, True),
    ("base", 512, False, False),
    ("base", 128, False, False),
    ("large", 512, True, True),
    ("base", 512, True, False),
)
"""(shape, length, rows without padding, torch.compile), the most important first."""


def missing() -> str | None:
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


@contextmanager
def outside_a_run() -> Iterator[None]:
    """Hides the rank that an engine of this process has set: Trainer would join a run."""
    rank = os.environ.pop("LOCAL_RANK", None)
    yield
    if rank is not None:
        os.environ["LOCAL_RANK"] = rank


def pretraining(context: Context) -> None:
    """Masked words with BERT's and ModernBERT's models: full rows (no padding, so its best case),
    and examples of varied length padded to the longest of a batch."""
    if reason := missing():
        context.add(skipped=reason)
        return
    for shape, length, filled, compiled in CASES[:2] if context.toy else CASES:
        setup = setup_of(context, shape=shape, length=length)
        setup = setup.changed(rows=max(setup.rows // 2, 1))  # it keeps every logit
        context.measure(
            lambda s=setup, f=filled, c=compiled: with_room(
                lambda now: _pretrained(now, context, filled=f, compiled=c), s
            ),
            needs=15,
            shape=shape,
            length=setup.length,
            examples="full rows" if filled else "varied, padded",
            compiled=compiled and not context.toy,
        )


@outside_a_run()
def _pretrained(setup: Setup, context: Context, *, filled: bool, compiled: bool) -> Row:
    from transformers import AutoModelForMaskedLM

    torch.compiler.reset()  # another shape would be compiled for shapes that vary
    torch.manual_seed(1)
    config = (
        modernbert_config(setup)
        if setup.modern
        else bert_config(setup.shape, setup.length, setup.dropout)
    )
    model = AutoModelForMaskedLM.from_config(config)
    examples = MaskedExamples(setup, filled=filled)
    warm, steps = (2, 2) if context.toy else (6, 24)
    clock = Clock(warm, context.device)
    trainer = make_trainer(
        model,
        examples,
        context,
        clock,
        collate=examples.collate,
        per_device_train_batch_size=setup.rows,
        max_steps=warm + steps,
        learning_rate=LEARNING_RATE,
        weight_decay=0.01,
        torch_compile=compiled and not context.toy,
    )
    trainer.train()
    tokens = examples.tokens_per_row * setup.rows * steps
    flops = setup.flops(setup.batches(1)[0]) / (setup.rows * setup.length)
    found = rate_row(tokens / clock.seconds, flops, context.precision, context)
    if used := take_memory_use(context.device):
        found["memory_gb"] = round(used.allocated / 1e9, 2)
    return found


def modernbert_config(setup: Setup) -> Any:
    from transformers import ModernBertConfig

    width, layers, heads = SHAPES[setup.shape]
    settings: dict[str, Any] = {"attn_implementation": "sdpa", "pad_token_id": 0}
    return ModernBertConfig(
        vocab_size=setup.words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=setup.config.feed_forward_size,
        **settings,
    )


def bert_config(shape: str, length: int, dropout: float, **more: Any) -> Any:
    from transformers import BertConfig

    width, layers, heads = SHAPES[shape]
    settings: dict[str, Any] = {"attn_implementation": "sdpa", **more}
    return BertConfig(
        vocab_size=WORDS,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **settings,
    )


def make_trainer(
    model: Any, dataset: Any, context: Context, clock: Any, *, collate: Any, **settings: Any
) -> Any:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    on_gpu = context.device.type == "cuda"
    arguments = TrainingArguments(
        output_dir=str(context.results.parent / "trainer"),
        bf16=on_gpu and context.precision == "bf16",
        fp16=on_gpu and context.precision == "fp16",
        use_cpu=not on_gpu,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        max_grad_norm=CLIP,
        dataloader_num_workers=4 if on_gpu else 0,
        dataloader_pin_memory=on_gpu,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **settings,
    )
    made = Trainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=collate,
        callbacks=[clock.callback] if clock else [],
    )
    made.remove_callback(PrinterCallback)
    return made


class MaskedExamples(torch.utils.data.Dataset):
    """Random examples, and a collator that masks whole batches."""

    def __init__(self, setup: Setup, *, filled: bool):
        rng = np.random.default_rng(0)
        lengths = np.full(512, setup.length)
        if not filled:
            lengths = rng.integers(max(setup.length // 8, 4), setup.length + 1, 512)
        self.rows = [rng.integers(FIRST, min(setup.words, WORDS), n) for n in lengths]
        self.filled, self.tokens_per_row = filled, float(lengths.mean())

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> np.ndarray:
        return self.rows[number % len(self.rows)]

    def collate(self, rows: list[np.ndarray]) -> Mapping[str, torch.Tensor]:
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.from_numpy(row)
        masked = (torch.rand(ids.shape) < MASKED) & (ids > 0)
        batch = {"input_ids": ids.masked_fill(masked, 4), "labels": ids.masked_fill(~masked, -100)}
        return batch if self.filled else batch | {"attention_mask": (ids > 0).long()}


class Clock:
    """Times the Trainer's steps after the first few."""

    def __init__(self, warm: int, device: torch.device):
        from transformers import TrainerCallback

        clock = self
        self.begun = self.ended = 0.0

        class Callback(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == warm:
                    synchronize(device)
                    clock.begun = time.perf_counter()
                if state.global_step == state.max_steps:
                    synchronize(device)
                    clock.ended = time.perf_counter()

        self.callback = Callback()

    @property
    def seconds(self) -> float:
        return self.ended - self.begun
