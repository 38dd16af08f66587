"""Thin translators: adapters for five systems that ask for balancing, each driven by the planner.

An adapter turns its system's lengths and batches into the planner's input, and the plan back; it has no partition
algorithm of its own. Each has the same files, where it needs them:

    settings.py   one frozen object of options, read from arguments, flags or the environment
    hooks.py      the table of hooked functions, and `install()` through `hooking.Installation`
    plan.py       lengths to a plan, and the plan in the system's own form
    transport.py  moves samples between ranks

Importing one patches nothing: `install()` does, after checking every target, and what it returns has `undo()`.
The repository has a template to copy.
"""
