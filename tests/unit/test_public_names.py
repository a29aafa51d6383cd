"""What `from longhelix import ...` gives."""

import subprocess
import sys

import pytest

import longhelix

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", longhelix.__all__)
def test_every_public_name_exists(name):
    assert getattr(longhelix, name).__name__ == name


def test_the_package_loads_without_torch():
    code = "import sys, longhelix; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
