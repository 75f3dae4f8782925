"""From a model's ``config.json`` to where vLLM would put its KV cache.

:func:`read_layers` turns the fields of a model's configuration into one
:class:`Layer` for each layer that keeps keys and values, for one tensor parallel
rank. :class:`Geometry` places them: by vLLM's own specs, grouping and placing where
vLLM is installed, by a computation of its own where it is not (models whose layers
are all alike). Both give an object that :mod:`vllm_kvpad.placement` takes.

Only architectures whose fields are known are read (:data:`ARCHITECTURES`, each as
vLLM's model class reads it). Everything else is a :class:`GeometryError` that says
what is missing: a plan from a guess would be worse than none. What is planned is the
model alone, without speculative decoding and on one pipeline stage.

Sizes are in bytes; head counts are those of one rank.
"""

from __future__ import annotations

import importlib.util
import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_kvpad.placement import (
    allocation_bytes,
    block_alignment,
    blocks_within,
    bytes_per_block,
    kv_cache_segments,
    pad_kv_cache_segments,
    padding_bytes,
    physical_bytes,
    rounded_blocks,
)
from vllm_kvpad.vmm.base import format_bytes

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Members of vLLM's ``KVCacheLayout``: which axis is outermost, then inwards."""

MOST = (1 << 31) - 1
"""What a head, a block or a window is counted to: all else is a mistake."""

MOST_LAYERS = 10_000
"""As :data:`MOST`, for layers."""

_BYTES_OF_DTYPE = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    # vLLM's --dtype auto loads float32 checkpoints in 16 bits (config/model.py,
    # _resolve_auto_dtype).
    "float32": 2,
    "float": 2,
}

_BYTES_OF_CACHE_DTYPE = {
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


class GeometryError(ValueError):
    """The geometry cannot be derived; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer keeps for a token, on one rank.

    Attributes:
        num_kv_heads: Heads; 1 for a latent cache (MLA), which is not sharded.
        head_bytes: Bytes of one head for one token: key and value, or the latent.
        window: Tokens of a sliding window where the model mixes windows with full
            attention, else None.
        latent: One vector for a token instead of a key and a value.
        indexer: The cache that sparse attention looks its tokens up in.
    """

    num_kv_heads: int
    head_bytes: int
    window: int | None = None
    latent: bool = False
    indexer: bool = False

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * self.head_bytes


# --- Reading a configuration ---------------------------------------------------------


def load_config(path: Path) -> dict[str, Any]:
    """Read ``config.json``, given as a file or by the folder that holds it.

    Raises:
        GeometryError: There is no such file, or it is not a JSON object.
    """
    file = path
    try:
        if path.is_dir():
            file = path / "config.json"
        config = _read_object(file)
        # Where ModelOpt up to 0.29 says it (vLLM's transformers_utils/config.py).
        beside = file.with_name("hf_quant_config.json")
        if config.get("quantization_config") is None and beside.is_file():
            file = beside
            config["quantization_config"] = _read_object(file)
    except OSError as error:
        raise GeometryError(
            f"{file}: {error.strerror}; give a model's config.json, or the folder "
            "that holds it (nothing is downloaded)"
        ) from error
    return config


def _read_object(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise GeometryError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _unexpected(str(file), "a JSON object", value)
    return value


def _unexpected(name: str, expected: str, found: object) -> GeometryError:
    return GeometryError(f"{name}: expected {expected}, found {reprlib.repr(found)}")


def positive(name: str, value: object, most: int = MOST) -> int:
    """``value``, which is called ``name``, if it is a whole number of 1 to ``most``.

    Raises:
        GeometryError: It is anything else.
    """
    if type(value) is not int or not 0 < value <= most:
        raise _unexpected(name, f"a positive whole number up to {most:,}", value)
    return value


@dataclass(frozen=True)
class _Reader:
    """Fields of a configuration, each strictly of the kind that is asked for.

    A field that is null is one that is not given. Errors name the field.

    Attributes:
        config: The fields.
        path: What comes before their names in errors.
        architecture: For errors.
    """

    config: Mapping[str, Any]
    path: str = ""
    architecture: str = ""

    def _value(self, name: str, kind: type, expected: str) -> Any:
        value = self.config.get(name)
        if value is not None and type(value) is not kind:
            raise _unexpected(self.path + name, expected, value)
        return value

    def flag(self, name: str) -> bool:
        return bool(self._value(name, bool, "true or false"))

    def text(self, name: str) -> str:
        return self._value(name, str, "a string") or ""

    def texts(self, name: str) -> list[str]:
        values = self._value(name, list, "a list of strings") or []
        if any(type(value) is not str for value in values):
            raise _unexpected(self.path + name, "a list of strings", values)
        return values

    def part(self, name: str) -> _Reader:
        """The fields of an object."""
        fields = self._value(name, dict, "an object") or {}
        return replace(self, config=fields, path=f"{self.path}{name}.")

    def parts(self, name: str) -> list[_Reader]:
        """The fields of each object of a list."""
        values = self._value(name, list, "a list of objects") or []
        named = {f"{name}[{index}]": value for index, value in enumerate(values)}
        return [replace(self, config=named).part(each) for each in named]

    def count(self, *names: str, default: int | None = None, most: int = MOST) -> int:
        """The first of ``names`` that is given, a positive whole number."""
        for name in names:
            if self.config.get(name) is not None:
                return positive(self.path + name, self.config[name], most)
        if default is not None:
            return default
        raise GeometryError(
            f"{self.architecture}: the configuration lacks {self.path}"
            f"{' or '.join(names)}; add it, or give --layers, --kv-heads and --head-dim"
        )

    def num_layers(self) -> int:
        return self.count("num_hidden_layers", most=MOST_LAYERS)


@dataclass(frozen=True)
class _Family:
    """How one kind of architecture says what its layers keep.

    Attributes:
        read: From the fields and the bytes of an element to layers, before tensor
            parallelism.
        defaults: What the configuration class in transformers fills in, for the
            fields that published checkpoints leave out.
    """

    read: Callable[[_Reader, int], list[Layer]]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def read_layers(
    config: Mapping[str, Any],
    *,
    tensor_parallel: int = 1,
    kv_cache_dtype: str = "auto",
    dtype: str | None = None,
) -> list[Layer]:
    """The layers of a model that keep keys and values, in order, on one rank.

    Args:
        config: The contents of ``config.json``.
        tensor_parallel: Ranks that share the heads.
        kv_cache_dtype: As vLLM's ``--kv-cache-dtype``; ``auto`` is the one that the
            checkpoint declares, else the model's own.
        dtype: As vLLM's ``--dtype``, for configurations that do not say.

    Raises:
        GeometryError: Not an architecture of :data:`ARCHITECTURES`, a field that is
            missing or impossible, or heads that cannot be shared evenly.
    """
    whole = _Reader(config)
    architecture = next(iter(whole.texts("architectures")), "")
    fields = whole if config.get("text_config") is None else whole.part("text_config")
    family = ARCHITECTURES.get(architecture)
    if family is None:
        raise GeometryError(_not_known(fields, architecture))
    reader = replace(
        fields,
        config={**family.defaults, **_given(fields.config)},
        architecture=architecture,
    )
    if kv_cache_dtype == "auto":
        kv_cache_dtype = _declared_cache_dtype(whole, fields, family is _LATENT)
    element_bytes = _element_bytes(whole, fields, kv_cache_dtype, dtype)
    return shard(family.read(reader, element_bytes), tensor_parallel)


def uniform_layers(
    num_layers: int,
    kv_heads: list[int],
    head_dim: int,
    *,
    tensor_parallel: int = 1,
    kv_cache_dtype: str = "auto",
    dtype: str | None = None,
) -> list[Layer]:
    """Full-attention layers from numbers: one head count for all, or one for each.

    Raises:
        GeometryError: The numbers do not fit each other.
    """
    if len(kv_heads) == 1:
        kv_heads = kv_heads * num_layers
    if len(kv_heads) != num_layers:
        raise GeometryError(
            f"--kv-heads names {len(kv_heads)} layers, --layers says {num_layers}; "
            "give one number, or one for each layer"
        )
    nothing = _Reader({})
    element_bytes = _element_bytes(nothing, nothing, kv_cache_dtype, dtype)
    layers = [
        Layer(num_kv_heads=heads, head_bytes=2 * head_dim * element_bytes)
        for heads in kv_heads
    ]
    return shard(layers, tensor_parallel)


def shard(layers: list[Layer], tensor_parallel: int) -> list[Layer]:
    """``layers`` on one of ``tensor_parallel`` ranks.

    ``max(1, heads // ranks)`` as ``ModelConfig.get_num_kv_heads`` (config/model.py):
    fewer heads than ranks are replicated. A latent cache is whole on every rank.

    Raises:
        GeometryError: vLLM's models refuse what does not divide evenly.
    """
    sharded = []
    for layer in layers:
        heads = layer.num_kv_heads
        if layer.latent:
            sharded.append(layer)
            continue
        if max(heads, tensor_parallel) % min(heads, tensor_parallel):
            raise GeometryError(
                f"{heads} KV heads cannot be shared by {tensor_parallel} ranks: one "
                "must be a multiple of the other; choose another --tp"
            )
        sharded.append(
            Layer(
                num_kv_heads=max(1, heads // tensor_parallel),
                head_bytes=layer.head_bytes,
                window=layer.window,
            )
        )
    return sharded


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _declared_cache_dtype(config: _Reader, fields: _Reader, latent: bool) -> str:
    """What vLLM makes of ``auto``: the cache dtype that the checkpoint declares.

    ModelOpt's as ``get_kv_cache_quant_algo_string`` (utils/torch_utils.py), but what
    that falls back from is refused; compressed-tensors' as ``Attention``
    (layers/attention/attention.py), which ``MLAAttention`` has no part in. vLLM 0.32
    and 0.33 heed no other method's.
    """
    found = config.part("quantization_config")
    # get_quant_config's order (model_loader/weight_utils.py), ModelOpt only the first.
    if not found.config:
        found = fields.part("quantization_config")
    if not found.config:
        found = config.part("compression_config")
    method = found.text("quant_method").lower().replace("_", "-")
    # Without a method in ModelOpt's own file
    # (transformers_utils/model_arch_config_convertor.py).
    if found.part("producer").config.get("name") == "modelopt":
        method = "modelopt"
    scheme: object = None
    if method.startswith("modelopt"):
        inner = found.part("quantization")
        for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
            scheme = scheme or inner.config.get(name) or found.config.get(name)
    elif method == "compressed-tensors" and not latent:
        scheme = found.config.get("kv_cache_scheme")
    if scheme is None:
        return "auto"
    if isinstance(scheme, str) and scheme.lower() == "fp8":
        return "fp8_e4m3"
    if isinstance(scheme, dict):
        static = method == "compressed-tensors" or scheme.get("dynamic") is False
        if static and (scheme.get("num_bits"), scheme.get("type")) == (8, "float"):
            return "fp8_e4m3"
    raise GeometryError(
        f"the checkpoint declares a KV cache in {reprlib.repr(scheme)}, which is not "
        "planned for; give --kv-cache-dtype"
    )


def _element_bytes(
    config: _Reader, fields: _Reader, kv_cache_dtype: str, dtype: str | None
) -> int:
    if kv_cache_dtype != "auto":
        try:
            return _BYTES_OF_CACHE_DTYPE[kv_cache_dtype]
        except KeyError:
            raise GeometryError(
                f"--kv-cache-dtype {kv_cache_dtype}: its size depends on the attention "
                f"backend; known: auto, {', '.join(_BYTES_OF_CACHE_DTYPE)}"
            ) from None
    name = dtype
    for source in (config, fields):
        # transformers 5 writes "dtype", earlier ones "torch_dtype".
        name = name or source.text("dtype") or source.text("torch_dtype")
    if not name:
        raise GeometryError(
            "the configuration does not say the model's dtype; give --dtype bfloat16 "
            "or --kv-cache-dtype"
        )
    try:
        return _BYTES_OF_DTYPE[name.removeprefix("torch.")]
    except KeyError:
        raise GeometryError(
            f"dtype {name!r} is not known; known: {', '.join(_BYTES_OF_DTYPE)}"
        ) from None


_RECURRENT = ("mamba", "ssm_", "linear_num_", "linear_attn", "conv_kernel")


def _not_known(fields: _Reader, architecture: str) -> str:
    way_out = "give --layers, --kv-heads and --head-dim instead"
    kinds = {*fields.texts("layer_types"), *fields.texts("layers_block_type")}
    recurrent = sorted(
        {name for name in fields.config if name.startswith(_RECURRENT)}
        | {kind for kind in kinds if "mamba" in kind or "linear" in kind}
        | ({"hybrid_override_pattern"} & set(fields.config))
    )
    if recurrent:
        return (
            f"{architecture} keeps recurrent state ({', '.join(recurrent[:3])}): its "
            "size comes from vLLM's model class and is not in the configuration; "
            "start vLLM with kvpad and read its log line instead"
        )
    if not architecture:
        return f"the configuration does not name an architecture; {way_out}"
    return (
        f"{architecture} is not an architecture that kvpad can plan for; if all of its "
        f"layers are full attention, {way_out}. Known: "
        f"{', '.join(name.removesuffix('ForCausalLM') for name in ARCHITECTURES)}"
    )


# --- Architectures, each as vLLM's model class reads it ------------------------------


def _grouped_query(reader: _Reader, element_bytes: int) -> list[Layer]:
    """Layers that are all alike; a window that all of them have changes no byte."""
    kinds = set(reader.texts("layer_types"))
    if len(kinds) > 1:
        raise GeometryError(
            f"{reader.architecture} with layer_types {sorted(kinds)}: vLLM's model "
            "class does not read them"
        )
    if reader.flag("use_sliding_window"):
        raise GeometryError(
            f"{reader.architecture} with use_sliding_window: which layers have the "
            "window is not planned for"
        )
    return [_attention(reader, element_bytes)] * reader.num_layers()


def _by_layer_types(reader: _Reader, element_bytes: int) -> list[Layer]:
    """``layer_types`` says which layers have the sliding window."""
    kinds = reader.texts("layer_types")
    num_layers = reader.num_layers()
    if len(set(kinds)) <= 1:
        return _grouped_query(reader, element_bytes)
    return _mixed(reader, element_bytes, kinds, num_layers)


def _by_pattern(default: int) -> Callable[[_Reader, int], list[Layer]]:
    """``layer_types``, or every n-th layer full (``sliding_window_pattern``)."""

    def read(reader: _Reader, element_bytes: int) -> list[Layer]:
        num_layers = reader.num_layers()
        kinds = reader.texts("layer_types")
        if not kinds:
            pattern = reader.count("sliding_window_pattern", default=default)
            kinds = [
                "sliding_attention" if (index + 1) % pattern else "full_attention"
                for index in range(num_layers)
            ]
        return _mixed(reader, element_bytes, kinds, num_layers)

    return read


def _mixed(
    reader: _Reader, element_bytes: int, kinds: list[str], num_layers: int
) -> list[Layer]:
    if len(kinds) != num_layers:
        raise GeometryError(
            f"layer_types names {len(kinds)} layers, num_hidden_layers says "
            f"{num_layers}"
        )
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise GeometryError(f"layer_types has {sorted(unknown)}, not planned for")
    window = reader.count("sliding_window")
    plain = _attention(reader, element_bytes)
    return [
        Layer(
            num_kv_heads=plain.num_kv_heads,
            head_bytes=plain.head_bytes,
            window=window if kind == "sliding_attention" else None,
        )
        for kind in kinds
    ]


def _attention(reader: _Reader, element_bytes: int) -> Layer:
    # vLLM's get_total_num_kv_heads and get_head_size
    # (transformers_utils/model_arch_config_convertor.py).
    if "head_dim" in reader.config:
        head_dim = reader.count("head_dim")
    else:
        hidden = reader.count("hidden_size", "head_dim")
        heads = reader.count("num_attention_heads")
        head_dim = positive("hidden_size // num_attention_heads", hidden // heads)
    return Layer(
        num_kv_heads=reader.count("num_key_value_heads", "num_attention_heads"),
        head_bytes=2 * head_dim * element_bytes,
    )


def _latent(reader: _Reader, element_bytes: int) -> list[Layer]:
    """DeepSeek's MLA: one latent vector and one rotary key for a token."""
    width = reader.count("kv_lora_rank") + reader.count("qk_rope_head_dim")
    layer = Layer(num_kv_heads=1, head_bytes=width * element_bytes, latent=True)
    num_layers = reader.num_layers()
    if "index_topk" not in reader.config:
        return [layer] * num_layers
    if element_bytes == 1:
        raise GeometryError(
            f"{reader.architecture} with sparse attention and an fp8 cache packs "
            "latent, key and scales as its backend likes; plan with "
            "--kv-cache-dtype bfloat16"
        )
    if shared := {"index_topk_freq", "index_topk_pattern"} & set(reader.config):
        raise GeometryError(
            f"{reader.architecture} with {', '.join(sorted(shared))}: which layers "
            "share an indexer is not planned for"
        )
    # Beside each layer an indexer: fp8 keys and a float32 scale for each 128 of them
    # (models/deepseek_v2.py, Indexer).
    index_dim = reader.count("index_head_dim")
    indexer = Layer(
        num_kv_heads=1,
        head_bytes=index_dim + index_dim // 128 * 4,
        latent=True,
        indexer=True,
    )
    return [each for _ in range(num_layers) for each in (layer, indexer)]


def _block_configs(reader: _Reader, element_bytes: int) -> list[Layer]:
    """Nemotron from architecture search: heads differ by layer, some have none."""
    blocks = reader.parts("block_configs")
    num_layers = reader.num_layers()
    heads = reader.count("num_attention_heads")
    if len(blocks) != num_layers:
        raise GeometryError(
            f"block_configs names {len(blocks)} layers, num_hidden_layers says "
            f"{num_layers}"
        )
    head_bytes = _attention(reader, element_bytes).head_bytes
    layers = []
    for block in blocks:
        attention = block.part("attention")
        if attention.flag("no_op"):
            continue
        group = attention.count("n_heads_in_group", most=heads)
        layers.append(Layer(num_kv_heads=heads // group, head_bytes=head_bytes))
    if not layers:
        raise GeometryError(f"{reader.architecture}: no layer has attention")
    return layers


_PLAIN = _Family(_grouped_query)
_TYPED = _Family(_by_layer_types)
_LATENT = _Family(_latent)

# Published configurations leave these out (Gemma-3-4B's gives neither the number of
# heads nor their size); transformers fills them in (configuration_gemma3.py).
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}

ARCHITECTURES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _TYPED,
    "MistralForCausalLM": _TYPED,
    "Mistral3ForConditionalGeneration": _TYPED,
    "MixtralForCausalLM": _PLAIN,
    "Phi3ForCausalLM": _PLAIN,
    "Qwen2ForCausalLM": _PLAIN,
    "Qwen2MoeForCausalLM": _PLAIN,
    # Not hidden_size / heads where it is left out: transformers assumes 128.
    "Qwen3ForCausalLM": _Family(_grouped_query, {"head_dim": 128}),
    "Qwen3MoeForCausalLM": _PLAIN,
    "Glm4MoeForCausalLM": _PLAIN,
    "GptOssForCausalLM": _Family(_by_pattern(2), {"head_dim": 64}),
    "Gemma2ForCausalLM": _Family(_by_pattern(2), _GEMMA_DEFAULTS),
    "Gemma3ForCausalLM": _Family(_by_pattern(6), _GEMMA_DEFAULTS),
    "Gemma3ForConditionalGeneration": _Family(_by_pattern(6), _GEMMA_DEFAULTS),
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _LATENT,
    "DeciLMForCausalLM": _Family(_block_configs),
}
"""How each architecture that can be planned says what its layers keep."""


# --- Placing -------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Where the layers lie: what :mod:`vllm_kvpad.placement` works on.

    ``config`` and ``layout`` are vLLM's ``KVCacheConfig`` and ``KVCacheLayout``, or,
    without vLLM, objects with the same fields.
    """

    config: Any
    layout: Any


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The layers of one rank and how they are to be placed.

    Attributes:
        layers: From :func:`read_layers` or :func:`uniform_layers`.
        block_size: Tokens in a block.
        layout: One of :data:`LAYOUTS`.
        hybrid: Whether layers with a window get groups of their own (vLLM's hybrid
            KV cache manager, on unless ``--disable-hybrid-kv-cache-manager`` or the
            connector turns it off).
    """

    layers: list[Layer]
    block_size: int = 16
    layout: str = "LBNHC"
    hybrid: bool = True

    def place(self, num_blocks: int, *, use_vllm: bool | None = None) -> Placement:
        """Place ``num_blocks`` blocks.

        Args:
            num_blocks: Blocks, at least 1.
            use_vllm: Whether vLLM does it; None: if it is installed.

        Raises:
            GeometryError: The layout cannot hold these layers, or placing them takes
                vLLM and it is not installed.
        """
        if use_vllm is None:
            use_vllm = importlib.util.find_spec("vllm") is not None
        return (_place_by_vllm if use_vllm else _place_alike)(self, num_blocks)


def _layer_name(index: int, layer: Layer) -> str:
    return f"model.layers.{index}.{'indexer.k_cache' if layer.indexer else 'attn'}"


def _place_by_vllm(geometry: Geometry, num_blocks: int) -> Placement:
    """By vLLM's grouping and placing functions, as the engine core calls them."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        try:
            from vllm.v1.core import kv_cache_planning as planning
        except ImportError:  # 0.32
            from vllm.v1.core import kv_cache_utils as planning
    except Exception as error:
        # Any: a vLLM that does not match its torch fails in many ways.
        raise GeometryError(
            f"the installed vLLM does not import ({type(error).__name__}: {error}); "
            "`vllm-kvpad doctor` says more"
        ) from error
    layout = KVCacheLayout[geometry.layout]
    specs = {
        _layer_name(index, layer): _spec(layer, geometry.block_size)
        for index, layer in enumerate(geometry.layers)
    }
    # All that the two functions read of a VllmConfig, which would want a real model.
    vllm_config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=not geometry.hybrid
        ),
        speculative_config=None,
    )
    try:
        groups = planning.get_kv_cache_groups(vllm_config, specs)
        config = planning.get_kv_cache_config_from_groups(
            vllm_config, groups, available_memory=0
        )
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise GeometryError(f"vLLM cannot place this: {error}") from error
    return Placement(config, layout)


def _spec(layer: Layer, block_size: int) -> Any:
    """vLLM's spec of the layer. Bytes count, so an element is a byte here."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    fields: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": layer.num_kv_heads,
        "dtype": torch.uint8,
    }
    if layer.latent:
        return MLAAttentionSpec(head_size=layer.head_bytes, **fields)
    fields["head_size"] = layer.head_bytes // 2
    if layer.window is not None:
        # Its block size is the primary one wherever the attention backend runs that
        # unsplit (model_executor/layers/attention/attention.py, get_kv_cache_spec).
        return SlidingWindowSpec(sliding_window=layer.window, **fields)
    return FullAttentionSpec(**fields)


@dataclass
class _Tensor:
    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False


@dataclass
class _Group:
    layer_names: list[str]
    kv_cache_spec: Any


@dataclass
class _Config:
    num_blocks: int
    kv_cache_tensors: list[_Tensor]
    kv_cache_groups: list[_Group]
    hisparse_host_num_blocks: None = None


@dataclass(frozen=True)
class _Layout:
    name: str

    @property
    def is_block_outermost(self) -> bool:
        return self.name[0] == "B"

    @property
    def is_layer_compact(self) -> bool:
        return self.name[0] == "L"

    @property
    def is_block_compact(self) -> bool:
        return set(self.name[:2]) == {"L", "B"}


def _place_alike(geometry: Geometry, num_blocks: int) -> Placement:
    """Without vLLM: layers that are all alike are one group and one tensor."""
    first = geometry.layers[0]
    if any(layer != first for layer in geometry.layers):
        raise GeometryError(
            "this model's layers are not all alike, and how they share blocks is "
            "vLLM's decision; run this where vLLM is installed"
        )
    layout = _Layout(geometry.layout)
    heads = first.num_kv_heads
    page = geometry.block_size * first.bytes_per_token
    block = len(geometry.layers) * page
    # Bytes from layer to layer and from block to block: the axes further in.
    strides = {
        "LBHNC": (num_blocks * page, page),
        "LBNHC": (num_blocks * page, page),
        "LHBNC": (num_blocks * page, page // heads),
        "BLHNC": (page, block),
        "BLNHC": (page, block),
        "BHLNC": (page // heads, block),
    }
    layer_stride, block_stride = strides[layout.name]
    names = [_layer_name(index, layer) for index, layer in enumerate(geometry.layers)]
    tensor = _Tensor(num_blocks * block, names, layer_stride, block_stride)
    spec = SimpleNamespace(page_size_bytes=page, num_heads=heads)
    return Placement(_Config(num_blocks, [tensor], [_Group(names, spec)]), layout)


# --- What a budget holds -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a memory budget holds, with block counts rounded and with padding.

    Attributes:
        bytes_per_block: Bytes of a block in all layers.
        memory_bytes: The budget.
        granule_bytes: The driver's granule.
        num_segments: Contiguous ranges; with padding each is one chunk.
        alignment_blocks: What block counts would be rounded to.
        blocks: Blocks the budget holds if memory had no granules.
        rounded_blocks: Blocks that rounding leaves.
        padded_blocks: Blocks whose segments, each in whole granules, fit.
        rounding_lost_bytes: Bytes of the budget that rounding leaves unused.
        padding_lost_bytes: Bytes of the budget that hold no block with padding.
        physical_bytes: Physical memory behind ``padded_blocks``.
        given_physical_bytes: Physical memory behind all ``blocks``: what the cache
            takes where its size is given and the number of blocks is kept.
        address_space_bytes: Addresses that the padded placement takes.
        address_padding_bytes: How many of them padding added.
    """

    bytes_per_block: int
    memory_bytes: int
    granule_bytes: int
    num_segments: int
    alignment_blocks: int
    blocks: int
    rounded_blocks: int
    padded_blocks: int
    rounding_lost_bytes: int
    padding_lost_bytes: int
    physical_bytes: int
    given_physical_bytes: int
    address_space_bytes: int
    address_padding_bytes: int


def footprint(
    geometry: Geometry, memory: int, granule: int, *, use_vllm: bool | None = None
) -> Footprint:
    """What ``memory`` bytes hold of ``geometry``.

    Raises:
        GeometryError: As :meth:`Geometry.place`; the memory holds not even one
            block; the placement cannot be padded (LHBNC whose heads are not whole
            granules).
    """
    padded, plain = place_padded(geometry, memory, granule, use_vllm=use_vllm)
    segments = kv_cache_segments(padded.config, padded.layout)
    per_block = bytes_per_block(segments)
    blocks = plain.config.num_blocks
    left = rounded_blocks(segments, blocks, granule)
    fit = blocks_within(segments, memory, granule)
    return Footprint(
        bytes_per_block=per_block,
        memory_bytes=memory,
        granule_bytes=granule,
        num_segments=len(segments),
        alignment_blocks=block_alignment(segments, granule),
        blocks=blocks,
        rounded_blocks=left,
        padded_blocks=fit,
        rounding_lost_bytes=memory - left * per_block,
        padding_lost_bytes=memory - fit * per_block,
        physical_bytes=physical_bytes(segments, fit, granule),
        given_physical_bytes=physical_bytes(segments, blocks, granule),
        address_space_bytes=allocation_bytes(padded.config),
        address_padding_bytes=padding_bytes(plain.config, padded.config),
    )


def place_padded(
    geometry: Geometry, memory: int, granule: int, *, use_vllm: bool | None = None
) -> tuple[Placement, Placement]:
    """The placement of all blocks that ``memory`` bytes hold: padded, and as planned.

    Raises:
        GeometryError: As :func:`footprint`.
    """
    one = geometry.place(1, use_vllm=use_vllm)
    per_block = bytes_per_block(kv_cache_segments(one.config, one.layout))
    if memory < per_block:
        raise GeometryError(
            f"{format_bytes(memory)} of memory hold not even one block of "
            f"{format_bytes(per_block)}"
        )
    plain = geometry.place(memory // per_block, use_vllm=use_vllm)
    try:
        config = pad_kv_cache_segments(plain.config, plain.layout, granule)
    except ValueError as error:
        raise GeometryError(f"kvpad cannot pad this placement: {error}") from error
    return Placement(config, plain.layout), plain
