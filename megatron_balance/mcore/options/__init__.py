"""Tables of Megatron's options by subject: supported, refused or stock in a run that balances."""
