"""One frozen description of a model, read from Hugging Face or GGUF metadata."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary frequencies for contexts longer than pretraining.

    `linear` divides every frequency by `factor`; `llama3` divides low frequencies only, blending
    between wavelengths original_positions/low_freq_factor and original_positions/high_freq_factor
    (Llama 3.1 model card and `config.json`). The last three are None for `linear`.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float | None
    high_freq_factor: float | None
    original_positions: int | None

    def __post_init__(self) -> None:
        """Refuses kinds that the model does not compute."""
        if self.kind not in ("linear", "llama3"):
            raise ValueError(
                f"RoPE scaling {self.kind!r} is not supported: use 'default', 'linear' or 'llama3'."
            )
        needed = (self.low_freq_factor, self.high_freq_factor, self.original_positions)
        if self.kind == "llama3" and None in needed:
            raise ValueError(
                "RoPE scaling 'llama3' needs low_freq_factor, high_freq_factor and "
                f"original_max_position_embeddings, got {needed}."
            )
        if not self.factor > 0:
            raise ValueError(f"RoPE scaling factor {self.factor} must be positive.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a LLaMA-family decoder. No field has a default.

    Attributes:
        vocab_size: V, rows of the embedding table (may exceed the tokenizer's size).
        draft_vocab_size: U, rows of the output head: V, or fewer in a drafter that proposes
            frequent tokens only (FR-Spec, arXiv 2502.14856); who runs it has the ids of the rows.
        d_model: D.
        d_ff: F.
        num_layers: L.
        num_heads: H query heads.
        num_kv_heads: K key/value heads, dividing H.
        head_dim: A, not necessarily D / H.
        max_positions: tokens the model was trained for.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None for the default.
        norm_eps: added to the mean square in RMSNorm.
        tied_embeddings: the output head is the embedding table.
        attention_bias: q, k, v and o have biases.
    """

    vocab_size: int
    draft_vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tied_embeddings: bool
    attention_bias: bool

    def __post_init__(self) -> None:
        """Refuses sizes that no model can have."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} = {value!r} must be a positive whole number.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is no multiple of num_kv_heads = "
                f"{self.num_kv_heads}: heads would be dropped."
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size = {self.draft_vocab_size} exceeds vocab_size = "
                f"{self.vocab_size}."
            )
        if self.tied_embeddings and self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"draft_vocab_size = {self.draft_vocab_size} is less than vocab_size = "
                f"{self.vocab_size}, so the head cannot be the table: set tied_embeddings to False."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd: RoPE rotates pairs.")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis letter -> size, for the letters that parameters use."""
        return {
            "V": self.vocab_size,
            "U": self.draft_vocab_size,
            "D": self.d_model,
            "F": self.d_ff,
            "H": self.num_heads,
            "K": self.num_kv_heads,
            "A": self.head_dim,
        }


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a Hugging Face `config.json` of `model_type` "llama".

    Args:
        raw: the parsed JSON object.

    Raises:
        ValueError: for another architecture, a missing key, or an option we do not compute.
    """
    kind = raw.get("model_type")
    if kind != "llama":
        raise ValueError(f"config.json has model_type {kind!r}: only 'llama' models load.")
    refused = {"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1}
    for key, only in refused.items():
        if raw.get(key, only) != only:
            raise ValueError(f"config.json has {key} = {raw[key]!r}: only {only!r} is supported.")
    missing = [
        key
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "rms_norm_eps",
        )
        if key not in raw
    ]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}.")
    heads = raw["num_attention_heads"]
    theta, scaling = _rope_from_hf(raw)
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
        d_model=raw["hidden_size"],
        d_ff=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_positions=raw["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(raw["rms_norm_eps"]),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns the `config.json` object from which `config_from_hf` reads the same config."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.attention_bias,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else _scaling_to_hf(scaling),
    }


def _rope_from_hf(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Reads theta and scaling; `rope_parameters` (transformers >= 5) holds both, else two keys."""
    given = [
        (key, _rope_of(raw[key], raw))
        for key in ("rope_parameters", "rope_scaling")
        if raw.get(key)
    ]
    if not given:
        return _rope_of({}, raw)
    if given[0][1] != given[-1][1]:
        raise ValueError(f"config.json gives RoPE twice and differently: {given}; remove one.")
    return given[0][1]


def _rope_of(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    # Older files say "type", newer ones "rope_type".
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    return theta, RopeScaling(
        kind=kind,
        factor=float(rope.get("factor", 0.0)),
        low_freq_factor=rope.get("low_freq_factor"),
        high_freq_factor=rope.get("high_freq_factor"),
        original_positions=rope.get("original_max_position_embeddings"),
    )


def _scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        out["low_freq_factor"] = scaling.low_freq_factor
        out["high_freq_factor"] = scaling.high_freq_factor
        out["original_max_position_embeddings"] = scaling.original_positions
    return out
