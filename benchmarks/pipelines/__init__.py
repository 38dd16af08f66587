"""Plans of pipelines beside simulated annealing."""
