"""A decoder of our own for plain dense models: the same weights, far fewer operations a step."""

from kvant.models.fused.decoder import FusedDecoder, fuse

__all__ = ["FusedDecoder", "fuse"]
