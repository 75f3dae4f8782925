"""``python -m vllm_kvpad.cli``: the command under a Python of one's choice."""

from vllm_kvpad.cli import main

main()
