"""The reference engine: an OpenAI-compatible server on transformers, with capture and EAGLE-3 decoding.

It runs as a process of its own (``python -m changeover.engines.embedded``) and favours being readable and
exact; it promises neither tensor parallelism nor the throughput of the engines that it is compared with.
"""
