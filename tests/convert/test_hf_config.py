"""config.json: the published models, every form a field may take, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aspire_jax import params
from aspire_jax.config import RopeConfig
from aspire_jax.errors import InputError
from convert import read_config
from convert.hf_config import write_hf_config

QWEN3_1_7B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B = {
    **QWEN3_1_7B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}


def _read(folder: Path, config: Any, generation: Any = None) -> Any:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (QWEN3_1_7B, 1_720_574_976),
        (QWEN3_8B, 8_190_735_360),
        (LLAMA_3_1_8B, 8_030_261_248),
        (QWEN2_7B, 7_615_616_512),
        (MISTRAL_7B, 7_248_023_552),
    ],
    ids=["Qwen3-1.7B", "Qwen3-8B", "Llama-3.1-8B", "Qwen2.5-7B", "Mistral-7B-v0.3"],
)
def test_parameter_counts_of_published_models(config: dict[str, Any], count: int, tmp_path: Path) -> None:
    assert params.count(_read(tmp_path, config)) == count


def test_llama_3_1(tmp_path: Path) -> None:
    config = _read(tmp_path, LLAMA_3_1_8B)
    assert (config.head_dim, config.group, config.max_length, config.norm_eps) == (128, 4, 131072, 1e-5)
    assert (config.bos_id, config.eos_ids) == (128000, (128001, 128008, 128009))
    assert config.rope == RopeConfig(
        kind="llama3", theta=500000.0, factor=8.0, original_max_length=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


def test_old_and_new_form_of_the_rope_are_one(tmp_path: Path) -> None:
    old = _read(tmp_path, LLAMA_3_1_8B)
    new = {k: v for k, v in LLAMA_3_1_8B.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new["rope_parameters"] = {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 500000.0}  # type: ignore[dict-item]
    new["dtype"] = "bfloat16"
    assert _read(tmp_path, new) == old


def test_generation_config_adds_its_end_tokens(tmp_path: Path) -> None:
    config = _read(tmp_path, QWEN3_8B, {"eos_token_id": [151645, 151643]})
    assert config.eos_ids == (151645, 151643)


def test_yarn_extends_the_length_and_keeps_the_original(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = _read(tmp_path, {**QWEN3_8B, "rope_scaling": scaling})
    assert config.max_length == 131072
    assert config.rope == RopeConfig(kind="yarn", theta=1e6, factor=4.0, original_max_length=32768)


def test_yarn_without_an_original_length_takes_the_stated_one(tmp_path: Path) -> None:
    config = _read(tmp_path, {**QWEN2_7B, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert (config.rope.original_max_length, config.max_length) == (32768, 65536)


def test_defaults_of_a_bare_llama(tmp_path: Path) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = _read(tmp_path, {"model_type": "llama", **{k: LLAMA_3_1_8B[k] for k in sizes}})
    assert (config.n_kv_heads, config.max_length, config.norm_eps) == (32, 2048, 1e-6)
    assert (config.bos_id, config.eos_ids, config.rope) == (1, (2,), RopeConfig())


def test_windows_without_effect_are_accepted(tmp_path: Path) -> None:
    _read(tmp_path, {**QWEN2_7B, "use_sliding_window": True, "sliding_window": 32768})
    _read(tmp_path, {**QWEN2_7B, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28})
    _read(tmp_path, {**QWEN2_7B, "layer_types": ["full_attention"] * 28})
    _read(tmp_path, {**MISTRAL_7B, "sliding_window": 32768})


YARN = {"rope_type": "yarn", "factor": 4.0}
REFUSED: dict[str, tuple[Any, str]] = {
    "not json": ("{", "config.json"),
    "a list": ("[]", "expected an object"),
    "family": ({"model_type": "gemma2"}, "model_type is 'gemma2', expected one of llama, qwen2, qwen3, mistral"),
    "no family": ({"model_type": None}, "field model_type is missing"),
    "size missing": ({"hidden_size": None}, "field hidden_size is missing, expected a positive whole number"),
    "size text": ({"num_hidden_layers": "32"}, "num_hidden_layers is '32', expected a positive whole number"),
    "size negative": ({"vocab_size": -1}, "vocab_size is -1"),
    "size boolean": ({"vocab_size": True}, "vocab_size is True"),
    "heads": ({"num_key_value_heads": 5}, "n_heads: 32, expected a multiple of n_kv_heads (5)"),
    "head_dim": ({"head_dim": 33}, "head_dim: 33, expected an even number"),
    "uneven": ({"num_attention_heads": 24}, "hidden_size is 4096, expected a multiple of num_attention_heads (24)"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    "tie": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
    "eos": ({"eos_token_id": ["x"]}, "eos_token_id"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected silu"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is True"),
    "experts": ({"num_local_experts": 8}, "a mixture of experts is not supported"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic'"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope'"),
    "rope text": ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
    "rope per layer": ({"rope_parameters": {"full_attention": {}}}, "one rotary embedding for all layers"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "field rope_scaling.factor is missing"),
    "small factor": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5"),
    "llama3 band": (
        {"rope_scaling": {**LLAMA_3_1_8B["rope_scaling"], "high_freq_factor": 1.0}},  # type: ignore[dict-item]
        "high_freq_factor is 1.0, expected more than low_freq_factor",
    ),
    "theta": ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    "layer types": ({"layer_types": ["sliding_attention"]}, "layer_types"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str, tmp_path: Path) -> None:
    change, expected = REFUSED[name]
    config = change if isinstance(change, str) else {**LLAMA_3_1_8B, **change}
    with pytest.raises(InputError) as caught:
        _read(tmp_path, config)
    assert expected in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {**MISTRAL_7B, "sliding_window": 4096},
        {k: v for k, v in MISTRAL_7B.items() if k != "sliding_window"},
        {**QWEN2_7B, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14},
    ],
)
def test_sliding_windows_are_refused_by_name(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sliding_window is 4096"):
        _read(tmp_path, config)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a folder without config\.json"):
        read_config(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        read_config(tmp_path / "nothing")
    (tmp_path / "x.bin").write_bytes(b"abc")
    with pytest.raises(InputError, match="not a GGUF file"):
        read_config(tmp_path / "x.bin")


@pytest.mark.parametrize(
    "config",
    [
        QWEN3_1_7B,
        QWEN3_8B,
        LLAMA_3_1_8B,
        QWEN2_7B,
        MISTRAL_7B,
        {**LLAMA_3_1_8B, "attention_bias": True, "eos_token_id": None},
        {**QWEN3_8B, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False}},
        {**QWEN2_7B, "rope_scaling": {**YARN, "attention_factor": 1.5, "beta_fast": 20, "beta_slow": 2}},
    ],
)
def test_written_configs_read_back(config: dict[str, Any], tmp_path: Path) -> None:
    first = _read(tmp_path, config)
    assert _read(tmp_path, write_hf_config(first, "bfloat16")) == first
