"""Checks of ``salientpp doctor``. Each is a function of a :class:`Machine` that returns a :class:`Finding`; :data:`CHECKS` lists them."""
