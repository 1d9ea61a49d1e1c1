"""Every test draws anew."""

from fixtures import fresh_seed, pytest_pyfunc_call  # noqa: F401
