"""The comparison of a resumed run with how it was begun."""

from pathlib import Path

import pytest

from fastenc._base.resumption import check_begun_with


def test_the_same_settings_pass_whatever_else_the_run_has_kept():
    check_begun_with({"seed": 0, "size": [1, 2]}, {"size": [1, 2]}, Path("out"), "delete it")


@pytest.mark.parametrize("begun, value", [({"seed": 0}, 0), ({}, None)])
def test_another_or_a_missing_setting_is_an_error_with_the_remedy(begun, value):
    message = rf"^out was begun with seed={value}, got 1: use the same value, or delete it$"
    with pytest.raises(ValueError, match=message):
        check_begun_with(begun, {"seed": 1}, Path("out"), "delete it")
