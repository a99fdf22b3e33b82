"""What turns tokens into logits? LLaMA-family models, their caches, checkpoints and tokenizers."""
