"""vllm-kvpad: a KV cache for vLLM that is sized by what is really left.

The package is used through vLLM's plugin mechanism (``VLLM_PLUGINS=kvpad``);
see :mod:`vllm_kvpad.plugin`. Importing it imports neither vLLM nor torch.
"""

__version__ = "0.1.0"
