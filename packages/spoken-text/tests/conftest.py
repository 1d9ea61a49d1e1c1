"""What all tests share."""

import os
import random
import secrets

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # no test fails because the machine is busy
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def fresh_seed():
    """Every test draws anew; what it drew from is printed with a failure, and REPEAT_SEED repeats it."""
    seed = int(os.environ.get("REPEAT_SEED", secrets.randbits(31)))
    random.seed(seed)
    print(f"REPEAT_SEED={seed}")
    return seed
