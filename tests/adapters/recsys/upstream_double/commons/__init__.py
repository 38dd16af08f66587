"""A double of recsys-examples: the classes and signatures that the adapter hooks, and none of its code."""
