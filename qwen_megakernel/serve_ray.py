"""`serve run qwen_megakernel.serve_ray:app`: the server on Ray Serve. Its code is in server/ray/app.py."""

from qwen_megakernel.server.ray.app import Args, app

__all__ = ["Args", "app"]
