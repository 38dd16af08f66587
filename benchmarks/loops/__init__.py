"""Gains in other loops and forms of data: rows that are padded, and the bins of Megatron's RL loop."""
