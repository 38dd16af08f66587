"""Numbers that context-parallel ranks exchange for each token of a sequence that they share, by kind of layer."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_balance.model.flops import Layer
from megatron_balance.model.shape import ModelShape


def exchange_numbers(shape: ModelShape, layers: Iterable[Layer], *, tp_size: int = 1) -> dict[str, int]:
    """Numbers of a token in a training step, forward and backward, on all tensor-parallel ranks together.

    By the names of a CostModel's coefficients:

    - `cp_exchange`: keys and values that a ring passes on forward, once more in the backward pass, and there their
      gradients as well (Liu et al. 2023, arXiv 2310.01889, section 3); windows do not shorten it;
    - `cp_all_to_all`: what mixers work on by heads in place of tokens, once each way (megatron.core 0.19,
      ssm/gated_delta_net/gdn.py: queries, keys, values, gates and two numbers a head, and values back;
      ssm/mamba_context_parallel.py: `pre_conv_ssm` and `post_conv_ssm`, groups repeated for more ranks counted once);
    - `cp_all_gather`: the latent key of sparse attention, once each way, and its indexer's, back with a loss
      (transformer/experimental_attention_variant/dsa.py). All heads share them: each tensor-parallel rank gathers all.
    """
    ring = all_to_all = all_gather = 0
    for layer in layers:
        if layer.mixer == "attention":
            ring += 3 * 2 * shape.num_query_groups * shape.kv_channels
        elif layer.mixer == "mla":  # uncompressed, as it is trained
            width = shape.qk_head_dim + shape.qk_pos_emb_head_dim + shape.v_head_dim
            ring += 3 * shape.num_attention_heads * width
        elif layer.mixer == "gated_delta_net":
            keys = shape.linear_num_key_heads * shape.linear_key_head_dim
            values = shape.linear_num_value_heads * shape.linear_value_head_dim
            all_to_all += 2 * (2 * keys + 3 * values + 2 * shape.linear_num_value_heads)
        elif layer.mixer == "mamba":
            inner = shape.mamba_num_heads * shape.mamba_head_dim
            groups = shape.mamba_num_groups * shape.mamba_state_dim
            all_to_all += 2 * (3 * inner + 2 * groups + shape.mamba_num_heads)
        elif layer.mixer in ("dsa", "dsa_shared"):
            indexer = shape.dsa_indexer_head_dim * (1 + shape.dsa_indexer_loss) * (layer.mixer == "dsa")
            all_gather += tp_size * (2 * (shape.kv_lora_rank + shape.qk_pos_emb_head_dim) + indexer)
    return {"cp_exchange": ring, "cp_all_to_all": all_to_all, "cp_all_gather": all_gather}
