"""ModelOpt imports PyArrow, whose allocator starts a thread otherwise, which a fork would lack."""

import os

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
