"""Loggers that print through vLLM's handler and format.

vLLM configures the ``vllm`` logger only, so kvpad's loggers are its children.
"""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """Return the logger of module ``name`` (its ``__name__``) under ``vllm.kvpad``."""
    return logging.getLogger("vllm.kvpad." + name.removeprefix("vllm_kvpad."))
