"""One file or folder an engine behind one small protocol: start, readiness, drain, capture, speculation.

Engines live in environments of their own and are started by path; only the embedded one is our code.
"""
