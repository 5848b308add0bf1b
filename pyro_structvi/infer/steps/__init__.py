"""One step of optimization, by Python or as a replay of recorded operations.

``eager.py`` has the step of Python, and ``compiled.py`` the life of a step that is recorded. Such a step
is in ``replayed.py``, its graph of operations in ``recording.py``. ``state.py`` has the values that a
step depends on and changes, and ``optimizer.py`` its update.
"""
