"""The compiled extension, where there is one."""

import pytest

try:
    from fastenc import _C
except ImportError:
    _C = None

needs_cpp = pytest.mark.skipif(_C is None, reason="the compiled extension is not available")
