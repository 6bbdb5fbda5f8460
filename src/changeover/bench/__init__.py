"""Load generation against an OpenAI-compatible server, statistics, comparison of two results.

Tokens are counted by the server (``usage``) or not at all; nothing here is guessed.
"""
