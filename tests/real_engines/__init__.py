"""Real vLLM and SGLang on a CPU, stopped in the ways in which they are stopped in the wild.

Their environments are made by ``.ci/engines``; ``CHANGEOVER_ENGINES`` says where they are.
"""
