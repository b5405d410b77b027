import pytest


@pytest.fixture
def accelerator():
    """One of mixed precision, which a process has only as long as it has no other."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state()
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    accelerate.state.AcceleratorState._reset_state()
