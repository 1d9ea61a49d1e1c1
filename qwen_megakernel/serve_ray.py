"""`serve run qwen_megakernel.serve_ray:app`: the server on Ray Serve. Its code is in server/ray.py."""

from qwen_megakernel.server.ray import Args, app

__all__ = ["Args", "app"]
