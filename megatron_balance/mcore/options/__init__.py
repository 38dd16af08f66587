"""What becomes of a run that balances under each of Megatron's options, in tables by subject."""
