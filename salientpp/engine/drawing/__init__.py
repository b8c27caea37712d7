"""Draws the batches of a loader. A way of drawing is one file with a :class:`~salientpp.engine.drawing.method.DrawingMethod`."""
