"""A run as a page and as text, derived from its journal alone.

Self-contained: no network, no script from elsewhere.
"""
