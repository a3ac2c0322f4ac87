"""Fuzzing of what comes from outside a process: frames, the token cache, the weights' state page, saved states."""
