"""The one error class users meet."""


class BalanceError(ValueError):
    """A flag, a file or a Megatron version that cannot be used.

    The message names the flag (or file, or hook target), the value seen and what would be right.
    It is raised before training starts and on every rank: the inputs it concerns are the same
    everywhere.
    """
