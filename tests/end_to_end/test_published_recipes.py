"""The recipes in phases: every step's rate, masks and rows, computed here from the tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from palm_ds.data.stream.budgets import MixRatio
from palm_ds.model.encoder.encoder import encoder_class, has_windows
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking
from palm_ds.pretrain.replaced_token_detection import ReplacedTokenDetection
from palm_ds.tasks.tagging import Tagging
from palm_ds.train.recipe.recipe import Recipe, make_recipe, read_recipe, read_values

B = 10**9


@dataclass(frozen=True)
class Phase:
    """A phase in the authors' terms, in tokens."""

    tokens: int
    length: int
    rows: tuple[int, ...]
    """Sizes of a step, the last for good."""
    peak: float
    masks: tuple[float, float]
    warmup: int = 0
    growth: int = 0
    decay: int = 0
    end: float = 1.0
    base: float | None = None
    shape: str = "1-sqrt"
    weight_decay: float | None = None
    """What is not the recipe's."""


MODERNBERT = (
    Phase(1719 * B, 1024, tuple(range(768, 4609, 768)), 8e-4, (0.3, 0.3), 3 * B, 50 * B, base=1e4),
    Phase(250 * B, 8192, (576,), 3e-4, (0.3, 0.3)),
    Phase(50 * B, 8192, (576,), 3e-4, (0.3, 0.3), decay=50 * B, end=0.001),
)
ETTIN_17M = (
    Phase(1700 * B, 1024, tuple(range(768, 4609, 768)), 3e-3, (0.3, 0.3), 4 * B, 125 * B, base=1e4),
    Phase(250 * B, 7999, (576,), 3e-3, (0.3, 0.3), decay=250 * B, end=0.5),
    Phase(50 * B, 7999, (576,), 1.5e-3, (0.15, 0.15), decay=50 * B, end=0.04),
)
MMBERT_SMALL = (
    Phase(
        *(2000 * B, 1024, tuple(range(384, 4609, 384)), 8e-4, (0.3, 0.3), 4 * B, 100 * B),
        base=1e4,
    ),
    Phase(600 * B, 8192, (4608,), 4e-4, (0.15, 0.15), weight_decay=4e-5),
    Phase(
        *(100 * B, 8192, (4608,), 4e-4, (0.05, 0.05)),
        decay=100 * B,
        end=0.04,
        shape="linear",
        weight_decay=4e-5,
    ),
)
EUROBERT_210M = (
    Phase(4800 * B, 2048, (2048,), 1e-4, (0.5, 0.5), 48 * B, base=1e4),
    Phase(200 * B, 8192, (512,), 1e-4, (0.1, 0.1), decay=200 * B, end=0.0, shape="linear"),
)
OURS = (
    Phase(2_000_000, 64, (32, 64, 96, 128), 4e-3, (0.3, 0.3), 200_000, 600_000, base=1e4),
    Phase(3 * 123 * 8192, 128, (64,), 4e-3, (0.3, 0.15)),
    Phase((49 + 2 * 37) * 8192, 128, (64,), 4e-3, (0.15, 0.15), decay=1_000_000, end=0.02),
)
"""Without a size of its own, a stage rounds the steps of each task group up."""


def sizes(phase: Phase) -> list[int]:
    """Rows of every step: each size s before the last one lasts growth * s / sum(these sizes)
    tokens (src/sequence_packer.py of AnswerDotAI/ModernBERT, BatchSizeWarmupScheduler)."""
    rows, left = [], phase.tokens
    for size in (growing := phase.rows[:-1]):
        steps = round(phase.growth * size / sum(growing) / (size * phase.length))
        rows += [size] * steps
        left -= steps * size * phase.length
    return rows + [phase.rows[-1]] * math.ceil(left / (phase.rows[-1] * phase.length))


def check(recipe: Recipe, phases: tuple[Phase, ...], every: int) -> None:
    assert len(recipe.curriculum.stages) == len(phases)
    for stage, phase in zip(recipe.curriculum.stages, phases, strict=True):
        rows = sizes(phase)
        assert stage.steps == len(rows)
        number = recipe.curriculum.stage_at(stage.first)
        size = recipe.stage_plan.sizes[number]
        assert size.length == phase.length
        own = recipe.stage_plan.settings[number]
        assert (own.rope_base, own.weight_decay) == (phase.base, phase.weight_decay)
        warm = next((n for n, s in enumerate(cumulated(rows, phase)) if s >= phase.warmup), 0)
        decay = math.ceil(phase.decay / (rows[-1] * phase.length))
        for k in range(0, stage.steps, every):
            at = recipe.curriculum.at(stage.first + k, recipe.seed)
            assert size.rows_at(k) == rows[k]
            factor = 1.0
            if k + 1 <= warm:
                factor = (k + 1) / warm
            elif k >= stage.steps - decay:
                t = (k - (stage.steps - decay)) / decay
                fallen = t if phase.shape == "linear" else math.sqrt(t)
                factor = phase.end + (1 - phase.end) * (1 - fallen)
            lr = recipe.optimizer.lr * recipe.lr_scale(at)
            assert lr == pytest.approx(phase.peak * factor, rel=1e-9), (number, k)
            low, high = phase.masks
            masks = low + (high - low) * k / max(stage.steps - 1, 1)
            assert recipe.stage_plan.mask_rates.at(stage.first + k) == pytest.approx(
                masks, rel=1e-9
            )


def cumulated(rows: list[int], phase: Phase) -> list[int]:
    """Tokens before each step."""
    found, total = [], 0
    for size in rows:
        found.append(total)
        total += size * phase.length
    return found


@pytest.mark.parametrize(
    ("name", "phases", "every"),
    [
        ("modernbert_base", MODERNBERT, 97),
        ("ettin_17m", ETTIN_17M, 97),
        ("mmbert_small", MMBERT_SMALL, 397),
        ("eurobert_210m", EUROBERT_210M, 997),
        ("modern_phases", OURS, 1),
    ],
)
def test_every_step_is_that_of_the_published_phases(
    root: Path, name: str, phases: tuple[Phase, ...], every: int
) -> None:
    check(read_recipe(root / f"launch/recipes/{name}.yaml"), phases, every)


@pytest.mark.parametrize(
    ("name", "kind", "numbers", "base"),
    [
        ("modernbert_base", "stable_adamw", (8e-4, (0.9, 0.98), 1e-6, 1e-5, 0), 160_000),
        ("ettin_17m", "stable_adamw", (3e-3, (0.9, 0.98), 1e-6, 3e-4, 0), 160_000),
        ("mmbert_small", "stable_adamw", (8e-4, (0.9, 0.95), 1e-8, 8e-5, 0), 160_000),
        ("neobert", "adamw", (1e-4, (0.9, 0.95), 1e-8, 0.01, 1), 10_000),
        ("eurobert_210m", "adamw", (1e-4, (0.9, 0.95), 1e-5, 0.1, 1), 250_000),
        ("cramming", "adamw", (1e-3, (0.9, 0.98), 1e-12, 0.01, 0.5), 10_000),
    ],
)
def test_their_optimizers_and_encoders(
    root: Path, name: str, kind: str, numbers: tuple[object, ...], base: float
) -> None:
    recipe = read_recipe(root / f"launch/recipes/{name}.yaml")
    own = recipe.optimizer
    assert own.kind == kind
    assert (own.lr, tuple(own.betas), own.eps, own.weight_decay, own.clip) == numbers
    config = recipe.backbone_config
    assert encoder_class(config).rope_base(config) == base
    assert config.dropout == 0


def test_mmberts_languages(root: Path) -> None:
    """More of them in each phase, rare ones more and more often; local layers change their base."""
    recipe = read_recipe(root / "launch/recipes/mmbert_small.yaml")
    settings = recipe.stage_plan.settings
    assert [own.sampling_exponent for own in settings] == [0.7, 0.5, 0.3]
    read = [set((own.mixture or {"text": recipe.sources["text"].mix})["text"]) for own in settings]
    assert read[0] < read[1] < read[2]
    assert [own.local_rope_base for own in settings] == [1e4, None, None]
    config = recipe.backbone_config
    assert encoder_class(config).rope_base(config, local=True) == 160_000


def test_neobert_as_published(root: Path) -> None:
    recipe = read_recipe(root / "launch/recipes/neobert.yaml")
    sizes = [(size.length, size.rows_at(0)) for size in recipe.stage_plan.sizes]
    assert sizes == [(1024, 2048), (1024, 2048), (4096, 512)]
    assert recipe.curriculum.steps == 1_050_000
    for step in range(0, recipe.curriculum.steps, 997):
        turned = min(max(step - 2000, 0) / 898_000, 1)
        wanted = min((step + 1) / 2000, 0.1 + 0.9 * (1 + math.cos(math.pi * turned)) / 2)
        at = recipe.curriculum.at(step, recipe.seed)
        assert recipe.lr_scale(at) == pytest.approx(wanted, rel=1e-6), step
    task = recipe.built_tasks["knowledge_masking"]
    assert isinstance(task, KnowledgeMasking)
    assert (task.rate, task.mask_rate, task.random_rate) == (0.2, 1.0, 0.0)


def test_cramming_as_published(root: Path) -> None:
    """A triangle from a quarter of the rate, and a batch that grows in 60 % of the budget."""
    recipe = read_recipe(root / "launch/recipes/cramming.yaml")
    steps, (size,) = recipe.curriculum.steps, recipe.stage_plan.sizes
    for step in range(0, steps, 97):
        done = (step + 0.5) / steps
        wanted = min(0.25 + done * 0.75 / 0.75, (1 - done) / 0.25)
        at = recipe.curriculum.at(step, recipe.seed)
        assert recipe.lr_scale(at) == pytest.approx(wanted, abs=1e-3), step
    assert (size.rows_at(0), size.rows_at(steps)) == (128, 8192)
    rows = [size.rows_at(step) for step in range(steps)]
    grown = sum(rows[: rows.index(8192)]) / sum(rows)
    assert grown == pytest.approx(0.6, abs=0.02)
    masks = recipe.built_tasks["knowledge_masking"]
    assert isinstance(masks, KnowledgeMasking)
    assert (masks.rate, masks.mask_rate, masks.random_rate) == (0.25, 0.8, 0.1)
    config = recipe.backbone_config
    sizes = config.num_layers, config.hidden_size, config.num_heads, config.feed_forward_size
    assert (*sizes, config.vocab_size) == (16, 768, 12, 1536, 32768)
    assert not has_windows(config)


@dataclass(frozen=True)
class Detection:
    """A recipe with a generator, in the authors' terms."""

    steps: int
    rows: tuple[int, int]
    """Their number and their length."""
    lr: float
    warmup: int
    rate: float
    shown: float
    """Share of the masked tokens that the generator sees as [MASK]."""
    generator: tuple[int, int, int, int]
    """Layers, hidden size, inner size, attention heads."""
    sharing: str
    weight: float


ELECTRA_SMALL = Detection(
    10**6, (128, 128), 5e-4, 10_000, 0.15, 0.85, (12, 64, 256, 1), "shared", 50.0
)
DEBERTA_V3_SMALL = Detection(
    *(10**6, (256, 512), 1e-4, 10_000, 0.15, 1.0),
    *((3, 768, 3072, 12), "gradient_disentangled", 10.0),
)


@pytest.mark.parametrize(
    ("name", "theirs", "layers"),
    [("electra_small", ELECTRA_SMALL, 12), ("deberta_v3_small", DEBERTA_V3_SMALL, 6)],
)
def test_replaced_tokens_as_published(
    root: Path, name: str, theirs: Detection, layers: int
) -> None:
    recipe = read_recipe(root / f"launch/recipes/{name}.yaml")
    assert recipe.curriculum.steps == theirs.steps
    assert (recipe.rows, recipe.length) == theirs.rows
    optimizer = recipe.optimizer
    assert (optimizer.kind, optimizer.weight_decay, optimizer.clip) == ("adamw", 0.01, 1.0)
    assert (tuple(optimizer.betas), optimizer.eps) == ((0.9, 0.999), 1e-6)
    for step in (0, 99, theirs.warmup - 1, theirs.warmup, 500_000, theirs.steps - 1):
        lr = optimizer.lr * recipe.lr_scale(recipe.curriculum.at(step, recipe.seed))
        done, left = (step + 1) / theirs.warmup, theirs.steps - theirs.warmup
        wanted = theirs.lr * min(done, (theirs.steps - step) / left)
        assert lr == pytest.approx(wanted, rel=1e-3, abs=theirs.lr * 2e-6), step
    task = recipe.built_tasks["replaced_token_detection"]
    assert isinstance(task, ReplacedTokenDetection)
    assert (task.rate, task.mask_rate, task.random_rate) == (theirs.rate, theirs.shown, 0.0)
    assert (task.units, task.temperature) == (("token",), 1.0)
    assert [*task.loss_weights().values()] == [theirs.weight, 1.0]
    assert task.embedding_sharing == theirs.sharing
    encoder = recipe.backbone_config
    made = task.generator.config(encoder)
    sizes = made.num_layers, made.hidden_size, made.feed_forward_size, made.num_heads
    assert sizes == theirs.generator and encoder.num_layers == layers


def test_gpt_bert_as_published(root: Path) -> None:
    """7,812 steps of 4 M tokens, the batch from a quarter; cosine after 1.6 %; 30 to 15 % in spans
    of 1 to 3 tokens; 15 masked texts for a causal one, with the weights of GPT-BERT's mean."""
    recipe = read_recipe(root / "launch/recipes/gpt_bert_small.yaml")
    optimizer, steps = recipe.optimizer, 7812
    assert (optimizer.kind, optimizer.lr, optimizer.weight_decay) == ("lamb", 1.41e-2, 0.1)
    assert (tuple(optimizer.betas), optimizer.eps, optimizer.clip) == ((0.9, 0.98), 1e-8, 2.0)
    assert optimizer.ema == 0.999 and recipe.curriculum.steps == steps
    sizes = recipe.stage_plan.sizes
    assert [size.length for size in sizes] == [128, 256, 512]
    assert all(size.rows_at(10**6) * size.length == 32768 * 128 for size in sizes)
    assert sizes[0].rows_at(0) == 32768 // 4
    warm = int(0.016 * steps)
    for step in range(0, steps, 97):
        at = recipe.curriculum.at(step, recipe.seed)
        done = (step + 1) / warm
        turned = math.pi * (step - warm) / (steps - warm)
        wanted = min(done, 0.5 + 0.5 * math.cos(max(turned, 0)))
        assert recipe.lr_scale(at) == pytest.approx(wanted, abs=2e-3), step
        rate = 0.3 - 0.15 * step / (steps - 1)
        assert recipe.stage_plan.mask_rates.at(step) == pytest.approx(rate, abs=1e-3), step
    tasks = recipe.built_tasks
    masks, causal = tasks["knowledge_masking"], tasks["causal_language_model"]
    assert isinstance(masks, KnowledgeMasking) and masks.spans is not None
    assert (masks.spans.lengths, masks.spans.shortest, masks.spans.longest) == ("uniform", 1, 3)
    assert (masks.shifted, masks.units, causal.share) == (True, ("token",), masks.name)
    assert (masks.mask_rate, masks.random_rate) == (0.8, 0.1)
    for stage in recipe.curriculum.stages:
        assert dict(stage.steps_of)[causal.name] / stage.steps == pytest.approx(1 / 16, abs=3e-4)
    assert (masks.weight, causal.weight) == (15 / 16, 1 / 16)
    config = recipe.backbone_config
    assert (config.num_layers, config.hidden_size, config.num_heads) == (12, 384, 6)
    assert (config.feed_forward_size, config.vocab_size) == (1280, 8192)
    assert not has_windows(config)


def test_babyberta_as_published(root: Path) -> None:
    recipe = read_recipe(root / "launch/recipes/babyberta.yaml")
    optimizer, steps = recipe.optimizer, 160_000
    assert (optimizer.kind, optimizer.lr, optimizer.weight_decay) == ("adamw", 1e-4, 0)
    assert (recipe.curriculum.steps, recipe.length, recipe.batch) == (steps, 128, "16 examples")
    assert recipe.lr_scale(recipe.curriculum.at(11_999, 1)) == pytest.approx(0.5)
    assert recipe.lr_scale(recipe.curriculum.at(24_000, 1)) == pytest.approx(1, abs=1e-4)
    task = recipe.built_tasks["knowledge_masking"]
    assert isinstance(task, KnowledgeMasking)
    assert (task.rate, task.mask_rate, task.random_rate, task.random) == (0.15, 0.9, 0.1, "other")
    config = recipe.backbone_config
    sizes = config.num_layers, config.hidden_size, config.num_heads, config.feed_forward_size
    assert (*sizes, config.vocab_size) == (8, 256, 8, 1024, 8192)


def test_atis_as_in_paddlepalm(root: Path) -> None:
    """Slots and intents with one encoder, equally often, for 20 epochs of the slots."""
    values = read_values(root / "launch/recipes/finetune/atis.yaml")
    recipe = make_recipe({**values, "backbone": {"preset": "ernie-2.0-base"}})
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (optimizer.lr, optimizer.weight_decay, optimizer.clip) == (2e-5, 0.01, 0)
    assert (schedule.kind, schedule.warmup) == ("linear", 0.1)
    assert (recipe.length, recipe.examples) == (128, 16)
    spec = recipe.curriculum_spec
    assert spec.sampler == MixRatio({"slot": 1.0, "intent": 1.0}, "slot", 20)
    assert set(spec.mix_of.values()) == {"step"} and not recipe.evaluate.best
    slot = recipe.built_tasks["slot"]
    assert isinstance(slot, Tagging) and slot.crf and slot.dropout == 0.1
