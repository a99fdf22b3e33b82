"""Published model sizes by name. Each figure is from the model's own `config.json`."""

from models.config import ModelConfig, RopeScaling


def _smollm2(
    d_model: int, d_ff: int, layers: int, heads: int, kv: int, theta: float
) -> ModelConfig:
    return ModelConfig(
        vocab_size=49152,
        draft_vocab_size=49152,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=64,
        max_positions=8192,
        rope_theta=theta,
        rope_scaling=None,
        norm_eps=1e-5,
        tied_embeddings=True,
        attention_bias=False,
    )


def _llama1(d_model: int, d_ff: int, layers: int, heads: int, eps: float) -> ModelConfig:
    return ModelConfig(
        vocab_size=32000,
        draft_vocab_size=32000,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=d_model // heads,
        max_positions=2048,
        rope_theta=10000.0,
        rope_scaling=None,
        norm_eps=eps,
        tied_embeddings=False,
        attention_bias=False,
    )


def _llama3(
    d_model: int, d_ff: int, layers: int, heads: int, head_dim: int, factor: float, tied: bool
) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256,
        draft_vocab_size=128256,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        max_positions=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            kind="llama3",
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_positions=8192,
        ),
        norm_eps=1e-5,
        tied_embeddings=tied,
        attention_bias=False,
    )


PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3, 100000.0),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5, 100000.0),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, 130000.0),
    "llama-68m": _llama1(768, 3072, 2, 12, 1e-6),
    "llama-160m": _llama1(768, 3072, 12, 12, 1e-6),
    "llama-7b": _llama1(4096, 11008, 32, 32, 1e-6),
    "llama-13b": _llama1(5120, 13824, 40, 40, 1e-6),
    "llama-30b": _llama1(6656, 17920, 60, 52, 1e-6),
    "llama-65b": _llama1(8192, 22016, 80, 64, 1e-5),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 64, 32.0, True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 128, 32.0, True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 128, 8.0, False),
}


def preset(name: str) -> ModelConfig:
    """Returns the config called `name`.

    Raises:
        ValueError: if there is none; the message lists all.
    """
    if name not in PRESETS:
        raise ValueError(f"No preset {name!r}: choose one of {', '.join(sorted(PRESETS))}.")
    return PRESETS[name]
