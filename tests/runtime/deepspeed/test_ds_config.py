from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.deepspeed.ds_config import largest_divisor, make_ds_config, read_ds_config

SHIPPED = sorted((Path(__file__).resolve().parents[3] / "ds_configs").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_resolve(path: Path) -> None:
    ds_config = read_ds_config(path)
    assert len(json.loads(path.read_text())["_about"]) > 40
    config = ds_config.deepspeed_config(rows=768, world=8, clip=1.0)
    assert config["train_batch_size"] == 768
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] == 96
    assert "auto" not in json.dumps(config)
    assert "palm_ds" not in config and "_about" not in config
    fp32 = path.stem.startswith("cpu") and "bf16" not in path.stem
    assert (ds_config.precision == "fp32") == fp32
    assert ds_config.offloads == ("offload" in path.stem)


def test_there_is_a_file_for_every_stage() -> None:
    assert {read_ds_config(path).stage for path in SHIPPED} == {0, 1, 2, 3}


def test_clipping_and_checks_are_explicit() -> None:
    def config(stage: int, **sections: Any) -> dict[str, Any]:
        ds_config = make_ds_config({"zero_optimization": {"stage": stage}, **sections})
        return ds_config.deepspeed_config(rows=8, world=2, clip=0.5)

    assert config(2)["gradient_clipping"] == 0.5
    assert config(0)["gradient_clipping"] == 0.0  # our optimizer clips there
    assert config(1, bf16={"enabled": True})["bf16"]["check_grad_overflow"] is True
    assert "bf16" not in config(1, bf16={"enabled": False})


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stage_0_in_half_precision_runs_as_stage_1_and_says_so(precision: str) -> None:
    values = {precision: {"enabled": True}, "zero_optimization": {"stage": 0}}
    ds_config = make_ds_config(values, where="m.json")
    assert ds_config.stage == 1 and not ds_config.checks_itself
    config = ds_config.deepspeed_config(rows=8, world=1, clip=1.0)
    assert config["zero_optimization"]["stage"] == 1 and config[precision]["enabled"]
    assert values["zero_optimization"] == {"stage": 0}  # the caller's own stays unchanged
    (note,) = ds_config.notes
    assert note.startswith(f"m.json: zero_optimization.stage 0 with {precision} runs as stage 1")
    assert make_ds_config({precision: {"enabled": True}}).stage == 1
    assert make_ds_config({"zero_optimization": {"stage": 0}}).notes == ()
    assert make_ds_config({**values, "zero_optimization": {"stage": 1}}).notes == ()


def test_one_process_overlaps_nothing() -> None:
    def overlaps(stage: int, world: int) -> object:
        ds_config = make_ds_config({"zero_optimization": {"stage": stage, "overlap_comm": True}})
        config = ds_config.deepspeed_config(rows=8, world=world, clip=1.0)
        return config["zero_optimization"]["overlap_comm"]

    assert not overlaps(1, 1) and not overlaps(2, 1)
    assert overlaps(1, 2) and overlaps(2, 2) and overlaps(3, 1)


@pytest.mark.parametrize(
    ("rows", "world", "wanted"),
    [(32, 1, (8, 4)), (32, 4, (8, 1)), (36, 2, (6, 3)), (7, 1, (7, 1)), (22, 2, (1, 11))],
)
def test_micro_batch_is_chosen(rows: int, world: int, wanted: tuple[int, int]) -> None:
    assert make_ds_config({}).micro_batching(rows, world) == wanted
    assert wanted[0] == largest_divisor(rows // world, 8)


def test_a_given_micro_batch_is_used() -> None:
    ds_config = make_ds_config({"train_micro_batch_size_per_gpu": 16})
    assert ds_config.micro_batching(64, 2) == (16, 2)
    with pytest.raises(UserError, match="16 rows do not divide the 24 rows"):
        ds_config.micro_batching(48, 2)
    with pytest.raises(UserError, match="cannot be divided evenly among 3 processes"):
        ds_config.micro_batching(64, 3)


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"_about": "x", "zero_optimization": {"stage": 1}}')
    ds_config = read_ds_config(
        path, {"zero_optimization.stage": 3, "palm_ds.data_workers": 2, "bf16.enabled": True}
    )
    assert (ds_config.stage, ds_config.data_workers, ds_config.precision) == (3, 2, "bf16")
    with pytest.raises(UserError, match=r"m.json: palm_ds.data_wokers: unknown.*data_workers"):
        read_ds_config(path, {"palm_ds.data_wokers": 2})


def test_our_section() -> None:
    ours = {
        "data_workers": 3,
        "activation_checkpointing": True,
        "kernels": {"attention": "sdpa"},
        "comms": {"shm_all_reduce": True},
        "watchdog_minutes": 2.5,
    }
    ds_config = make_ds_config({"palm_ds": ours})
    assert ds_config.data_workers == 3 and ds_config.activation_checkpointing
    assert ds_config.kernels == {"attention": "sdpa"} and ds_config.comms.shm_all_reduce
    assert ds_config.watchdog_minutes == 2.5


def test_auto_of_other_trainers_is_resolved() -> None:
    """Files written for other trainers say "auto" where the recipe or DeepSpeed decides."""
    ds_config = make_ds_config(
        {
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        }
    )
    assert ds_config.sections["zero_optimization"] == {"stage": 2}


def test_what_is_switched_off_is_no_mistake() -> None:
    """As in files of other trainers."""
    off = {"wall_clock_breakdown": False, "dump_state": False, "zero_force_ds_cpu_optimizer": False}
    zero = {"stage": 3, "allgather_partitions": True, "cpu_offload": False}
    zero |= {"zero_hpz_partition_size": 1, "zero_quantized_weights": False}
    zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    values = {**off, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    assert make_ds_config(values).notes == () and not make_ds_config(values).for_gpus


def test_what_deepspeed_would_log_is_said_to_be_elsewhere() -> None:
    (note,) = make_ds_config({"steps_per_print": 2000}, where="m.json").notes
    assert note == "m.json: steps_per_print has no effect; set `log.every` in the recipe"


BAD: dict[str, tuple[str, str]] = {
    "comma": ('{"bf16": {"enabled": true},}', r"m\.json:1:\d+: not valid JSON: "),
    "second line": ('{\n "bf16" {}}', r"m\.json:2:9: not valid JSON: "),
    "empty": ("", r"m\.json:1:1: not valid JSON"),
    "list": ("[1, 2]", "expected keys and values, got .1, 2"),
    "twice": ('{"bf16": {}, "bf16": {}}', 'duplicate key "bf16"'),
    "unknown": ('{"zero_optimisation": {}}', 'unknown key; did you mean "zero_optimization"'),
    "unknown in zero": (
        '{"zero_optimization": {"stage": 2, "overlap_com": true}}',
        'zero_optimization.overlap_com: unknown key; did you mean "overlap_comm"',
    ),
    "wrong kind in zero": (
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}',
        "zero_optimization.reduce_bucket_size: .*integer.* got .big.",
    ),
    "deeper": (
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}}',
        "zero_optimization.offload_optimizer.device: .*'none', 'cpu' or 'nvme'",
    ),
    "nvme nowhere": (
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}',
        'zero_optimization.offload_optimizer.nvme_path: "nvme" needs a folder on a local disk',
    ),
    "nvme stage": (
        '{"zero_optimization": {"stage": 2, "offload_optimizer": '
        '{"device": "nvme", "nvme_path": "/tmp"}}}',
        'zero_optimization.offload_optimizer.device: "nvme" needs stage 3, got 2',
    ),
    "nvme buffers": (
        '{"zero_optimization": {"stage": 3, "offload_optimizer": '
        '{"device": "nvme", "nvme_path": "/tmp", "buffer_count": 3}}}',
        "offload_optimizer.buffer_count: must be 4 or more, got 3",
    ),
    "nvme pipeline": (
        '{"zero_optimization": {"stage": 3, "offload_optimizer": '
        '{"device": "nvme", "nvme_path": "/tmp", "pipeline_read": true}}}',
        'offload_optimizer.pipeline_read: not supported with "nvme"; remove it',
    ),
    "nvme weights": (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
        'zero_optimization.offload_param.device: .*"nvme" is not supported, use "cpu"',
    ),
    "weights offloaded too early": (
        '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
        "zero_optimization.offload_param: needs stage 3, got 2",
    ),
    "at odds": (
        '{"fp16": {"enabled": true, "loss_scale_window": 0}}',
        "m.json: fp16.loss_scale_window must be > 0 when dynamic",
    ),
    "a vast scale": (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale": 1'
        + "0" * 400
        + "}}",
        r"m\.json: DeepSpeed cannot read it \(int too large",
    ),
    "named once": (
        '{"fp16": {"enabled": true, "loss_scale": -1}}',
        "m.json: fp16.loss_scale: must be >= 0 .*, got -1",
    ),
    "nested": ('{"a":' * 200_000, r"m\.json: not valid JSON: nested too deeply"),
    "stage": ('{"zero_optimization": {"stage": 4}}', "stage: expected 0, 1, 2 or 3, got 4"),
    "stage auto": ('{"zero_optimization": {"stage": "auto"}}', 'stage: "auto" is not supported'),
    "zero is a number": ('{"zero_optimization": 2}', "zero_optimization: expected a section"),
    "offload without zero": (
        '{"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}',
        "offload_optimizer: needs stage 1, 2 or 3, got 0",
    ),
    "round robin": (
        '{"zero_optimization": {"stage": 1, "round_robin_gradients": true}}',
        "round_robin_gradients: not supported; DeepSpeed mixes up",
    ),
    "zenflow": (
        '{"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}',
        "zero_optimization.zenflow: not supported; it needs an optimizer of its own",
    ),
    "legacy": (
        '{"zero_optimization": {"stage": 1, "legacy_stage1": true}}',
        "zero_optimization.legacy_stage1: not supported; DeepSpeed has removed it",
    ),
    "another engine": ('{"datastates_ckpt": {}}', "palm_ds writes checkpoints itself"),
    "no norm": (
        '{"zero_optimization": {"stage": 1, "compute_grad_norm": false}}',
        "compute_grad_norm: must be true",
    ),
    "optimizer": ('{"optimizer": {"type": "AdamW"}}', "set `optimizer` in the recipe"),
    "scheduler": ('{"scheduler": {}}', "set `schedule` in the recipe"),
    "batch": ('{"train_batch_size": 32}', "set `batch` in the recipe"),
    "clipping": ('{"gradient_clipping": 1.0}', "set `optimizer.clip` in the recipe"),
    "accumulation": ('{"gradient_accumulation_steps": 2}', "follows from the recipe's `batch`"),
    "micro": ('{"train_micro_batch_size_per_gpu": 0}', "expected rows of a micro-batch, 1 or"),
    "both": (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true}, "bf16": {"enabled": true}}',
        "fp16 and bf16 are both enabled",
    ),
    "bf16 auto": ('{"bf16": {"enabled": "auto"}}', 'bf16.enabled: "auto" is not supported'),
    "bf16 word": ('{"bf16": {"enabled": "yes"}}', "bf16.enabled: expected true or false"),
    "bf16 unchecked": (
        '{"zero_optimization": {"stage": 1}, '
        '"bf16": {"enabled": true, "check_grad_overflow": false}}',
        "bf16.check_grad_overflow: must be true",
    ),
    "fp16 key": (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "los_scale": 1}}',
        'fp16.los_scale: unknown key; did you mean "loss_scale"',
    ),
    "unknown in a section of plain values": (
        '{"flops_profiler": {"enabled": true, "profle_step": 5}}',
        'flops_profiler.profle_step: unknown key; did you mean "profile_step"',
    ),
    "unknown in another": (
        '{"aio": {"block_sise": 1048576}}',
        'aio.block_sise: unknown key; did you mean "block_size"',
    ),
    "a number for a switch": (
        '{"wall_clock_breakdown": 1}',
        "wall_clock_breakdown: expected true or false, got 1",
    ),
    "text in a section of plain values": (
        '{"flops_profiler": {"enabled": true, "profile_step": "5"}}',
        'flops_profiler.profile_step: expected a number, got "5"',
    ),
    "below 0": (
        '{"gradient_predivide_factor": -1}',
        "gradient_predivide_factor: expected a number above 0, got -1",
    ),
    "a vast power": (
        '{"fp16": {"enabled": true, "initial_scale_power": 2000}}',
        "fp16.initial_scale_power: expected up to 127, got 2000",
    ),
    "removed": ('{"nebula": {"enabled": true}}', "Nebula checkpointing has been removed"),
    "removed amp": ('{"amp": {"enabled": true}}', "Apex AMP integration has been removed"),
    "removed zero": (
        '{"zero_optimization": {"stage": 3, "mics_shard_size": 2}}',
        "MiCS ZeRO-3 sharding has been removed",
    ),
    "not with us": ('{"pipeline": {}}', "pipeline: not supported; models are not split"),
    "sum": ('{"gradient_allreduce_op": "sum"}', "already divided by the count"),
    "old name": ('{"bfloat16": {"enabled": true}}', 'write "bf16"'),
    "text for a number": ('{"steps_per_print": "often"}', "steps_per_print: expected a number"),
    "no steps": ('{"steps_per_print": 0}', "steps_per_print: expected 1 or more, got 0"),
    "stage with a fraction": (
        '{"zero_optimization": {"stage": 2.0}}',
        "zero_optimization.stage: expected 0, 1, 2 or 3, got 2.0",
    ),
    "null": ('{"wall_clock_breakdown": null}', "wall_clock_breakdown: expected .* got null"),
    "activations": ('{"activation_checkpointing": {}}', "set palm_ds.activation_checkpointing"),
    "not a section": (
        '{"wall_clock_breakdown": true, "flops_profiler": 3}',
        "flops_profiler: DeepSpeed cannot read it",
    ),
    "compiled by DeepSpeed": (
        '{"compile": {"deepcompile": true}}',
        "compile: not supported; set palm_ds.kernels.compile",
    ),
    "only tested optimizers": (
        '{"zero_allow_untested_optimizer": false}',
        "zero_allow_untested_optimizer: must be true; DeepSpeed has tested none",
    ),
    "its optimizer": (
        '{"zero_force_ds_cpu_optimizer": true}',
        "zero_force_ds_cpu_optimizer: not supported; the recipe's `optimizer` is used",
    ),
    "its log": ('{"comms_logger": {"enabled": true}}', "comms_logger: not supported; --check"),
    "its monitor": ('{"csv_monitor": {"enabled": true}}', "every run writes metrics.jsonl"),
    "no factor": (
        '{"gradient_predivide_factor": 0}',
        "gradient_predivide_factor: expected a number above 0, got 0",
    ),
    "ignored": (
        '{"zero_optimization": {"stage": 2, "allgather_partitions": false}}',
        "zero_optimization.allgather_partitions: not supported; DeepSpeed ignores it",
    ),
    "old offload": (
        '{"zero_optimization": {"stage": 2, "cpu_offload": true}}',
        'zero_optimization.cpu_offload: not supported; write "offload_optimizer": {"device": "cpu"',
    ),
    "another offload": (
        '{"zero_optimization": {"stage": 3, "offload_optimizer": '
        '{"device": "cpu", "super_offload": true}}}',
        "offload_optimizer.super_offload: not supported; it needs an optimizer of its own",
    ),
    "second copies": (
        '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}',
        "zero_optimization.zero_hpz_partition_size: not supported; its second copies",
    ),
    "leaves": (
        '{"zero_optimization": {"stage": 3, "leaf_module": {"names": ["heads.words"]}}}',
        "zero_optimization.leaf_module: not supported; DeepSpeed reduces the gradients of such",
    ),
    "leaves by size": (
        '{"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 1000}}',
        "stage3_module_granularity_threshold: not supported; DeepSpeed reduces the gradients of",
    ),
    "frozen and rounded": (
        '{"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": true}}',
        "zero_quantized_nontrainable_weights: not supported; frozen weights could not be set",
    ),
    "bf16 moments": (
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true, '
        '"bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}}',
        "bf16.bf16_master_weights_and_grads: not supported; weights and moments are kept in fp32",
    ),
    "fp16 inputs": (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "auto_cast": true}}',
        "fp16.auto_cast: not supported; models cast their inputs",
    ),
    "ours is a list": ('{"palm_ds": []}', r"palm_ds: expected keys and values, got \[\]"),
    "ours unknown": ('{"palm_ds": {"worker": 2}}', 'palm_ds.worker: unknown key; did you mean "'),
    "ours wrong": (
        '{"palm_ds": {"data_workers": -1}}',
        "palm_ds.data_workers: expected 0 or more, got -1",
    ),
    "ours word": (
        '{"palm_ds": {"activation_checkpointing": 1}}',
        "palm_ds.activation_checkpointing: expected true or false, got 1",
    ),
    "ours fraction": (
        '{"palm_ds": {"data_workers": 1.5}}',
        "palm_ds.data_workers: expected a whole number, got 1.5",
    ),
    "ours a text": (
        '{"palm_ds": {"watchdog_minutes": "2"}}',
        'palm_ds.watchdog_minutes: expected a number, got "2"',
    ),
    "ours nothing": (
        '{"palm_ds": {"timeout_minutes": 0}}',
        "palm_ds.timeout_minutes: expected a number above 0, got 0",
    ),
    "ours true": (
        '{"palm_ds": {"timeout_minutes": true}}',
        "palm_ds.timeout_minutes: expected a number, got true",
    ),
    "compile": (
        '{"palm_ds": {"compile": true}}',
        "palm_ds.compile: unknown key",
    ),
    "kernels": (
        '{"palm_ds": {"kernels": ["sdpa"]}}',
        r'palm_ds.kernels: expected keys and values, got \["sdpa"\]',
    ),
    "comms is a switch": (
        '{"palm_ds": {"comms": true}}',
        "palm_ds.comms: expected keys and values, got true",
    ),
    "comms word": (
        '{"palm_ds": {"comms": {"shm_all_reduce": "on"}}}',
        'palm_ds.comms.shm_all_reduce: expected true or false, got "on"',
    ),
    "comms": (
        '{"palm_ds": {"comms": {"shm": true}}}',
        "comms.shm: unknown key; known: shm_all_reduce",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_files_give_one_clear_line(name: str, tmp_path: Path) -> None:
    text, wanted = BAD[name]
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(UserError, match=wanted) as caught:
        read_ds_config(path)
    message = str(caught.value)
    assert "m.json" in message and "\n" not in message and "validation error" not in message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.json: no such file"):
        read_ds_config(tmp_path / "none.json")
    (tmp_path / "latin.json").write_bytes(b'{"_about": "\xe9"}')
    with pytest.raises(UserError, match="latin.json: cannot be read as text: .*utf-8"):
        read_ds_config(tmp_path / "latin.json")
