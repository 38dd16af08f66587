"""Megatron's own pretrain_gpt.py, unedited, with and without balancing: scripts/upstream/check_megatron.sh."""
