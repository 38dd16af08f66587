"""Megatron's own pretrain_gpt.py, unedited, with and without balancing."""
