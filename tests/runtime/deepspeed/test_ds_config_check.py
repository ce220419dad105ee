"""DeepSpeed's keys are found by watching which ones it reads from a mapping."""

from __future__ import annotations

from palm_ds.runtime.deepspeed.ds_config_check import validate_with_deepspeed

BATCH = {"train_batch_size": 1}


def test_the_keys_that_deepspeed_reads_are_found() -> None:
    """If DeepSpeed copied the mapping instead of reading keys from it, unknown keys would be
    refused without cause, or not at all."""
    answer = validate_with_deepspeed(BATCH, {})
    assert answer.problem == ""
    known = {"zero_optimization", "bf16", "fp16", "gradient_clipping", "wall_clock_breakdown"}
    known |= {"steps_per_print", "comms_logger", "flops_profiler", "communication_data_type"}
    assert known <= answer.keys_read
    assert not {"zero_optimisation", "palm_ds", "_about"} & answer.keys_read
    assert 40 < len(answer.keys_read) < 400


def test_an_unknown_key_is_not_read() -> None:
    answer = validate_with_deepspeed({**BATCH, "zero_optimisation": {}}, {"zero_optimisation": {}})
    assert answer.problem == "" and "zero_optimisation" not in answer.keys_read
