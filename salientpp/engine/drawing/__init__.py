"""Draws the batches of a loader. Each method of drawing is one file with a :class:`~salientpp.engine.drawing.method.DrawingMethod`."""
