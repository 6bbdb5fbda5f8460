"""What vLLM and SGLang load in environments of their own, by this folder on their ``PYTHONPATH``.

Its modules import nothing of Changeover, and of each other by their bare names.
"""
