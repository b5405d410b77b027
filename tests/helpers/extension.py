"""The compiled extension, where there is one."""

import pytest

from fastenc.ops.library import _C

needs_cpp = pytest.mark.skipif(_C is None, reason="the compiled extension is not available")
