"""The models that are planned for: real configurations, each as one rank has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_kvpad.cli.geometry import Geometry, load_config, read_layers

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class Model:
    """A model and how it is deployed.

    Attributes:
        config: A file of ``tests/configs``, without ``.json``.
        tensor_parallel: Ranks.
        block_sizes: Tokens in a block; what its attention can use.
    """

    config: str
    tensor_parallel: int = 1
    block_sizes: tuple[int, ...] = (16, 32, 64)

    @property
    def name(self) -> str:
        ranks = f", TP {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{self.config}{ranks}"

    def geometry(self, block_size: int, layout: str = "LBNHC") -> Geometry:
        """The cache of one rank.

        Raises:
            GeometryError: The configuration cannot be read.
        """
        config = load_config(CONFIGS / f"{self.config}.json")
        # Which all of them are; gpt-oss's configuration does not say so.
        layers = read_layers(
            config, tensor_parallel=self.tensor_parallel, dtype="bfloat16"
        )
        return Geometry(layers=layers, block_size=block_size, layout=layout)


MODELS = (
    Model("SmolLM2-135M"),
    Model("SmolLM2-360M"),
    Model("Qwen3-0.6B"),
    Model("Qwen3-8B"),
    Model("Qwen3-30B-A3B"),
    Model("Llama-3.1-8B"),
    Model("Llama-3.1-70B", tensor_parallel=8),
    Model("gemma-3-1b-it"),
    Model("gemma-3-27b-it"),
    Model("gpt-oss-120b"),
    Model("DeepSeek-V3"),
    # Its sparse attention runs on blocks of 64 tokens only (vLLM,
    # v1/attention/backends/mla/indexer.py, get_supported_kernel_block_sizes).
    Model("DeepSeek-V3.2-Exp", block_sizes=(64,)),
)
