from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.train.plan.cluster import parse_clusters
from palm_ds.train.plan.step_time import LINK_SHARE, TimePlan, plan_step_time
from palm_ds.train.plan.work import ModelSize, StepWork

BASE = EncoderConfig(vocab_size=30_522)
MODEL = ModelSize(
    config=BASE,
    parameters=110_000_000,
    trained=110_000_000,
    largest=23_000_000,
    largest_layer=7_100_000,
)
WORK = StepWork(rows=1024, length=512, tokens=524_288, squares=524_288 * 256, labels=78_643)


def ds_config(stage: int, precision: str = "bf16", **more: Any) -> DSConfig:
    palm = {"palm_ds": more.pop("palm_ds", {})}
    values = {"zero_optimization": {"stage": stage, **more}, **palm}
    return make_ds_config({precision: {"enabled": True}, **values})


def seconds(gpus: str, stage: int = 1, micro_steps: int = 4, **more: Any) -> Any:
    [cluster] = parse_clusters(gpus)
    return plan_step_time(MODEL, WORK, ds_config(stage, **more), cluster, micro_steps=micro_steps)


def test_products_are_flops_over_what_the_cards_reach() -> None:
    one = seconds("1 x H100, 50 %")
    assert one.products == pytest.approx(WORK.flops(BASE) / (989.4e12 * 0.5))
    assert one.communication == 0 and one.total > one.products
    assert seconds("8 x H100, 50 %").products == pytest.approx(one.products / 8)


def test_recomputation_costs_a_third() -> None:
    again = seconds("8 x H100", palm_ds={"activation_checkpointing": True})
    assert again.products == pytest.approx(seconds("8 x H100").products * 4 / 3)


def test_gradients_go_round_a_ring_and_weights_come_back() -> None:
    found = seconds("64 x H100, 400 Gb/s")
    part = 63 / 64 * 2 * MODEL.parameters
    assert found.communication == pytest.approx(3 * part / (50e9 * LINK_SHARE), rel=0.02)
    assert found.exposed == found.communication  # without overlap_comm nothing is hidden


def test_overlap_hides_what_the_backward_pass_covers() -> None:
    slow, fast = seconds("16 x H100, 100 Gb/s"), seconds("16 x H100, 100 Gb/s", overlap_comm=True)
    assert fast.communication == slow.communication and fast.exposed < slow.exposed


def test_later_stages_communicate_in_every_micro_batch() -> None:
    gpus = "64 x H100, 400 Gb/s"
    assert seconds(gpus, 1, 8).communication == seconds(gpus, 1, 1).communication
    assert seconds(gpus, 2, 8).communication > 4 * seconds(gpus, 2, 1).communication
    assert seconds(gpus, 3, 8).communication > seconds(gpus, 2, 8).communication


def test_frozen_parameters_are_neither_reduced_nor_updated() -> None:
    """Such as all but those of LoRA. ZeRO 3 gathers them as it does the others."""
    [cluster], few = parse_clusters("64 x H100, 400 Gb/s"), replace(MODEL, trained=1_100_000)

    def times(model: ModelSize, stage: int) -> TimePlan:
        return plan_step_time(model, WORK, ds_config(stage), cluster, micro_steps=1)

    for stage, share in ((0, 0.01), (1, 0.01), (2, 0.01), (3, 2.01 / 3)):
        whole, part = times(MODEL, stage), times(few, stage)
        assert part.optimizer == pytest.approx(whole.optimizer / 100)
        assert part.communication == pytest.approx(share * whole.communication, abs=2e-3)


def test_a_card_without_the_precision_is_refused() -> None:
    with pytest.raises(UserError, match="plan: V100 has no matrix products in bf16"):
        seconds("8 x V100")
