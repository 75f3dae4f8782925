"""What a model's config.json says about its KV cache, against numbers done by hand,
against vLLM's own reading of the same configuration, and without vLLM."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from cli_programs import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvpad.cli.geometry import (
    ARCHITECTURES,
    LAYOUTS,
    Geometry,
    GeometryError,
    _layer_name,
    _spec,
    footprint,
    load_config,
    read_layers,
    uniform_layers,
)
from vllm_kvpad.placement import bytes_per_block, kv_cache_segments

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def config(name: str) -> dict[str, Any]:
    return load_config(CONFIGS / f"{name}.json")


def geometry(name: str, *, tp: int = 1, **fields: Any) -> Geometry:
    # gpt-oss is the one that does not state its dtype.
    layers = read_layers(config(name), tensor_parallel=tp, dtype="bfloat16")
    return Geometry(layers=layers, **fields)


# (model, tensor parallel, bytes of a block of 16 tokens, segments, blocks that end on
# granules of 2 MiB in every segment). A page is 16 tokens x 2 (key, value) x heads x
# elements x 2 bytes; blocks count once for every group of a hybrid model.
BY_HAND = [
    # 3 heads of 576/9 = 64: page 16*2*3*64*2 = 12 KiB, 30 layers; 2 MiB/4 KiB = 512
    ("SmolLM2-135M", 1, 30 * 12 * KIB, 30, 512),
    # 5 heads of 960/15 = 64: page 20 KiB, 32 layers
    ("SmolLM2-360M", 1, 32 * 20 * KIB, 32, 512),
    # 8 heads of 4096/32 = 128: page 64 KiB, 32 layers; 2 MiB/64 KiB = 32
    ("Llama-3.1-8B", 1, 32 * 64 * KIB, 32, 32),
    # 8 heads of 128 on 8 ranks: one head, page 8 KiB, 80 layers
    ("Llama-3.1-70B", 8, 80 * 8 * KIB, 80, 256),
    # head_dim 128 stated (1024/16 would be 64): page 64 KiB, 28 layers
    ("Qwen3-0.6B", 1, 28 * 64 * KIB, 28, 32),
    ("Qwen3-8B", 1, 36 * 64 * KIB, 36, 32),
    # 4 heads of 128: page 32 KiB, 48 layers
    ("Qwen3-30B-A3B", 1, 48 * 32 * KIB, 48, 64),
    # 16 heads of 128: page 128 KiB. 62 layers, every 6th full: 10 full, 52 sliding, in
    # groups of 10; the widest has 10 layers
    ("gemma-3-27b-it", 1, 10 * 128 * KIB, 10, 16),
    # 4 heads of 256 by default: page 64 KiB. 34 layers: 5 full, 29 sliding in 6 groups
    ("gemma-3-4b-it", 1, 5 * 64 * KIB, 5, 32),
    # one head of 256: page 16 KiB. 26 layers: 4 full, 22 sliding in 6 groups of 4
    ("gemma-3-1b-it", 1, 4 * 16 * KIB, 4, 128),
    # 512 + 64 elements for a token: page 16*576*2 = 18 KiB, 61 layers; 18 KiB and
    # 2 MiB share 2 KiB, 2 MiB/2 KiB = 1024; the same on each of 8 ranks
    ("DeepSeek-V3", 1, 61 * 18 * KIB, 61, 1024),
    ("DeepSeek-V3", 8, 61 * 18 * KIB, 61, 1024),
    # beside each an indexer of 128 + 4 bytes for a token: page 2112 = 64 * 33,
    # 2 MiB/64 = 32768
    ("DeepSeek-V3.2-Exp", 1, 61 * (18 * KIB + 2112), 122, 32768),
    # 8 heads of 64: page 32 KiB. 36 layers, every other full: two groups of 18
    ("gpt-oss-120b", 1, 18 * 32 * KIB, 18, 64),
    ("gpt-oss-120b", 8, 18 * 4 * KIB, 18, 512),
]


@pytest.mark.parametrize(("name", "tp", "per_block", "segments", "period"), BY_HAND)
def test_models_by_hand(
    name: str, tp: int, per_block: int, segments: int, period: int
) -> None:
    found = footprint(geometry(name, tp=tp), 40 * GIB, 2 * MIB)
    assert found.bytes_per_block == per_block
    assert found.num_segments == segments
    assert found.alignment_blocks == period
    assert found.blocks == 40 * GIB // per_block
    assert found.rounded_blocks == found.blocks // period * period


def test_the_case_of_102_blocks() -> None:
    # vLLM issue 65204: SmolLM2-360M's 20 KiB pages in 64 MiB, a granule for each layer.
    found = footprint(geometry("SmolLM2-360M"), 64 * MIB, 2 * MIB)
    # 64 MiB / 640 KiB = 102.4; 102 pages are 2040 KiB, less than one granule
    assert (found.blocks, found.rounded_blocks, found.padded_blocks) == (102, 0, 102)
    assert found.rounding_lost_bytes == 64 * MIB
    assert found.padding_lost_bytes == 64 * MIB - 102 * 640 * KIB
    assert found.physical_bytes == found.given_physical_bytes == 64 * MIB
    # each of 32 regions of 2040 KiB starts on a granule: 8 KiB more each
    assert found.address_padding_bytes == 32 * 8 * KIB


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda p: p.stem)
def test_every_configuration_is_one_of_those_by_hand_or_refused(path: Any) -> None:
    known = {name for name, *_ in BY_HAND}
    assert path.stem in known or path.stem in {"Zamba2-1.2B"}


# --- the same as vLLM


@pytest.mark.parametrize(
    "name", sorted({name for name, *_ in BY_HAND} - {"DeepSeek-V3.2-Exp"})
)
def test_fields_are_read_as_vllm_and_transformers_read_them(name: str) -> None:
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.model_arch_config_convertor import (
        ModelArchConfigConvertorBase,
    )

    raw = config(name)
    whole = CONFIG_MAPPING[raw["model_type"]](**raw)
    text = whole.get_text_config()
    vllm = ModelArchConfigConvertorBase(whole, text)
    layers = read_layers(raw, dtype="bfloat16")
    assert len(layers) == vllm.get_num_hidden_layers()
    if vllm.is_deepseek_mla():
        assert {layer.bytes_per_token for layer in layers} == {2 * vllm.get_head_size()}
        return
    assert {layer.num_kv_heads for layer in layers} == {vllm.get_total_num_kv_heads()}
    assert {layer.head_bytes for layer in layers} == {2 * 2 * vllm.get_head_size()}
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    assert [layer.window for layer in layers] == [
        text.sliding_window if kind == "sliding_attention" else None for kind in kinds
    ]


def tensors(placed: Any) -> list[tuple[Any, ...]]:
    return [
        (each.size, each.layers, each.layer_stride, each.block_stride, each.offset)
        for each in placed.config.kv_cache_tensors
    ]


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    num_layers=st.integers(1, 90),
    heads=st.integers(1, 16),
    head_dim=st.sampled_from([8, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 16, 32, 128]),
    num_blocks=st.integers(1, 5000),
)
def test_without_vllm_equal_layers_lie_as_vllm_places_them(
    layout: str,
    num_layers: int,
    heads: int,
    head_dim: int,
    block_size: int,
    num_blocks: int,
) -> None:
    layers = uniform_layers(num_layers, [heads], head_dim, dtype="bfloat16")
    made = Geometry(layers=layers, block_size=block_size, layout=layout)
    own = made.place(num_blocks, use_vllm=False)
    vllm = made.place(num_blocks, use_vllm=True)
    assert tensors(own) == tensors(vllm)
    assert kv_cache_segments(own.config, own.layout) == kv_cache_segments(
        vllm.config, vllm.layout
    )


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "DeepSeek-V3"])
def test_without_vllm_a_footprint_is_the_same(name: str) -> None:
    for layout in ("LBHNC", "BLNHC"):
        made = geometry(name, layout=layout)
        assert footprint(made, 7 * GIB, 2 * MIB, use_vllm=False) == footprint(
            made, 7 * GIB, 2 * MIB, use_vllm=True
        )


@pytest.mark.parametrize("name", ["gemma-3-27b-it", "DeepSeek-V3.2-Exp"])
def test_without_vllm_unequal_layers_are_refused(name: str) -> None:
    with pytest.raises(GeometryError, match="where vLLM is installed"):
        geometry(name).place(10, use_vllm=False)


def test_layers_with_a_window_join_the_others_without_the_hybrid_manager() -> None:
    found = footprint(geometry("gemma-3-27b-it", hybrid=False), 40 * GIB, 2 * MIB)
    assert found.num_segments == 62
    assert found.bytes_per_block == 62 * 128 * KIB


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("SmolLM2-360M", "LBNHC"),
        ("gemma-3-27b-it", "LBHNC"),
        ("gpt-oss-120b", "BLHNC"),
        ("DeepSeek-V3.2-Exp", "BLHNC"),
        ("DeepSeek-V3.2-Exp", "LBHNC"),
    ],
)
def test_what_stands_for_vllms_configuration_plans_as_the_real_one(
    name: str, layout: str, hybrid: bool
) -> None:
    from vllm.config import CacheConfig, VllmConfig

    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:  # vLLM 0.32
        from vllm.v1.core import kv_cache_utils as planning

    made = geometry(name, layout=layout, hybrid=hybrid)
    real = VllmConfig(
        cache_config=CacheConfig(block_size=16, num_gpu_blocks_override=77)
    )
    real.cache_config.kv_cache_layout = layout
    real.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
    specs = {
        _layer_name(index, layer): _spec(layer, 16)
        for index, layer in enumerate(made.layers)
    }
    groups = planning.get_kv_cache_groups(real, specs)
    planned = planning.get_kv_cache_config_from_groups(real, groups, available_memory=0)
    placed = made.place(77)
    assert placed.config.kv_cache_tensors == planned.kv_cache_tensors
    assert placed.config.kv_cache_groups == planned.kv_cache_groups
    assert placed.config.num_blocks == planned.num_blocks == 77


# --- what can be said of any geometry


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    head_dim=st.sampled_from([64, 80, 128]),
    memory=st.integers(32 * MIB, 4 * GIB),
    granule=st.sampled_from([4 * KIB, 64 * KIB, 2 * MIB]),
    layout=st.sampled_from(["LBHNC", "LBNHC", "BLHNC"]),
)
def test_padding_never_holds_less_than_rounding_and_never_takes_more_than_given(
    kv_heads: list[int], head_dim: int, memory: int, granule: int, layout: str
) -> None:
    layers = uniform_layers(len(kv_heads), kv_heads, head_dim, dtype="bfloat16")
    found = footprint(Geometry(layers=layers, layout=layout), memory, granule)
    assert found.rounded_blocks <= found.padded_blocks <= found.blocks
    assert found.physical_bytes <= memory
    assert found.physical_bytes <= found.given_physical_bytes
    assert found.given_physical_bytes < (
        found.blocks * found.bytes_per_block + found.num_segments * granule
    )
    assert found.rounding_lost_bytes >= found.padding_lost_bytes >= 0
    # one granule a segment and one block
    assert found.padding_lost_bytes < (
        found.num_segments * granule + found.bytes_per_block
    )
    assert 0 <= found.address_padding_bytes < found.num_segments * granule


def test_a_layer_for_each_number_of_heads_mixes_strides() -> None:
    layers = uniform_layers(4, [8, 8, 4, 2], 64, dtype="bfloat16")
    placed = Geometry(layers=layers, layout="LBHNC").place(10)
    segments = kv_cache_segments(placed.config, placed.layout)
    # 16 tokens x 2 x heads x 64 x 2 bytes
    strides = [each.block_stride // (4 * KIB) for each in segments]
    assert sorted(strides) == [2, 4, 8, 8]
    assert bytes_per_block(segments) == 22 * 4 * KIB


def test_fp8_halves_a_block() -> None:
    made = [
        Geometry(layers=read_layers(config("Llama-3.1-8B"), kv_cache_dtype=dtype))
        for dtype in ("auto", "fp8")
    ]
    full, half = (footprint(each, GIB, 2 * MIB).bytes_per_block for each in made)
    assert full == 2 * half


FLOAT8 = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
MODELOPT = {"quant_method": "modelopt"}
COMPRESSED = {"quant_method": "compressed-tensors"}
DECLARED = [
    ({**MODELOPT, "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, 1),
    ({"quant_method": "modelopt_fp4", "kv_cache_scheme": FLOAT8}, 1),
    ({**MODELOPT, "quantization": {"kv_cache_quant_algo": "FP8"}}, 1),
    ({**MODELOPT, "kv_cache_quant_algo": None}, 2),
    (
        {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        },
        1,
    ),
    ({**COMPRESSED, "kv_cache_scheme": FLOAT8}, 1),
    ({**COMPRESSED, "kv_cache_scheme": None}, 2),
    ({"quant_method": "fp8", "kv_cache_scheme": "static"}, 2),
    ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, None),
    ({**MODELOPT, "kv_cache_quant_algo": "INT8"}, None),
    ({**MODELOPT, "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, None),
    ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, None),
]


@pytest.mark.parametrize(("declared", "element_bytes"), DECLARED)
def test_auto_is_what_the_checkpoint_declares(
    declared: dict[str, Any], element_bytes: int | None
) -> None:
    raw = {**LLAMA, "quantization_config": declared}
    if element_bytes is None:
        with pytest.raises(GeometryError, match=r"declares .*--kv-cache-dtype"):
            read_layers(raw)
    else:
        # key and value of 512 / 8 elements
        assert read_layers(raw)[0].head_bytes == 2 * 64 * element_bytes
    given = read_layers(raw, kv_cache_dtype="bfloat16")
    assert given[0].head_bytes == 2 * 64 * 2


def test_compressed_tensors_leave_a_latent_cache_alone() -> None:
    raw = config("DeepSeek-V3")
    scheme = {**COMPRESSED, "kv_cache_scheme": FLOAT8}
    assert read_layers({**raw, "quantization_config": scheme}) == read_layers(raw)


def test_modelopts_own_file_beside_the_configuration_is_read(tmp_path: Path) -> None:
    algorithms = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    declared = {"producer": {"name": "modelopt"}, "quantization": algorithms}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared))
    assert read_layers(load_config(tmp_path))[0].head_bytes == 2 * 64


# --- tensor parallelism


@pytest.mark.parametrize(
    ("heads", "ranks", "left"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (1, 4, 1)]
)
def test_heads_are_shared_and_replicated_when_there_are_too_few(
    heads: int, ranks: int, left: int
) -> None:
    layers = uniform_layers(1, [heads], 64, tensor_parallel=ranks, dtype="bfloat16")
    assert layers[0].num_kv_heads == left


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (6, 4), (4, 6)])
def test_heads_that_cannot_be_shared_evenly_are_refused(heads: int, ranks: int) -> None:
    with pytest.raises(GeometryError, match=f"{heads} KV heads"):
        uniform_layers(1, [heads], 64, tensor_parallel=ranks, dtype="bfloat16")


# --- architectures that differ from layer to layer


def test_layers_without_attention_have_no_cache() -> None:
    raw = {
        "architectures": ["DeciLMForCausalLM"],
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 3,
        "torch_dtype": "bfloat16",
        "block_configs": [
            {"attention": {"n_heads_in_group": 2, "no_op": False}},
            {"attention": {"n_heads_in_group": None, "no_op": True}},
            {"attention": {"n_heads_in_group": 8, "no_op": False}},
        ],
    }
    assert [layer.num_kv_heads for layer in read_layers(raw)] == [8, 2]


def test_every_nth_layer_is_full_where_only_a_pattern_is_given() -> None:
    layers = read_layers(config("gemma-3-1b-it"))
    full = [index for index, layer in enumerate(layers) if layer.window is None]
    assert full == [5, 11, 17, 23]


# --- what cannot be derived


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": None}, "does not name an architecture"),
        ({"architectures": ["NewForCausalLM"]}, "NewForCausalLM is not"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers: expected a positive whole"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: .* up to 10,000"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list"),
        ({"architectures": {"a": 1}}, "architectures: expected a list"),
        ({"architectures": [5]}, "architectures: expected a list of strings"),
        ({"text_config": 5}, "text_config: expected an object"),
        (
            {"text_config": {"num_hidden_layers": 0}},
            r"text_config\.num_hidden_layers: ",
        ),
        ({"text_config": {}}, r"lacks text_config\.num_hidden_layers"),
        ({"hidden_size": 7}, "hidden_size // num_attention_heads: .* found 0"),
        ({"torch_dtype": ["bfloat16"]}, "torch_dtype: expected a string"),
        ({"layer_types": 5}, "layer_types: expected a list of strings"),
        ({"layer_types": [{}] * 4}, "layer_types: expected a list of strings"),
        ({"layer_types": [["x"]] * 4}, "layer_types: expected a list of strings"),
        (
            {"architectures": ["NewForCausalLM"], "layer_types": [["mamba"]]},
            "layer_types: expected a list of strings",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": "no"},
            "use_sliding_window: expected true or false",
        ),
        (
            {"num_key_value_heads": None, "num_attention_heads": None, "head_dim": 64},
            "lacks num_key_value_heads or num_attention_heads",
        ),
        ({"hidden_size": None}, "lacks hidden_size or head_dim"),
        ({"num_attention_heads": None}, "lacks num_attention_heads"),
        ({"torch_dtype": None}, "dtype"),
        ({"torch_dtype": "int3"}, "'int3' is not known"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "names 2 layers"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "lacks sliding_window",
        ),
        (
            {
                "architectures": ["Qwen3NextForCausalLM"],
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            },
            r"recurrent state \(linear_attention",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
            "use_sliding_window",
        ),
    ],
)
def test_what_is_missing_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        read_layers({**LLAMA, **change})


NOT_COUNTS = ["64", [64], {}, 64.5, True, False, 0, -5, 1 << 31, 10**400]
NOT_COUNTS += [float(value) for value in ("nan", "inf")]


@pytest.mark.parametrize("value", NOT_COUNTS, ids=lambda value: f"{value!r:.9}")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("head_dim", {}),
        ("hidden_size", {}),
        ("num_hidden_layers", {}),
        ("num_key_value_heads", {}),
        ("num_attention_heads", {"num_key_value_heads": None}),
        ("num_attention_heads", {"num_key_value_heads": None, "head_dim": 64}),
        (
            "sliding_window",
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
        ),
        ("sliding_window_pattern", {"architectures": ["Gemma3ForCausalLM"]}),
        ("kv_lora_rank", {"architectures": ["DeepseekV3ForCausalLM"]}),
    ],
)
def test_a_count_is_a_positive_whole_number(
    name: str, change: dict[str, Any], value: object
) -> None:
    with pytest.raises(GeometryError, match=f"^{name}: expected a positive whole"):
        read_layers({**LLAMA, **change, name: value})


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (5, "block_configs: expected a list of objects"),
        ([1] * 4, r"block_configs\[0\]: expected an object"),
        ([{"attention": 5}] * 4, r"block_configs\[0\]\.attention: expected an object"),
        ([{"attention": None}] * 4, r"lacks block_configs\[0\]\.attention\.n_heads_in"),
        ([{"attention": {"n_heads_in_group": 9}}] * 4, "n_heads_in_group: .* up to 8"),
        ([{"attention": {"no_op": "yes"}}] * 4, "no_op: expected true or false"),
        ([{"attention": {"no_op": True}}] * 4, "no layer has attention"),
        ([], "block_configs names 0 layers"),
    ],
)
def test_block_configs_are_strictly_read(blocks: object, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        read_layers(
            {**LLAMA, "architectures": ["DeciLMForCausalLM"], "block_configs": blocks}
        )


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["attention", "no_op", "type"]), inner)
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([name for name, *_ in BY_HAND] + ["LLAMA"]),
    data=st.data(),
    tp=st.integers(1, 9),
)
def test_any_value_in_any_field_is_planned_or_refused(
    name: str, data: st.DataObject, tp: int
) -> None:
    raw = LLAMA if name == "LLAMA" else config(name)
    fields = raw | raw.get("text_config", {})
    changes = st.dictionaries(st.sampled_from(sorted(fields)), ANY_JSON, max_size=3)
    changed = {**fields, "text_config": None, **data.draw(changes)}
    with contextlib.suppress(GeometryError):
        layers = read_layers(changed, tensor_parallel=tp, dtype="bfloat16")
        footprint(Geometry(layers=layers), GIB, 2 * MIB)


def test_recurrent_state_is_not_guessed() -> None:
    with pytest.raises(GeometryError, match=r"recurrent state \(mamba_d_conv"):
        read_layers(config("Zamba2-1.2B"))


def test_sparse_attention_in_fp8_is_not_guessed() -> None:
    with pytest.raises(GeometryError, match="packs"):
        read_layers(config("DeepSeek-V3.2-Exp"), kv_cache_dtype="fp8")


def test_a_cache_dtype_of_the_backend_is_not_guessed() -> None:
    with pytest.raises(GeometryError, match="nvfp4"):
        read_layers(LLAMA, kv_cache_dtype="nvfp4")


def test_memory_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(GeometryError, match="not even one block"):
        footprint(geometry("Llama-3.1-8B"), MIB, 2 * MIB)


def test_heads_outside_blocks_that_are_not_whole_granules_are_refused() -> None:
    with pytest.raises(GeometryError, match="head runs"):
        footprint(geometry("SmolLM2-360M", layout="LHBNC"), GIB, 2 * MIB)


def test_every_architecture_is_one_that_vllm_has() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    assert set(ARCHITECTURES) <= set(ModelRegistry.get_supported_archs())
