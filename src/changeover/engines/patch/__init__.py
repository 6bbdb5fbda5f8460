"""Patches of an engine's source, for versions and models that no hook reaches: a copy put first on the path, or the
installed file itself until it is restored.
"""
