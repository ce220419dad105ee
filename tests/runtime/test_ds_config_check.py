"""DeepSpeed's own vocabulary is learned by watching what it asks a mapping for."""

from __future__ import annotations

from palm_ds.runtime.ds_config_check import ask

BATCH = {"train_batch_size": 1}


def test_it_sees_what_deepspeed_asks_for() -> None:
    """Should DeepSpeed copy the mapping instead of asking it, unknown keys would be refused
    without cause, or none at all."""
    answer = ask(BATCH, {})
    assert answer.problem == ""
    known = {"zero_optimization", "bf16", "fp16", "gradient_clipping", "wall_clock_breakdown"}
    known |= {"steps_per_print", "comms_logger", "flops_profiler", "communication_data_type"}
    assert known <= answer.asked
    assert not {"zero_optimisation", "palm_ds", "_about"} & answer.asked
    assert 40 < len(answer.asked) < 400


def test_a_key_it_does_not_know_is_not_asked_for() -> None:
    answer = ask({**BATCH, "zero_optimisation": {}}, {"zero_optimisation": {}})
    assert answer.problem == "" and "zero_optimisation" not in answer.asked
