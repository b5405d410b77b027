"""AdamW's update of many tensors, by Triton kernels (kernels/adamw.py) on tensors that tables of addresses name."""

from fastenc.ops.library import when_called

adamw_count = when_called("adamw", "adamw_count")
adamw_step = when_called("adamw", "adamw_step")
adamw_tables = when_called("adamw", "adamw_tables")
