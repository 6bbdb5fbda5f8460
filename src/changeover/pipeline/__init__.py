"""What a user writes (spec), what will happen (plan), doing it (runner), the record (journal).

A phase hands the next one files and a clearance, never live objects.
"""
