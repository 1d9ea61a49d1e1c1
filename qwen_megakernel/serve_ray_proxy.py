"""`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=qwen_megakernel.serve_ray_proxy.middleware`: see server/ray/proxy.py."""

from qwen_megakernel.server.ray.proxy import middleware

__all__ = ["middleware"]
