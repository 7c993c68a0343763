"""Which fields of PEFT's adapter_config.json change what an adapter computes, and which do not.

Every field that is neither read, nor refused by name, nor known to be harmless is refused if it is set: a
server that skips a field it does not know computes something else than what was trained.
"""

from types import MappingProxyType
from typing import Any

# Read by peft_config.py.
READ = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters",
        "init_lora_weights", "lora_B_layout", "peft_version", "base_model_name_or_path",
        "ensure_weight_tying",
    }
)  # fmt: skip

# Set, each of these needs maths that plain LoRA does not have.
REFUSED = MappingProxyType(
    {
        "use_dora": "DoRA rescales the base weights (merge the adapter, or train without use_dora)",
        "lora_bias": "a bias on lora_B is not served",
        "modules_to_save": "whole replaced modules are not served, only their LoRA",
        "trainable_token_indices": "replaced token embeddings are not served",
        "layer_replication": "it changes the depth of the base model",
        "use_qalora": "QALoRA pools the input before lora_A",
        "use_bdlora": "block-diagonal LoRA is not served",
        "arrow_config": "Arrow routes between several adapters",
        "kasa_config": "KaSA changes the base weights",
        "monteclora_config": "MonteCLoRA adds sampled weights",
        "lora_ga_config": "LoRA-GA changes the base weights (convert it to plain LoRA when saving)",
    }
)

# These change the base weights; PEFT undoes that when it saves with path_initial_model_for_weight_conversion.
REFUSED_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# These only choose where training starts.
HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})

# Training, bookkeeping, or a choice of modules that the file's tensors show by themselves.
HARMLESS = frozenset(
    {
        "task_type", "auto_mapping", "revision", "inference_mode", "target_modules", "exclude_modules",
        "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_config",
        "megatron_core", "loftq_config", "eva_config", "corda_config", "runtime_config", "qalora_group_size",
        # VeLoRA only compresses what the backward pass keeps.
        "velora_config",
        # Fields of old PEFT versions, and of trainers that write beside PEFT's own.
        "enable_lora", "merge_weights", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr", "unsloth_fixed",
    }
)  # fmt: skip


def is_set(value: Any) -> bool:
    """Whether a field says anything: null, false, 0, "" and empty containers do not."""
    return bool(value)
