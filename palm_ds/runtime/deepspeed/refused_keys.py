"""Keys that DeepSpeed knows and a DeepSpeed file may not have here, with what is right instead or
why not: what the recipe sets, what palm_ds does itself, what would change nothing, or the result.
"""

from __future__ import annotations

from collections.abc import Mapping

OF_THE_RECIPE = {
    "optimizer": "set `optimizer` in the recipe",
    "scheduler": "set `schedule` in the recipe",
    "train_batch_size": "set `batch` in the recipe",
    "gradient_clipping": "set `optimizer.clip` in the recipe",
    "gradient_accumulation_steps": "it follows from the recipe's `batch`, the number of processes "
    "and train_micro_batch_size_per_gpu",
    "lr": "set `optimizer.lr` in the recipe",
    "learning_rate": "set `optimizer.lr` in the recipe",
    "seed": "set `seed` in the recipe",
    "curriculum_learning": "set `stages` in the recipe",
    "data_efficiency": "set `stages` in the recipe",
    "wandb": "set `track.wandb` in the recipe",
    "comet": "set `track` in the recipe",
    "tensorboard": "every run writes TensorBoard events",
    "csv_monitor": "every run writes metrics.jsonl",
}
NOT_WITH_US = {
    "managed_gradient_accumulation": "palm_ds counts micro-batches itself",
    "gradient_allreduce_op": "the loss is already divided by the count of the whole step",
    "hybrid_engine": "it is for text generation",
    "autotuning": "it starts the training script itself",
    "pipeline": "models are not split into pipeline stages",
    "tensor_parallel": "layers are not split",
    "expert_parallel": "models have no experts",
    "sequence_parallel_size": "rows are never split",
    "torch_autocast": "use bf16 or fp16",
    "use_node_local_storage": "a checkpoint is one folder that all processes share",
    "checkpoint": "palm_ds writes checkpoints itself",
    "datastates_ckpt": "palm_ds writes checkpoints itself",
    "data_types": "use bf16 or fp16",
    "bfloat16": 'write "bf16"',
    "activation_checkpointing": "set palm_ds.activation_checkpointing",
    "compile": "set palm_ds.kernels.compile",
    "weight_quantization": "weights are not quantized",
    "seq_parallel_communication_data_type": "rows are never split",
    "use_data_before_expert_parallelism": "models have no experts",
    "dataloader_drop_last": "palm_ds reads the data itself",
    "disable_allgather": "DeepSpeed ignores it",
    "zero_force_ds_cpu_optimizer": "the recipe's `optimizer` is used",
    "comms_logger": "--check measures the network, and --profile traces steps",
    "timers": "metrics.jsonl has the throughput",
    "dump_state": "--print_config shows what DeepSpeed is given",
    "log_level": "DeepSpeed's warnings and errors are shown",
}
_NO_TENSOR = (
    "DeepSpeed reduces the gradients of such a module in a hook, which torch calls only if it "
    "returns tensors alone: others, such as a whole model, would not train"
)
OWN_OPTIMIZER = "it needs an optimizer of its own"
_ELSEWHERE = "palm_ds writes and reads checkpoints itself"
NOT_IN_ZERO: Mapping[str, tuple[object, str]] = {
    "round_robin_gradients": (
        False,
        "DeepSpeed mixes up which parameter a value belongs to, in checkpoints and exports too",
    ),
    "legacy_stage1": (False, "DeepSpeed has removed it"),
    "zenflow": (None, OWN_OPTIMIZER),
    "allgather_partitions": (True, "DeepSpeed ignores it"),
    "load_from_fp32_weights": (True, _ELSEWHERE),
    "elastic_checkpoint": (False, _ELSEWHERE),
    "pipeline_loading_checkpoint": (False, _ELSEWHERE),
    "cpu_offload": (False, 'write "offload_optimizer": {"device": "cpu"}'),
    "cpu_offload_param": (False, 'write "offload_param": {"device": "cpu"}'),
    "cpu_offload_use_pin_memory": (False, 'write "pin_memory" in the section of the offload'),
    "save_muon_momentum_buffer_in_memory": (False, "ZeRO 3 has no Muon"),
    "zero_quantized_nontrainable_weights": (
        False,
        "frozen weights could not be set when a run resumes",
    ),
    "leaf_module": (None, _NO_TENSOR),
    "stage3_module_granularity_threshold": (0, _NO_TENSOR),
    "module_granularity_threshold": (0, _NO_TENSOR),
    "zero_hpz_partition_size": (
        1,
        "its second copies would not follow weights that palm_ds sets: loaded and averaged ones",
    ),
}
"""{key: (the value that means nothing, what is wrong with others)}."""
_IN_FP32 = "weights and moments are kept in fp32"
NOT_IN_HALF = {
    "bf16_master_weights_and_grads": _IN_FP32,
    "bf16_optimizer_states": _IN_FP32,
    "fp16_master_weights_and_grads": _IN_FP32,
    "immediate_grad_update": "DeepSpeed ignores it",
    "auto_cast": "models cast their inputs",
}
"""In the sections bf16 and fp16."""
