"""Imported by verl in every process: verl's tests draw lengths from numpy's generator and seed only torch's."""

import numpy as np

np.random.seed(0)  # noqa: NPY002
