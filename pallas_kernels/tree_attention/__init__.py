"""Attention of the nodes of a token tree over a cached prefix and over the tree itself."""

from pallas_kernels.tree_attention.reference import tree_attention

__all__ = ["tree_attention"]
