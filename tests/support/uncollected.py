"""Pauses the garbage collector while a server imports what it preloads: imports make next to no garbage. ``preloaded`` ends the pause."""

import gc

gc.disable()
