"""The cost of a sample: from FLOPs, from measured seconds, from tokens; and of context-parallel communication."""
