"""Looks at an engine from outside: is it right on this machine, and how fast is it?

qwen_megakernel never imports this package. It names it twice: the commands `verify`, `bench` and `doctor`, and the
process of the self-check.
"""
